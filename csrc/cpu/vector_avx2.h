// Sixteen floats in two registers. For a translation unit that has defined RP_TARGET; see vector.h.
#pragma once

#include <immintrin.h>

#include "cpu/vector.h"

namespace roundpipe::cpu {
namespace {

struct Avx2 {
  struct Vec {
    __m256 low, high;
  };

  static bool supported() noexcept {
    return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
           __builtin_cpu_supports("f16c") != 0;
  }

  static RP_INLINE __m128i load_half(const std::byte* from) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  }
  static RP_INLINE __m256 from_bfloat16(__m128i bits) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }

  template <DType S>
  static RP_INLINE Vec load(const std::byte* from) {
    if constexpr (S == DType::kFloat32) {
      return {_mm256_loadu_ps(reinterpret_cast<const float*>(from)),
              _mm256_loadu_ps(reinterpret_cast<const float*>(from) + 8)};
    } else if constexpr (S == DType::kFloat16) {
      return {_mm256_cvtph_ps(load_half(from)), _mm256_cvtph_ps(load_half(from + 16))};
    } else {
      return {from_bfloat16(load_half(from)), from_bfloat16(load_half(from + 16))};
    }
  }

  // Round to nearest even by integer addition; the result stands in the low half of each lane.
  static RP_INLINE __m256i to_bfloat16(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), nan);
  }
  static RP_INLINE __m128i to_float16(__m256 value) {
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  template <DType D>
  static RP_INLINE __m256i narrow(Vec value) {
    if constexpr (D == DType::kBFloat16) {
      // Packing works within 128-bit halves and so swaps the middle quarters.
      return _mm256_permute4x64_epi64(_mm256_packus_epi32(to_bfloat16(value.low), to_bfloat16(value.high)), 0xD8);
    } else {
      return _mm256_set_m128i(to_float16(value.high), to_float16(value.low));
    }
  }

  template <DType D>
  static RP_INLINE void store(std::byte* to, Vec value) {
    if constexpr (D == DType::kFloat32) {
      _mm256_storeu_ps(reinterpret_cast<float*>(to), value.low);
      _mm256_storeu_ps(reinterpret_cast<float*>(to) + 8, value.high);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow<D>(value));
    }
  }

  template <DType D>
  static RP_INLINE void stream(std::byte* to, Vec value) {
    if constexpr (D == DType::kFloat32) {
      _mm256_stream_ps(reinterpret_cast<float*>(to), value.low);
      _mm256_stream_ps(reinterpret_cast<float*>(to) + 8, value.high);
    } else {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), narrow<D>(value));
    }
  }

  static RP_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
  static RP_INLINE void fence() { _mm_sfence(); }

  static RP_INLINE Vec broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static RP_INLINE Vec subtract(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
  static RP_INLINE Vec multiply(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static RP_INLINE Vec multiply_add(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static RP_INLINE Vec divide(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
  static RP_INLINE Vec square_root(Vec a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }

  static RP_INLINE __m256 nan_lanes(__m256 a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
  // The instruction returns its second operand when one is NaN: so only a NaN in the first is lost.
  static RP_INLINE __m256 maximum(__m256 a, __m256 b) { return _mm256_blendv_ps(_mm256_max_ps(a, b), a, nan_lanes(a)); }
  static RP_INLINE Vec maximum(Vec a, Vec b) { return {maximum(a.low, b.low), maximum(a.high, b.high)}; }
  static RP_INLINE __m256 sign(__m256 a) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 above = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0F));
    const __m256 below = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_LT_OQ), _mm256_set1_ps(-1.0F));
    return _mm256_blendv_ps(_mm256_or_ps(above, below), a, nan_lanes(a));
  }
  static RP_INLINE Vec sign(Vec a) { return {sign(a.low), sign(a.high)}; }

  // The low 16 bits of each lane. Packing works within 128-bit halves and so swaps the middle quarters.
  static RP_INLINE __m256i low_halves(__m256i a, __m256i b) {
    const __m256i mask = _mm256_set1_epi32(0xFFFF);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)), 0xD8);
  }
  static RP_INLINE void store_bits(std::byte* to, __m256i bits) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
  }

  static RP_INLINE __m256 join(__m128i upper, __m128i low) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtepu16_epi32(upper), 16), _mm256_cvtepi16_epi32(low)));
  }
  static RP_INLINE Vec load_split(const std::byte* upper, const std::byte* low) {
    return {join(load_half(upper), load_half(low)), join(load_half(upper + 16), load_half(low + 16))};
  }
  static RP_INLINE __m256i quiet_bits(__m256 value) {
    return _mm256_castps_si256(
        _mm256_blendv_ps(value, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000)), nan_lanes(value)));
  }
  static RP_INLINE __m256i rounded_half(__m256i bits) {
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  }
  static RP_INLINE void store_split(std::byte* upper, std::byte* low, Vec value) {
    const __m256i first = quiet_bits(value.low);
    const __m256i second = quiet_bits(value.high);
    store_bits(upper, low_halves(rounded_half(first), rounded_half(second)));
    store_bits(low, low_halves(first, second));
  }

  struct Squares {
    __m256d quarter[4];
  };
  static RP_INLINE Squares no_squares() {
    const __m256d zero = _mm256_setzero_pd();
    return {{zero, zero, zero, zero}};
  }
  static RP_INLINE __m256d add_squares(__m256d sum, __m128 a) {
    const __m256d wide = _mm256_cvtps_pd(a);
    return _mm256_fmadd_pd(wide, wide, sum);
  }
  static RP_INLINE Squares add_squares(Squares sum, Vec a) {
    return {{add_squares(sum.quarter[0], _mm256_castps256_ps128(a.low)),
             add_squares(sum.quarter[1], _mm256_extractf128_ps(a.low, 1)),
             add_squares(sum.quarter[2], _mm256_castps256_ps128(a.high)),
             add_squares(sum.quarter[3], _mm256_extractf128_ps(a.high, 1))}};
  }
  static RP_INLINE void store_squares(double* to, Squares sum) {
    for (int i = 0; i < 4; ++i) _mm256_storeu_pd(to + 4 * i, sum.quarter[i]);
  }

  struct Bits {
    __m256i low, high;
  };
  static RP_INLINE Bits lane_numbers(std::uint32_t first) {
    const __m256i base = _mm256_set1_epi32(static_cast<int>(first));
    return {_mm256_add_epi32(base, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            _mm256_add_epi32(base, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
  }
  static RP_INLINE Bits exclusive_or(Bits a, std::uint32_t b) {
    const __m256i other = _mm256_set1_epi32(static_cast<int>(b));
    return {_mm256_xor_si256(a.low, other), _mm256_xor_si256(a.high, other)};
  }
  static RP_INLINE Bits multiply(Bits a, std::uint32_t b) {
    const __m256i other = _mm256_set1_epi32(static_cast<int>(b));
    return {_mm256_mullo_epi32(a.low, other), _mm256_mullo_epi32(a.high, other)};
  }
  template <int kShift>
  static RP_INLINE Bits fold(Bits a) {  // a ^ a >> shift
    return {_mm256_xor_si256(a.low, _mm256_srli_epi32(a.low, kShift)),
            _mm256_xor_si256(a.high, _mm256_srli_epi32(a.high, kShift))};
  }
  static RP_INLINE Bits upper_half(Bits a) { return {_mm256_srli_epi32(a.low, 16), _mm256_srli_epi32(a.high, 16)}; }
  static RP_INLINE __m256i stochastic_half(__m256 value, __m256i random) {
    const __m256i noise = _mm256_and_si256(random, _mm256_set1_epi32(0xFFFF));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(value), noise), 16);
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7FC0), _mm256_castps_si256(nan_lanes(value)));
  }
  static RP_INLINE void store_stochastic(std::byte* to, Vec value, Bits random) {
    store_bits(to, low_halves(stochastic_half(value.low, random.low), stochastic_half(value.high, random.high)));
  }
};

}  // namespace
}  // namespace roundpipe::cpu
