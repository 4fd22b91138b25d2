#if defined(__x86_64__)

// g++ 12 takes the undefined pass-through operand of its own unmasked intrinsics for an uninitialised variable.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#define RP_TARGET __attribute__((target("avx512f")))
#include "cpu/convert_isas.h"
#include "cpu/convert_loops.h"

namespace roundpipe::cpu {
namespace {

struct Avx512 {
  using Vec = __m512;

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
};

}  // namespace

namespace avx512 {
const ConvertKernels kConvert{"avx512", []() noexcept { return __builtin_cpu_supports("avx512f") != 0; },
                              Loops<Avx512>::convert, Loops<Avx512>::accumulate};
}  // namespace avx512

}  // namespace roundpipe::cpu

#endif
