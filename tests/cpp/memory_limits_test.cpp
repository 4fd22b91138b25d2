#include "core/memory_limits.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "fake_machine.h"

namespace roundpipe {
namespace {

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
  FakeMachine machine;
  machine.memory(1000 * kMiB, 400 * kMiB);
  const MemoryLimits limits = machine.limits();
  EXPECT_EQ(limits.total_bytes, 1000 * kMiB);
  EXPECT_EQ(limits.cgroup_limit_bytes, 0U);
  EXPECT_EQ(limits.headroom_bytes(), 400 * kMiB);
  EXPECT_NE(limits.describe().find("no cgroup limit"), std::string::npos);
}

TEST(MemoryLimits, UnknownDoesNotLimit) {
  FakeMachine machine;
  EXPECT_EQ(machine.limits().headroom_bytes(), SIZE_MAX);
}

TEST(MemoryLimits, NoMemoryLeftIsNotUnknown) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 0);
  EXPECT_EQ(machine.limits().headroom_bytes(), 0U);
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
