// A set of addresses as disjoint ranges: begin -> end.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace roundpipe {

using AddressRanges = std::map<std::uintptr_t, std::uintptr_t>;

// The range that holds `at`, or the first one after it.
AddressRanges::const_iterator at_or_after(const AddressRanges& ranges, std::uintptr_t at);
// Joins what overlaps or touches [begin, end), which is not empty.
void add(AddressRanges& ranges, std::uintptr_t begin, std::uintptr_t end);
// Takes what `taken` covers out of `ranges`.
void subtract(AddressRanges& ranges, const AddressRanges& taken);
// Equal ones by address.
std::vector<std::pair<std::uintptr_t, std::uintptr_t>> largest_first(const AddressRanges& ranges);

}  // namespace roundpipe
