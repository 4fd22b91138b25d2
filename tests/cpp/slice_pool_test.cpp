#include "core/slice_pool.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <set>
#include <stdexcept>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"

namespace roundpipe {
namespace {

TEST(SlicePool, EveryElementRunsOnceInSlicesOfWholeGrains) {
  for (const std::size_t threads : {1, 2, 5}) {
    SlicePool pool(threads, nullptr);
    EXPECT_EQ(pool.threads(), threads);
    for (const std::size_t grain : {0, 1, 7, 64, 1000}) {
      for (const std::size_t elements : {0, 1, 6, 7, 8, 999, 1000, 1001, 5000}) {
        std::vector<std::atomic<int>> runs(elements);
        std::atomic<bool> well_cut{true};
        pool.run(elements, grain, [&](std::size_t begin, std::size_t end) {
          const std::size_t step = std::max<std::size_t>(grain, 1);
          if (begin >= end || end > elements || begin % step != 0) well_cut = false;
          if (end != elements && (end - begin) % step != 0) well_cut = false;
          for (std::size_t i = begin; i < end; ++i) ++runs[i];
        });
        EXPECT_TRUE(well_cut) << threads << " " << grain << " " << elements;
        for (const std::atomic<int>& count : runs) ASSERT_EQ(count, 1);
      }
    }
  }
}

TEST(SlicePool, SlicesRunAtTheSameTime) {
  SlicePool pool(3, nullptr);
  std::atomic<int> inside{0};
  std::atomic<bool> met{false};
  // Each slice waits for two others: with fewer than three threads at once this would never end by itself.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  pool.run(3, 1, [&](std::size_t, std::size_t) {
    if (++inside == 3) met = true;
    while (!met && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  EXPECT_TRUE(met);
}

TEST(SlicePool, TheFirstFailureStopsTheRestAndThePoolLivesOn) {
  SlicePool pool(3, nullptr);
  for (int round = 0; round < 50; ++round) {
    try {
      pool.run(1000000, 1, [&](std::size_t begin, std::size_t) {
        if (begin == 0) throw std::runtime_error("slice 0");
      });
      FAIL() << "the failure was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "slice 0");
    }
    std::atomic<std::size_t> sum{0};
    pool.run(100, 1, [&](std::size_t begin, std::size_t end) { sum += end - begin; });
    EXPECT_EQ(sum, 100U);
  }
}

TEST(SlicePool, NoSliceBeginsAfterAFailure) {
  SlicePool pool(1, nullptr);
  int slices = 0;
  EXPECT_THROW(pool.run(1000, 1,
                        [&](std::size_t, std::size_t) {
                          if (++slices == 2) throw std::runtime_error("second");
                        }),
               std::runtime_error);
  EXPECT_EQ(slices, 2);
}

TEST(SlicePool, RefusesNoThreads) { EXPECT_THROW(SlicePool(0, nullptr), InvalidArgument); }

TEST(SlicePool, WhatSlicesDeclareIsOrderedWithTheCaller) {
  HappensBefore checker;
  SlicePool pool(3, &checker);
  std::vector<char> memory(4096);
  const auto self = checker.this_thread();
  for (int round = 0; round < 5; ++round) {
    checker.access(self, Access::kWrite, memory.data(), memory.size(), "before the run");
    pool.run(memory.size(), 64, [&](std::size_t begin, std::size_t end) {
      checker.access(checker.this_thread(), Access::kWrite, memory.data() + begin, end - begin, "a slice");
    });
    checker.access(self, Access::kRead, memory.data(), memory.size(), "after the run");
  }
  EXPECT_TRUE(checker.take_reports().empty());
}

}  // namespace
}  // namespace roundpipe
