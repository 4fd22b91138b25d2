#include "core/pin_limits.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "core/host_mapping.h"
#include "fake_machine.h"
#include "registering_backend.h"

namespace roundpipe {
namespace {

PinLimits of(const FakeMachine& machine) { return read_pin_limits(machine.limits(), machine.root()); }

TEST(PinLimits, OnlyWsl2HasAWall) {
  FakeMachine machine;
  machine.memory(1000 * kMiB, 900 * kMiB);
  EXPECT_EQ(of(machine).wall_bytes, 0U);
  for (const char* release : {"6.8.0-31-generic", "4.4.0-19041-Microsoft"}) {
    machine.write("/proc/sys/kernel/osrelease", std::string(release) + "\n");
    EXPECT_EQ(of(machine).wall_bytes, 0U) << release;
    EXPECT_EQ(of(machine).room_bytes(77), 77U);
    EXPECT_EQ(of(machine).describe(), "");
  }
  for (const char* release : {"5.15.167.4-microsoft-standard-WSL2", "6.6.0-mine-WSL2", "6.1.0-microsoft-custom"}) {
    machine.write("/proc/sys/kernel/osrelease", std::string(release) + "\n");
    EXPECT_EQ(of(machine).wall_bytes, 500 * kMiB) << release;
  }
  EXPECT_NE(of(machine).describe().find("WSL2 page-locks at most about 500.00 MiB"), std::string::npos);
}

TEST(PinLimits, WhatIsLockedCountsAgainstTheWall) {
  RegisteringBackend backend;
  const std::size_t before = read_pin_limits({}).locked_bytes;
  {
    const HostMapping mapping(&backend, 8 * kMiB, true, kMiB);
    const HostMapping pageable(nullptr, 8 * kMiB, true, kMiB);
    PinLimits limits = read_pin_limits({});
    EXPECT_EQ(limits.locked_bytes, before + 8 * kMiB);
    limits.wall_bytes = limits.locked_bytes + 5 * kMiB;
    EXPECT_EQ(limits.room_bytes(100 * kMiB), 5 * kMiB);
    EXPECT_EQ(limits.room_bytes(3 * kMiB), 3 * kMiB);
    limits.wall_bytes = kMiB;
    EXPECT_EQ(limits.room_bytes(100 * kMiB), 0U);
  }
  backend.fail_at = 12;  // the fourth piece of the next one
  EXPECT_THROW(HostMapping(&backend, 8 * kMiB, true, kMiB), DriverError);
  EXPECT_EQ(read_pin_limits({}).locked_bytes, before);
}

TEST(PinLimits, TheLimitOfLockedMemoryIsReported) {
  FakeMachine machine;
  EXPECT_EQ(of(machine).memlock_bytes, 0U);
  const std::string head = "Limit                     Soft Limit           Hard Limit           Units     \n";
  machine.write("/proc/self/limits",
                head + "Max locked memory         8388608              16777216             bytes     \n");
  EXPECT_EQ(of(machine).memlock_bytes, 8 * kMiB);
  EXPECT_EQ(of(machine).room_bytes(100 * kMiB), 100 * kMiB) << "the driver does not apply it";
  machine.write("/proc/self/limits",
                head + "Max locked memory         unlimited            unlimited            bytes     \n");
  EXPECT_EQ(of(machine).memlock_bytes, SIZE_MAX);
  EXPECT_GT(read_pin_limits({}).memlock_bytes, 0U);  // this machine's
}

}  // namespace
}  // namespace roundpipe
