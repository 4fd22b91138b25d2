#include "core/address_ranges.h"

#include <algorithm>
#include <iterator>

namespace roundpipe {

AddressRanges::const_iterator at_or_after(const AddressRanges& ranges, std::uintptr_t at) {
  auto it = ranges.upper_bound(at);
  if (it != ranges.begin() && std::prev(it)->second > at) --it;
  return it;
}

std::vector<std::pair<std::uintptr_t, std::uintptr_t>> largest_first(const AddressRanges& ranges) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> order(ranges.begin(), ranges.end());
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.second - a.first > b.second - b.first; });
  return order;
}

void subtract(AddressRanges& ranges, const AddressRanges& taken) {
  for (const auto& [begin, end] : taken) {
    auto it = at_or_after(ranges, begin);
    while (it != ranges.end() && it->first < end) {
      const auto [first, last] = *it;
      it = ranges.erase(it);
      if (first < begin) ranges.emplace(first, begin);
      if (end < last) ranges.emplace(end, last);
    }
  }
}

void add(AddressRanges& ranges, std::uintptr_t begin, std::uintptr_t end) {
  auto it = ranges.upper_bound(begin);
  if (it != ranges.begin() && std::prev(it)->second >= begin) {
    --it;
    begin = it->first;
    end = std::max(end, it->second);
    it = ranges.erase(it);
  }
  while (it != ranges.end() && it->first <= end) {
    end = std::max(end, it->second);
    it = ranges.erase(it);
  }
  ranges.emplace(begin, end);
}

}  // namespace roundpipe
