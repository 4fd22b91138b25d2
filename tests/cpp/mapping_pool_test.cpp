#include "core/mapping_pool.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <random>
#include <utility>
#include <vector>

namespace roundpipe {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

HostMapping mapping(std::size_t bytes) { return HostMapping(nullptr, bytes, false, kMiB); }

TEST(MappingPool, FitsBestAndCutsTheRest) {
  MappingPool pool;
  EXPECT_EQ(pool.take_pooled(256), nullptr);
  std::byte* const base = pool.add(mapping(kMiB), true, 256 * kKiB);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
  std::byte* const small = pool.take_pooled(64 * kKiB);
  EXPECT_EQ(small, base + 256 * kKiB);
  std::byte* const next = pool.take_pooled(128 * kKiB);
  EXPECT_EQ(next, small + 64 * kKiB);
  pool.give_back(small, 64 * kKiB);
  // Both the hole and the tail would do: the hole is tighter.
  EXPECT_EQ(pool.take_pooled(48 * kKiB), small);
  EXPECT_EQ(pool.take_pooled(16 * kKiB), small + 48 * kKiB);
  EXPECT_EQ(pool.take_pooled(kMiB), nullptr);
}

TEST(MappingPool, RangesNeverReachOverAMappingsEnd) {
  MappingPool pool;
  // Two megabytes each, aligned at two: the kernel usually places them side by side.
  std::vector<std::byte*> bases;
  for (int i = 0; i < 8; ++i) bases.push_back(pool.add(mapping(2 * kMiB), true, 2 * kMiB));
  for (std::byte* base : bases) pool.give_back(base, 2 * kMiB);
  EXPECT_EQ(pool.take_pooled(2 * kMiB + 256), nullptr);
  for (int left = 7; left >= 0; --left) {
    EXPECT_EQ(pool.detach_idle(0).bytes(), 2 * kMiB);
    EXPECT_EQ(pool.reserved_bytes(), static_cast<std::size_t>(left) * 2 * kMiB);
  }
  EXPECT_FALSE(pool.has_idle());
  EXPECT_EQ(pool.take_pooled(256), nullptr);
}

TEST(MappingPool, RandomUseComesBackWhole) {
  std::mt19937 random(5);
  MappingPool pool;
  std::vector<std::pair<std::byte*, std::size_t>> live;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0 || live.empty()) {
      const std::size_t bytes = 256 * (1 + random() % (random() % 4 == 0 ? 1024 : 32));
      std::byte* data = pool.take_pooled(bytes);
      if (data == nullptr) data = pool.add(mapping(kMiB), true, bytes);
      live.emplace_back(data, bytes);
    } else {
      std::swap(live[random() % live.size()], live.back());
      pool.give_back(live.back().first, live.back().second);
      live.pop_back();
    }
  }
  for (const auto& [data, bytes] : live) pool.give_back(data, bytes);
  const std::size_t mappings = pool.reserved_bytes() / kMiB;
  // Each is one free range again, as long as the mapping.
  for (std::size_t i = 0; i < mappings; ++i) EXPECT_NE(pool.take_pooled(kMiB), nullptr);
  EXPECT_EQ(pool.take_pooled(256), nullptr);
}

TEST(MappingPool, DedicatedMappingsAreReusedWithinAnEighth) {
  MappingPool pool;
  std::byte* const eight = pool.add(mapping(8 * kMiB), false, 8 * kMiB);
  std::byte* const nine = pool.add(mapping(9 * kMiB), false, 9 * kMiB);
  EXPECT_EQ(pool.take_dedicated(kMiB), nullptr) << "nothing is idle";
  pool.give_back(nine, 9 * kMiB);
  pool.give_back(eight, 8 * kMiB);
  EXPECT_EQ(pool.take_pooled(256), nullptr) << "a dedicated mapping is never cut";
  EXPECT_EQ(pool.take_dedicated(9 * kMiB + 256), nullptr);
  EXPECT_EQ(pool.take_dedicated(7 * kMiB), nullptr) << "a seventh would be wasted";
  EXPECT_EQ(pool.take_dedicated(7 * kMiB + 512 * kKiB), eight);
  EXPECT_EQ(pool.take_dedicated(8 * kMiB), nine);
  EXPECT_EQ(pool.take_dedicated(8 * kMiB), nullptr);
  pool.give_back(nine, 8 * kMiB);  // what was handed out, not what the mapping holds
  EXPECT_TRUE(pool.has_idle());
  EXPECT_EQ(pool.take_dedicated(9 * kMiB), nine);
}

TEST(MappingPool, TheLongestIdleGoesFirstButTheTooLargeAlone) {
  MappingPool pool;
  std::byte* const one = pool.add(mapping(kMiB), false, kMiB);
  std::byte* const two = pool.add(mapping(2 * kMiB), false, 2 * kMiB);
  std::byte* const five = pool.add(mapping(5 * kMiB), false, 5 * kMiB);
  pool.give_back(two, 2 * kMiB);
  pool.give_back(one, kMiB);
  EXPECT_EQ(pool.detach_idle(3 * kMiB).base(), nullptr);
  pool.give_back(five, 5 * kMiB);
  EXPECT_EQ(pool.detach_idle(3 * kMiB).base(), five);
  EXPECT_EQ(pool.detach_idle(3 * kMiB).base(), nullptr);
  EXPECT_EQ(pool.detach_idle(2 * kMiB).base(), two);
  EXPECT_EQ(pool.reserved_bytes(), kMiB);
}

}  // namespace
}  // namespace roundpipe
