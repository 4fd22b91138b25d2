// Sixteen floats in an array. For a translation unit that has defined RP_TARGET; see vector.h.
#pragma once

#include <bit>
#include <cmath>

#include "cpu/vector.h"

namespace roundpipe::cpu {
namespace {

RP_INLINE float from_bfloat16(std::uint16_t half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }

RP_INLINE std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// Every number of 16 bits is exact in 32; a NaN is quieted, as the x86 instruction does.
RP_INLINE float from_float16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000U} << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1F;
  const std::uint32_t fraction = half & 0x3FF;
  const std::uint32_t normal = ((exponent + 112) << 23) | (fraction << 13);
  const std::uint32_t special = 0x7F800000 | (fraction << 13) | (fraction != 0 ? 0x400000U : 0U);
  const auto subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(fraction) * 0x1p-24F);
  return std::bit_cast<float>(sign | (exponent == 0 ? subnormal : exponent == 31 ? special : normal));
}

RP_INLINE std::uint16_t to_float16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000;
  const std::uint32_t magnitude = bits & 0x7FFFFFFF;
  // The carry of the rounding runs into the exponent, which is right up to infinity; beyond it the clamp is.
  const std::uint32_t wide = (magnitude - (112U << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  const std::uint32_t normal = wide < 0x7C00 ? wide : 0x7C00;
  // Below 2^-14 the result counts units of 2^-24, which is the spacing of floats from 0.5 to 1: the addition rounds.
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3F000000;
  const std::uint32_t nan = 0x7E00 | ((magnitude >> 13) & 0x3FF);
  return static_cast<std::uint16_t>(sign | (magnitude > 0x7F800000   ? nan
                                            : magnitude < 0x38800000 ? subnormal
                                                                     : normal));
}

// Arrays with loops of fixed length, for the compiler to vectorise as the target allows.
struct Portable {
  struct Vec {
    float lane[kLanes];
  };

  static bool supported() noexcept { return true; }

  template <DType S>
  static RP_INLINE Vec load(const std::byte* from) {
    Vec value;
    if constexpr (S == DType::kFloat32) {
      std::memcpy(value.lane, from, sizeof value.lane);
    } else {
      std::uint16_t half[kLanes];
      std::memcpy(half, from, sizeof half);
      for (std::size_t i = 0; i < kLanes; ++i) {
        value.lane[i] = S == DType::kBFloat16 ? from_bfloat16(half[i]) : from_float16(half[i]);
      }
    }
    return value;
  }

  template <DType D>
  static RP_INLINE void store(std::byte* to, const Vec& value) {
    if constexpr (D == DType::kFloat32) {
      std::memcpy(to, value.lane, sizeof value.lane);
    } else {
      std::uint16_t half[kLanes];
      for (std::size_t i = 0; i < kLanes; ++i) {
        half[i] = D == DType::kBFloat16 ? to_bfloat16(value.lane[i]) : to_float16(value.lane[i]);
      }
      std::memcpy(to, half, sizeof half);
    }
  }

  template <DType D>
  static RP_INLINE void stream(std::byte* to, const Vec& value) {
    store<D>(to, value);
  }

  static RP_INLINE Vec add(const Vec& a, const Vec& b) {
    Vec sum;
    for (std::size_t i = 0; i < kLanes; ++i) sum.lane[i] = a.lane[i] + b.lane[i];
    return sum;
  }
  static RP_INLINE void fence() {}

  static RP_INLINE Vec broadcast(float value) {
    Vec all;
    for (float& lane : all.lane) lane = value;
    return all;
  }
#define RP_LANES(expression)                                            \
  Vec result;                                                           \
  for (std::size_t i = 0; i < kLanes; ++i) result.lane[i] = expression; \
  return result
  static RP_INLINE Vec subtract(const Vec& a, const Vec& b) { RP_LANES(a.lane[i] - b.lane[i]); }
  static RP_INLINE Vec multiply(const Vec& a, const Vec& b) { RP_LANES(a.lane[i] * b.lane[i]); }
  static RP_INLINE Vec multiply_add(const Vec& a, const Vec& b, const Vec& c) {
    RP_LANES(a.lane[i] * b.lane[i] + c.lane[i]);
  }
  static RP_INLINE Vec divide(const Vec& a, const Vec& b) { RP_LANES(a.lane[i] / b.lane[i]); }
  static RP_INLINE Vec square_root(const Vec& a) { RP_LANES(std::sqrt(a.lane[i])); }
  static RP_INLINE Vec maximum(const Vec& a, const Vec& b) {
    RP_LANES(a.lane[i] > b.lane[i] || std::isnan(a.lane[i]) ? a.lane[i] : b.lane[i]);
  }
  static RP_INLINE Vec sign(const Vec& a) {
    RP_LANES(std::isnan(a.lane[i]) ? a.lane[i] : static_cast<float>((a.lane[i] > 0) - (a.lane[i] < 0)));
  }

  static RP_INLINE Vec load_split(const std::byte* upper, const std::byte* low) {
    std::uint16_t high[kLanes];
    std::int16_t rest[kLanes];
    std::memcpy(high, upper, sizeof high);
    std::memcpy(rest, low, sizeof rest);
    RP_LANES(std::bit_cast<float>((std::uint32_t{high[i]} << 16) + static_cast<std::uint32_t>(std::int32_t{rest[i]})));
  }
  static RP_INLINE void store_split(std::byte* upper, std::byte* low, const Vec& value) {
    std::uint16_t high[kLanes], rest[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint32_t bits = std::isnan(value.lane[i]) ? 0x7FC00000 : std::bit_cast<std::uint32_t>(value.lane[i]);
      high[i] = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
      rest[i] = static_cast<std::uint16_t>(bits);
    }
    std::memcpy(upper, high, sizeof high);
    std::memcpy(low, rest, sizeof rest);
  }

  struct Squares {
    double lane[kLanes];
  };
  static RP_INLINE Squares no_squares() { return {}; }
  static RP_INLINE Squares add_squares(Squares sum, const Vec& a) {
    for (std::size_t i = 0; i < kLanes; ++i) sum.lane[i] += double{a.lane[i]} * double{a.lane[i]};
    return sum;
  }
  static RP_INLINE void store_squares(double* to, const Squares& sum) { std::memcpy(to, sum.lane, sizeof sum.lane); }

  struct Bits {
    std::uint32_t lane[kLanes];
  };
  static RP_INLINE Bits lane_numbers(std::uint32_t first) {
    Bits bits;
    for (std::size_t i = 0; i < kLanes; ++i) bits.lane[i] = first + static_cast<std::uint32_t>(i);
    return bits;
  }
  static RP_INLINE Bits exclusive_or(Bits a, std::uint32_t b) {
    for (std::uint32_t& lane : a.lane) lane ^= b;
    return a;
  }
  static RP_INLINE Bits multiply(Bits a, std::uint32_t b) {
    for (std::uint32_t& lane : a.lane) lane *= b;
    return a;
  }
  template <int kShift>
  static RP_INLINE Bits fold(Bits a) {  // a ^ a >> shift
    for (std::uint32_t& lane : a.lane) lane ^= lane >> kShift;
    return a;
  }
  static RP_INLINE Bits upper_half(Bits a) {
    for (std::uint32_t& lane : a.lane) lane >>= 16;
    return a;
  }
  static RP_INLINE void store_stochastic(std::byte* to, const Vec& value, const Bits& random) {
    std::uint16_t half[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) {
      const std::uint32_t rounded = (std::bit_cast<std::uint32_t>(value.lane[i]) + (random.lane[i] & 0xFFFF)) >> 16;
      half[i] = static_cast<std::uint16_t>(std::isnan(value.lane[i]) ? 0x7FC0 : rounded);
    }
    std::memcpy(to, half, sizeof half);
  }
#undef RP_LANES
};

}  // namespace
}  // namespace roundpipe::cpu
