// Sixteen floats in one register. For a translation unit that has defined RP_TARGET; see vector.h.
#pragma once

#include <immintrin.h>

#include "cpu/vector.h"

namespace roundpipe::cpu {
namespace {

struct Avx512 {
  using Vec = __m512;

  static bool supported() noexcept { return __builtin_cpu_supports("avx512f") != 0; }

  template <DType S>
  static RP_INLINE Vec load(const std::byte* from) {
    if constexpr (S == DType::kFloat32) {
      return _mm512_loadu_ps(from);
    } else {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
      if constexpr (S == DType::kFloat16) return _mm512_cvtph_ps(bits);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }

  // Round to nearest even by integer addition: the bfloat16 instructions of this family flush subnormal numbers.
  static RP_INLINE __m256i to_bfloat16(Vec value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0)));
  }

  template <DType D>
  static RP_INLINE __m256i narrow(Vec value) {
    if constexpr (D == DType::kBFloat16) return to_bfloat16(value);
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }

  template <DType D>
  static RP_INLINE void store(std::byte* to, Vec value) {
    if constexpr (D == DType::kFloat32) {
      _mm512_storeu_ps(to, value);
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow<D>(value));
    }
  }

  template <DType D>
  static RP_INLINE void stream(std::byte* to, Vec value) {
    if constexpr (D == DType::kFloat32) {
      _mm512_stream_ps(reinterpret_cast<float*>(to), value);
    } else {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to), narrow<D>(value));
    }
  }

  static RP_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static RP_INLINE void fence() { _mm_sfence(); }

  static RP_INLINE Vec broadcast(float value) { return _mm512_set1_ps(value); }
  static RP_INLINE Vec subtract(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
  static RP_INLINE Vec multiply(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
  static RP_INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static RP_INLINE Vec divide(Vec a, Vec b) { return _mm512_div_ps(a, b); }
  static RP_INLINE Vec square_root(Vec a) { return _mm512_sqrt_ps(a); }
  // The instruction returns its second operand when one is NaN: so only a NaN in the first is lost.
  static RP_INLINE Vec maximum(Vec a, Vec b) {
    return _mm512_mask_mov_ps(_mm512_max_ps(a, b), _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }
  static RP_INLINE Vec sign(Vec a) {
    const Vec zero = _mm512_setzero_ps();
    Vec result = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0F));
    result = _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0F));
    return _mm512_mask_mov_ps(result, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
  }

  static RP_INLINE Vec load_split(const std::byte* upper, const std::byte* low) {
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper)));
    const __m512i rest = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 16), rest));
  }
  static RP_INLINE void store_split(std::byte* upper, std::byte* low, Vec value) {
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(value), nan, _mm512_set1_epi32(0x7FC00000));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(upper), _mm512_cvtepi32_epi16(rounded));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi32_epi16(bits));
  }

  struct Squares {
    __m512d low, high;
  };
  static RP_INLINE Squares no_squares() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
  static RP_INLINE Squares add_squares(Squares sum, Vec a) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
    const __m512d high = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1)));
    return {_mm512_fmadd_pd(low, low, sum.low), _mm512_fmadd_pd(high, high, sum.high)};
  }
  static RP_INLINE void store_squares(double* to, Squares sum) {
    _mm512_storeu_pd(to, sum.low);
    _mm512_storeu_pd(to + 8, sum.high);
  }

  using Bits = __m512i;
  static RP_INLINE Bits lane_numbers(std::uint32_t first) {
    return _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(first)),
                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static RP_INLINE Bits exclusive_or(Bits a, std::uint32_t b) {
    return _mm512_xor_si512(a, _mm512_set1_epi32(static_cast<int>(b)));
  }
  static RP_INLINE Bits multiply(Bits a, std::uint32_t b) {
    return _mm512_mullo_epi32(a, _mm512_set1_epi32(static_cast<int>(b)));
  }
  template <int kShift>
  static RP_INLINE Bits fold(Bits a) {  // a ^ a >> shift
    return _mm512_xor_si512(a, _mm512_srli_epi32(a, kShift));
  }
  static RP_INLINE Bits upper_half(Bits a) { return _mm512_srli_epi32(a, 16); }
  static RP_INLINE void store_stochastic(std::byte* to, Vec value, Bits random) {
    const __m512i noise = _mm512_and_si512(random, _mm512_set1_epi32(0xFFFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(value), noise), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0))));
  }
};

}  // namespace
}  // namespace roundpipe::cpu
