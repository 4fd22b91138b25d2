#include "core/read_ahead.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>

#include "cold_file.h"

namespace roundpipe {
namespace {

constexpr std::chrono::milliseconds kLong{20'000};
constexpr std::size_t kMiB = std::size_t{1} << 20;

TEST(ReadAhead, WhatIsAddedComesIntoMemory) {
  const ColdFile file(64 * kMiB);
  ReadAhead read_ahead(1024 * kMiB);
  EXPECT_EQ(file.resident_bytes(), 0U);
  read_ahead.add(file.data(), 40 * kMiB);  // more than one step of it
  EXPECT_TRUE(file.comes_into_memory(40 * kMiB, kLong));
  read_ahead.add(file.data() + 40 * kMiB, 24 * kMiB);  // the thread sleeps by now, or will
  EXPECT_TRUE(file.comes_into_memory(64 * kMiB, kLong));
}

// All at once, so that its thread sees nothing of it before the rest is forgotten.
TEST(ReadAhead, OfMoreThanIsUsefulTheNewestComesAlone) {
  const ColdFile file(64 * kMiB);
  ReadAhead read_ahead(2 * kMiB);
  read_ahead.add(file.data(), 64 * kMiB);
  const auto deadline = std::chrono::steady_clock::now() + kLong;
  while (!file.resident(63 * kMiB) && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(file.resident(63 * kMiB));
  EXPECT_FALSE(file.resident(0));
  EXPECT_LE(file.resident_bytes(), 8 * kMiB);
}

TEST(ReadAhead, EndsWithoutReadingWhatIsLeftAndTakesMemoryThatIsNotMapped) {
  for (int round = 0; round < 20; ++round) {
    ReadAhead read_ahead(1024 * kMiB);
    auto file = std::make_unique<ColdFile>(4 * kMiB);
    for (int i = 0; i < 100; ++i) read_ahead.add(file->data(), 4 * kMiB);
    file.reset();
  }
}

TEST(ReadAhead, IsLittleBesideTheMemoryOfTheMachine) {
  const MemoryLimits limits = read_memory_limits();
  EXPECT_GE(read_ahead_bytes(), 32 * kMiB);
  EXPECT_LE(read_ahead_bytes(), std::max(32 * kMiB, limits.total_bytes / 8));
}

}  // namespace
}  // namespace roundpipe
