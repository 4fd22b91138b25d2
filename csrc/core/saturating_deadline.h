// Deadlines that a caller's "for ever" (milliseconds::max) cannot overflow.
#pragma once

#include <algorithm>
#include <chrono>

namespace roundpipe {

inline std::chrono::steady_clock::time_point saturating_deadline(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
  return std::chrono::steady_clock::now() + std::clamp(timeout, std::chrono::milliseconds(0), kLongest);
}

inline std::chrono::milliseconds left_until(std::chrono::steady_clock::time_point deadline) {
  return std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
}

}  // namespace roundpipe
