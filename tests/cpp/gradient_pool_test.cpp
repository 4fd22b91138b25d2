#include "core/gradient_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"
#include "pooled_world.h"

namespace roundpipe {
namespace {

struct Memory {
  explicit Memory(std::size_t bytes) : words(std::make_shared<std::vector<std::uint64_t>>(bytes / 8)) {}
  std::shared_ptr<GradientPool> pool(HappensBefore* checker = nullptr) {
    return GradientPool::make(words->data(), words->size() * 8, words, [this] { ++pokes; }, checker);
  }
  std::shared_ptr<std::vector<std::uint64_t>> words;
  std::atomic<int> pokes{0};
};

TEST(GradientPool, PlacesAreDisjointAlignedAndComeBack) {
  Memory memory(2048);
  const auto pool = memory.pool();
  auto* base = reinterpret_cast<std::byte*>(memory.words->data());
  auto first = pool->try_take(300), second = pool->try_take(512), third = pool->try_take(1024);
  EXPECT_EQ(first.get(), base);
  EXPECT_EQ(second.get(), base + 512);
  EXPECT_EQ(third.get(), base + 1024);
  EXPECT_EQ(pool->try_take(1), nullptr);
  EXPECT_EQ(pool->stats().used_bytes, 1836U);
  EXPECT_EQ(memory.pokes, 0);
  second.reset();
  EXPECT_EQ(memory.pokes, 1);
  EXPECT_EQ(pool->try_take(513), nullptr) << "the gap is of 512 bytes";
  second = pool->try_take(512);
  EXPECT_EQ(second.get(), base + 512);
  first.reset();
  second.reset();
  first = pool->try_take(1024);
  EXPECT_EQ(first.get(), base) << "neighbours join";
  third.reset();
  const GradientPoolStats stats = pool->stats();
  EXPECT_EQ(stats.bytes, 2048U);
  EXPECT_EQ(stats.used_bytes, 1024U);
  EXPECT_EQ(stats.peak_bytes, 2048U);
  EXPECT_EQ(stats.taken, 5U);
  EXPECT_EQ(stats.refused, 2U);
}

TEST(GradientPool, WhatNeverFitsIsRefused) {
  Memory memory(512);
  const auto pool = memory.pool();
  EXPECT_THROW(pool->try_take(513), InvalidArgument);
  EXPECT_THROW(pool->try_take(0), InvalidArgument);
  EXPECT_NE(pool->try_take(512), nullptr);
  EXPECT_THROW(GradientPool::make(nullptr, 256, nullptr, {}, nullptr), InvalidArgument);
}

TEST(GradientPool, APlaceKeepsThePoolAndItsMemory) {
  Memory memory(512);
  auto pool = memory.pool();
  const std::weak_ptr<GradientPool> alive = pool;
  std::shared_ptr<std::byte> place = pool->try_take(512), copy = place;
  pool.reset();
  place.reset();
  EXPECT_FALSE(alive.expired());
  EXPECT_EQ(memory.words.use_count(), 2);
  copy.reset();
  EXPECT_TRUE(alive.expired());
  EXPECT_EQ(memory.words.use_count(), 1);
  EXPECT_EQ(memory.pokes, 1);
}

// Whoever writes a place comes after whoever had it before; and a reader that keeps an address too long is seen.
TEST(GradientPool, TheCheckerKnowsTheOrderOfOwners) {
  HappensBefore checker;
  Memory memory(1024);
  const auto pool = memory.pool(&checker);
  for (int i = 0; i < 3; ++i) {
    std::thread([&] {
      const auto place = pool->try_take(1024);
      checker.access(checker.this_thread(), Access::kWrite, place.get(), 1024, "an owner");
      std::memset(place.get(), 1, 1024);
    }).join();  // which tells the checker nothing
  }
  EXPECT_TRUE(checker.take_reports().empty());
  EXPECT_EQ(memory.words->front(), ~std::uint64_t{0}) << "NaNs";
  const std::byte* late = pool->try_take(1024).get();
  std::thread([&] { checker.access(checker.this_thread(), Access::kRead, late, 1024, "a late reader"); }).join();
  EXPECT_FALSE(checker.take_reports().empty());
}

TEST(GradientPool, ManyThreads) {
  Memory memory(8192);
  HappensBefore checker;
  const auto pool = memory.pool(&checker);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<std::pair<std::shared_ptr<std::byte>, std::size_t>> held;
      for (int i = 0; i < 500; ++i) {
        const std::size_t bytes = 1 + random() % 3000;
        if (auto place = held.size() < 3 ? pool->try_take(bytes) : nullptr) {
          checker.access(checker.this_thread(), Access::kWrite, place.get(), bytes, "an owner");
          std::memset(place.get(), static_cast<int>(t), bytes);
          held.emplace_back(std::move(place), bytes);
        } else if (!held.empty()) {
          const auto& [mine, size] = held.front();
          for (std::size_t b = 0; b < size; ++b) ASSERT_EQ(mine.get()[b], static_cast<std::byte>(t));
          held.erase(held.begin());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->stats().used_bytes, 0U);
  EXPECT_GT(pool->stats().refused, 0U);
  EXPECT_TRUE(checker.take_reports().empty());
}

// The smallest pools, units of any size that finish in any order on 1 to 4 devices, shared units, updates that wait at
// the head of the queue, aborted jobs: everything ends, nobody sees a wrong value, and the checker is silent.
TEST(GradientPool, UpdatesFromAPoolSeeTheValuesOfProgramOrder) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr std::uint64_t kCount = 400;
#else
  constexpr std::uint64_t kCount = 1'600;
#endif
  constexpr std::uint64_t kPerWorld = 25;
  std::uint64_t poisoned = 0, taken = 0, refused = 0;
  for (std::uint64_t first = 0; first < kCount; first += kPerWorld) {
    PooledWorld world(1 + first / kPerWorld % 4, first);
    for (std::uint64_t seed = first; seed < first + kPerWorld; ++seed) {
      ASSERT_TRUE(world.run_scenario(seed)) << "scenario " << seed << ": " << testing::PrintToString(world.problems());
    }
    poisoned += world.poisoned();
    taken += world.pool().taken;
    refused += world.pool().refused;
  }
  EXPECT_GT(taken, 4 * kCount);
  EXPECT_GT(refused, kCount / 4) << "nobody ever waited for a place";
  EXPECT_GT(poisoned, kCount / 10);
}

}  // namespace
}  // namespace roundpipe
