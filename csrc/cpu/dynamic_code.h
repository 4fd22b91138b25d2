// Eight-bit moments: 256 numbers from 0 to 1 in size, one code each, and a float32 scale for every block of elements.
//
// Note [Dynamic code]
// Block-wise dynamic quantisation as published by Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit Optimizers via
// Block-wise Quantization" (2022): a block's scale is its largest magnitude, and codes stand for decimal fractions
// whose leading zeros are counted by the exponent and whose other bits divide the decade evenly. Seven decades; the
// signed code has 0, 1 and 127 numbers of each sign, the unsigned one 0, 1 and 254 numbers. Each value takes the
// nearest one.
//
// Three additions of ours. A scale has the sign of the block's largest magnitude, because the code has a 1 but no -1:
// else a largest value that is negative would lose 0.7 % each time it is stored. A second moment above zero never
// becomes zero: divided by, it would blow the step up, however small the value is beside the block's largest. And a
// block with a value that is not finite becomes NaN as a whole, which shows in its weights, where a scale of infinity
// would hide it in zeros.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace roundpipe::cpu {

inline constexpr std::size_t kCodeBlock = 256;  // elements a scale; at most 0.016 bytes more for each of them

// Magnitudes ascending and what finds the nearest in two loads: the upper 16 bits of a float between 0 and 1 lead to
// the number below it, and no interval of those holds more than one of the midpoints that are then compared with.
struct DynamicCode {
  static constexpr std::size_t kKeys = 0x3F80 - 0x3400 + 1;  // floats from 2^-23 to 1; what is below is nearest to 0
  static constexpr std::uint32_t kFirstKey = 0x3400;
  std::array<float, 256> values;          // by code
  std::array<float, 257> midpoints;       // between magnitude i and i + 1; infinite beyond the last
  std::array<std::uint8_t, kKeys> below;  // by key: index of a magnitude
  bool is_signed;                         // code 127 + i is magnitude i, code 127 - i its negative
};

const DynamicCode& signed_code();
const DynamicCode& unsigned_code();

}  // namespace roundpipe::cpu
