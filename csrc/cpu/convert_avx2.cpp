#if defined(__x86_64__)

#include <immintrin.h>

#define RP_TARGET __attribute__((target("avx2,f16c")))
#include "cpu/convert_isas.h"
#include "cpu/convert_loops.h"

namespace roundpipe::cpu {
namespace {

struct Avx2 {
  struct Vec {
    __m256 low, high;
  };

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
};

}  // namespace

namespace avx2 {
const ConvertKernels kConvert{
    "avx2", []() noexcept { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0; },
    Loops<Avx2>::convert, Loops<Avx2>::accumulate};
}  // namespace avx2

}  // namespace roundpipe::cpu

#endif
