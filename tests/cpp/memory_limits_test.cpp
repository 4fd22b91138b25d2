#include "core/memory_limits.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace roundpipe {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A made-up /proc and /sys.
class Machine {
 public:
  Machine() {
    std::string pattern = (std::filesystem::temp_directory_path() / "memory_limits_XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void memory(std::size_t total, std::size_t available) {
    write("/proc/meminfo", "MemTotal:       " + std::to_string(total / 1024) +
                               " kB\nMemFree:   1 kB\nMemAvailable:   " + std::to_string(available / 1024) +
                               " kB\nBuffers: 5 kB\n");
  }
  MemoryLimits limits() const { return read_memory_limits(root_); }

 private:
  std::string root_;
};

constexpr const char* kMountV2 = "25 1 0:22 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

TEST(MemoryLimits, OfThisMachineAreSensible) {
  const MemoryLimits limits = read_memory_limits();
  EXPECT_GT(limits.total_bytes, 64 * kMiB);
  EXPECT_GT(limits.available_bytes, 0U);
  EXPECT_LE(limits.available_bytes, limits.total_bytes);
  EXPECT_LE(limits.headroom_bytes(), limits.available_bytes);
  EXPECT_NE(limits.describe().find("MemAvailable"), std::string::npos);
  EXPECT_EQ(page_bytes(), static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
}

TEST(MemoryLimits, WithoutACgroupTheMachineDecides) {
  Machine machine;
  machine.memory(1000 * kMiB, 400 * kMiB);
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.total_bytes, 1000 * kMiB);
  EXPECT_EQ(limits.cgroup_limit_bytes, 0U);
  EXPECT_EQ(limits.headroom_bytes(), 400 * kMiB);
  EXPECT_NE(limits.describe().find("no cgroup limit"), std::string::npos);
}

TEST(MemoryLimits, UnknownDoesNotLimit) {
  Machine machine;
  EXPECT_EQ(machine.limits().headroom_bytes(), SIZE_MAX);
}

TEST(MemoryLimits, NoMemoryLeftIsNotUnknown) {
  Machine machine;
  machine.memory(1000 * kMiB, 0);
  EXPECT_EQ(machine.limits().headroom_bytes(), 0U);
}

TEST(MemoryLimits, Version2CountsWhatTheKernelCannotDrop) {
  Machine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/user.slice/job\n");
  const std::string group = "/sys/fs/cgroup/user.slice/job/";
  machine.write(group + "memory.max", std::to_string(300 * kMiB) + "\n");
  machine.write(group + "memory.current", std::to_string(120 * kMiB) + "\n");
  machine.write(group + "memory.stat", "anon 1\ninactive_file " + std::to_string(20 * kMiB) + "\nactive_file 7\n");
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.cgroup_limit_bytes, 300 * kMiB);
  EXPECT_EQ(limits.cgroup_used_bytes, 100 * kMiB);
  EXPECT_EQ(limits.headroom_bytes(), 200 * kMiB);
  EXPECT_NE(limits.describe().find("cgroup limit 300.00 MiB with 100.00 MiB used"), std::string::npos)
      << limits.describe();
}

TEST(MemoryLimits, TheTightestGroupOnTheWayUpDecides) {
  Machine machine;
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

TEST(MemoryLimits, AGroupOverItsLimitHasNoRoom) {
  Machine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", kMountV2);
  machine.write("/proc/self/cgroup", "0::/a\n");
  machine.write("/sys/fs/cgroup/a/memory.max", "1000");
  machine.write("/sys/fs/cgroup/a/memory.current", "2000");
  EXPECT_EQ(machine.limits().headroom_bytes(), 0U);
}

TEST(MemoryLimits, Version1InAContainer) {
  Machine machine;
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
  machine.write(group + "memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(10 * kMiB) + "\n");
  machine.write("/sys/fs/cgroup/my memory/memory.limit_in_bytes", "9223372036854771712");
  machine.write("/sys/fs/cgroup/my memory/memory.usage_in_bytes", "1");
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.cgroup_limit_bytes, 250 * kMiB);
  EXPECT_EQ(limits.cgroup_used_bytes, 50 * kMiB);
}

TEST(MemoryLimits, AGroupOutsideTheMountIsSeenAtTheMountPoint) {
  Machine machine;
  machine.memory(1000 * kMiB, 800 * kMiB);
  machine.write("/proc/self/mountinfo", "35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  machine.write("/proc/self/cgroup", "4:memory:/docker/abcdef\n");
  machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(90 * kMiB));
  machine.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(40 * kMiB));
  EXPECT_EQ(machine.limits().headroom_bytes(), 50 * kMiB);
}

TEST(MemoryLimits, BytesAreFormattedForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(std::size_t{3} << 30), "3.00 GiB");
  EXPECT_EQ(format_bytes(SIZE_MAX), "16.00 EiB");
}

}  // namespace
}  // namespace roundpipe
