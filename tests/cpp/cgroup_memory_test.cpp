#include "core/cgroup_memory.h"

#include <gtest/gtest.h>

#include <string>

#include "fake_machine.h"

namespace roundpipe {
namespace {

constexpr const char* kMountV2 = "25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

TEST(CgroupMemory, Version2CountsWhatTheKernelCannotDrop) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/user.slice/job\n");
  const std::string group = "/sys/fs/cgroup/user.slice/job/";
  machine.write(group + "memory.max", std::to_string(300 * kMiB) + "\n");
  machine.write(group + "memory.current", std::to_string(120 * kMiB) + "\n");
  machine.write(group + "memory.stat", "anon 1\ninactive_file " + std::to_string(20 * kMiB) + "\nactive_file " +
                                           std::to_string(30 * kMiB) + "\n");
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.cgroup_limit_bytes, 300 * kMiB);
  EXPECT_EQ(limits.cgroup_used_bytes, 70 * kMiB);
  EXPECT_EQ(limits.headroom_bytes(), 230 * kMiB);
  EXPECT_NE(limits.describe().find("cgroup limit 300.00 MiB with 70.00 MiB used"), std::string::npos)
      << limits.describe();
}

TEST(CgroupMemory, TheTightestGroupOnTheWayUpDecides) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/a/b/c\n");
  machine.write("/sys/fs/cgroup/a/b/c/memory.max", "max\n");
  machine.write("/sys/fs/cgroup/a/b/c/memory.current", "5\n");
  machine.write("/sys/fs/cgroup/a/b/memory.max", std::to_string(500 * kMiB));
  machine.write("/sys/fs/cgroup/a/b/memory.current", std::to_string(100 * kMiB));
  machine.write("/sys/fs/cgroup/a/memory.max", std::to_string(600 * kMiB));
  machine.write("/sys/fs/cgroup/a/memory.current", std::to_string(570 * kMiB));
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.cgroup_limit_bytes, 600 * kMiB);
  EXPECT_EQ(limits.headroom_bytes(), 30 * kMiB);
}

TEST(CgroupMemory, AGroupOverItsLimitHasNoRoom) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/a\n");
  machine.write("/sys/fs/cgroup/a/memory.max", "1000");
  machine.write("/sys/fs/cgroup/a/memory.current", "2000");
  EXPECT_EQ(machine.limits().headroom_bytes(), 0U);
}

TEST(CgroupMemory, Version1InAContainer) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  // The mount shows the container's own group as its root, at a path with a blank in it.
  machine.write("/proc/self/mountinfo",
                "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
                "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
                "35 31 0:32 /docker/abc /sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory\n");
  machine.write("/proc/self/cgroup", "8:pids:/x\n4:cpu,memory:/docker/abc/inner\n0::/\n");
  const std::string group = "/sys/fs/cgroup/my memory/inner/";
  machine.write(group + "memory.limit_in_bytes", std::to_string(250 * kMiB));
  machine.write(group + "memory.usage_in_bytes", std::to_string(60 * kMiB));
  machine.write(group + "memory.stat", "inactive_file 1\nactive_file 2\ntotal_inactive_file " +
                                           std::to_string(4 * kMiB) + "\ntotal_active_file " +
                                           std::to_string(6 * kMiB) + "\n");
  machine.write("/sys/fs/cgroup/my memory/memory.limit_in_bytes", "9223372036854771712");
  machine.write("/sys/fs/cgroup/my memory/memory.usage_in_bytes", "1");
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.cgroup_limit_bytes, 250 * kMiB);
  EXPECT_EQ(limits.cgroup_used_bytes, 50 * kMiB);
}

TEST(CgroupMemory, AGroupOutsideTheMountIsSeenAtTheMountPoint) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  machine.write("/proc/self/cgroup", "4:memory:/docker/abcdef\n");
  machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(90 * kMiB));
  machine.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(40 * kMiB));
  EXPECT_EQ(machine.limits().headroom_bytes(), 50 * kMiB);
}

TEST(CgroupMemory, WhatIsSlowedDownCountsAsALimit) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/a/b\n");
  for (const char* group : {"/sys/fs/cgroup/a/b/", "/sys/fs/cgroup/a/"}) {
    machine.write(std::string(group) + "memory.current", std::to_string(100 * kMiB));
  }
  machine.write("/sys/fs/cgroup/a/b/memory.max", std::to_string(500 * kMiB));
  machine.write("/sys/fs/cgroup/a/b/memory.high", std::to_string(300 * kMiB));
  EXPECT_EQ(machine.limits().headroom_bytes(), 200 * kMiB);
  machine.write("/sys/fs/cgroup/a/b/memory.high", "max");
  EXPECT_EQ(machine.limits().headroom_bytes(), 400 * kMiB);
  machine.write("/sys/fs/cgroup/a/memory.high", std::to_string(150 * kMiB));  // of a group that has no maximum
  EXPECT_EQ(machine.limits().headroom_bytes(), 50 * kMiB);
}

TEST(CgroupMemory, OfTwoHierarchiesTheTighterOneBinds) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo",
                std::string(kMountV2) + "35 31 0:32 / /sys/fs/v1/memory rw - cgroup cgroup rw,memory\n");
  machine.write("/proc/self/cgroup", "4:memory:/job\n0::/job\n");
  machine.write("/sys/fs/cgroup/job/memory.max", std::to_string(700 * kMiB));
  machine.write("/sys/fs/cgroup/job/memory.current", "0");
  machine.write("/sys/fs/v1/memory/job/memory.limit_in_bytes", std::to_string(600 * kMiB));
  machine.write("/sys/fs/v1/memory/job/memory.usage_in_bytes", "0");
  EXPECT_EQ(machine.limits().headroom_bytes(), 600 * kMiB);
  EXPECT_EQ(tightest_group(machine.root())->limit_bytes, 600 * kMiB);
}

TEST(CgroupMemory, NoLimitIsNone) {
  FakeMachine machine;
  EXPECT_FALSE(tightest_group(machine.root()).has_value());
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/a\n");
  machine.write("/sys/fs/cgroup/a/memory.max", "max");
  machine.write("/sys/fs/cgroup/a/memory.current", "5");
  EXPECT_FALSE(tightest_group(machine.root()).has_value());
}

}  // namespace
}  // namespace roundpipe
