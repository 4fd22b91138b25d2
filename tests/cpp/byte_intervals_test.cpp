#include "core/byte_intervals.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

namespace roundpipe {
namespace {

TEST(ByteIntervals, EqualNeighboursInsideARangeBecomeOnePiece) {
  ByteIntervals<int> intervals;
  for (std::uintptr_t at = 0; at < 100; at += 10)
    intervals.update(at, at + 10, [&](int& v) { v = static_cast<int>(at); });
  EXPECT_EQ(intervals.size(), 10U);
  intervals.update(5, 95, [](int& v) { v = 1; });
  EXPECT_EQ(intervals.size(), 3U);
  intervals.update(5, 95, [](int& v) { ++v; });
  EXPECT_EQ(intervals.size(), 3U);
}

TEST(ByteIntervals, EmptyRangesTouchNothing) {
  ByteIntervals<int> intervals;
  intervals.update(7, 7, [](int&) { FAIL(); });
  intervals.erase(9, 3);
  EXPECT_EQ(intervals.size(), 0U);
}

TEST(ByteIntervals, EraseCutsInsideAPiece) {
  ByteIntervals<int> intervals;
  intervals.update(0, 30, [](int& v) { v = 1; });
  intervals.erase(10, 20);
  EXPECT_EQ(intervals.size(), 2U);
  int sum = 0, pieces = 0;
  intervals.update(0, 30, [&](int& v) { sum += v, ++pieces; });
  EXPECT_EQ(sum, 2);
  EXPECT_EQ(pieces, 3);
}

// Against one value a byte.
TEST(ByteIntervals, AgreesWithAnArrayOfBytes) {
  constexpr std::uintptr_t kBytes = 48;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    ByteIntervals<int> intervals;
    std::array<int, kBytes> bytes{};
    for (int step = 0; step < 60; ++step) {
      std::uintptr_t begin = random() % kBytes, end = random() % (kBytes + 1);
      if (begin > end) std::swap(begin, end);
      const int action = static_cast<int>(random() % 3);
      if (action == 0) {
        intervals.erase(begin, end);
        for (auto at = begin; at < end; ++at) bytes[at] = 0;
      } else {
        const auto change = [&](int& v) { v = action == 1 ? step : v * 2 + 1; };
        intervals.update(begin, end, change);
        for (auto at = begin; at < end; ++at) change(bytes[at]);
      }
      ASSERT_LE(intervals.size(), kBytes);
      for (std::uintptr_t at = 0; at < kBytes; ++at) {
        ByteIntervals<int> copy = intervals;
        int seen = -1, visits = 0;
        copy.update(at, at + 1, [&](int& v) { seen = v, ++visits; });
        ASSERT_EQ(visits, 1);
        ASSERT_EQ(seen, bytes[at]) << "seed " << seed << " step " << step << " byte " << at;
      }
    }
  }
}

}  // namespace
}  // namespace roundpipe
