#include "core/address_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace roundpipe {
namespace {

TEST(AddressRanges, AgreesWithASetOfAddresses) {
  constexpr std::uintptr_t kSpan = 64;
  std::mt19937 random(3);
  const auto below = [&](std::uintptr_t n) { return std::uniform_int_distribution<std::uintptr_t>(0, n - 1)(random); };
  for (int round = 0; round < 300; ++round) {
    AddressRanges ranges, taken;
    std::vector<bool> in(kSpan, false);
    for (std::uintptr_t i = below(8); i-- > 0;) {
      const std::uintptr_t begin = below(kSpan), end = begin + 1 + below(kSpan - begin);
      add(ranges, begin, end);
      std::fill(in.begin() + static_cast<std::ptrdiff_t>(begin), in.begin() + static_cast<std::ptrdiff_t>(end), true);
    }
    for (std::uintptr_t i = below(4); i-- > 0;) {
      const std::uintptr_t begin = below(kSpan), end = begin + 1 + below(kSpan - begin);
      add(taken, begin, end);
      std::fill(in.begin() + static_cast<std::ptrdiff_t>(begin), in.begin() + static_cast<std::ptrdiff_t>(end), false);
    }
    subtract(ranges, taken);
    AddressRanges expected;  // maximal runs; add() leaves no two that touch, and subtract() makes none
    for (std::uintptr_t at = 0; at < kSpan; ++at) {
      if (in[at] && (at == 0 || !in[at - 1])) expected[at] = at + 1;
      if (in[at]) std::prev(expected.end())->second = at + 1;
    }
    ASSERT_EQ(ranges, expected);
    for (std::uintptr_t at = 0; at < kSpan; ++at) {
      const auto found = at_or_after(ranges, at);
      const auto first = std::find_if(expected.begin(), expected.end(), [&](const auto& r) { return r.second > at; });
      ASSERT_EQ(found == ranges.end(), first == expected.end());
      if (first != expected.end()) {
        ASSERT_EQ(found->first, first->first);
      }
    }
    const auto order = largest_first(ranges);
    ASSERT_EQ(order.size(), ranges.size());
    for (std::size_t i = 1; i < order.size(); ++i) {
      const auto size = [&](std::size_t k) { return order[k].second - order[k].first; };
      ASSERT_TRUE(size(i - 1) > size(i) || (size(i - 1) == size(i) && order[i - 1].first < order[i].first));
    }
  }
}

}  // namespace
}  // namespace roundpipe
