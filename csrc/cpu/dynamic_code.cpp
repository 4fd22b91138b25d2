#include "cpu/dynamic_code.h"

#include <bit>
#include <limits>
#include <vector>

namespace roundpipe::cpu {
namespace {

std::vector<float> magnitudes(bool is_signed) {
  std::vector<float> found{0.0F};
  double decade = 1e-6;
  for (int exponent = 0; exponent < 7; ++exponent, decade *= 10) {
    const int steps = 1 << (is_signed ? exponent : exponent + 1);
    // The middles of `steps` equal parts of the decade from 0.1 to 1.
    for (int i = 0; i < steps; ++i) found.push_back(static_cast<float>(decade * (0.1 + 0.9 * (i + 0.5) / steps)));
  }
  found.push_back(1.0F);
  return found;
}

DynamicCode make_code(bool is_signed) {
  const std::vector<float> found = magnitudes(is_signed);
  DynamicCode code{};
  code.is_signed = is_signed;
  code.midpoints.fill(std::numeric_limits<float>::infinity());
  for (std::size_t i = 0; i + 1 < found.size(); ++i) {
    code.midpoints[i] = static_cast<float>((static_cast<double>(found[i]) + static_cast<double>(found[i + 1])) / 2);
  }
  std::uint8_t index = 0;
  for (std::size_t key = 0; key < DynamicCode::kKeys; ++key) {
    const auto smallest = std::bit_cast<float>((static_cast<std::uint32_t>(key) + DynamicCode::kFirstKey) << 16);
    while (smallest > code.midpoints[index]) ++index;
    code.below[key] = index;
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!is_signed) {
      code.values[i] = found[i];
      continue;
    }
    code.values[127 + i] = found[i];
    if (i <= 127) code.values[127 - i] = -found[i];
  }
  return code;
}

}  // namespace

const DynamicCode& signed_code() {
  static const DynamicCode code = make_code(true);
  return code;
}

const DynamicCode& unsigned_code() {
  static const DynamicCode code = make_code(false);
  return code;
}

}  // namespace roundpipe::cpu
