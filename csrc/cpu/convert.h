// Element conversions between the low-precision host weights / gradients and the optimizer's copy, one table of
// instruction sets chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace roundpipe::cpu {

enum class DType : std::uint8_t { kFloat32, kBFloat16, kFloat16 };
std::size_t size_of(DType dtype);

struct ConvertKernels {
  const char* isa;  // "avx512", "avx2", "portable"
  bool (*supported)() noexcept;
  // dst[i] = round-to-nearest-even(src[i]); NaN stays NaN; as torch's cast. No alignment needed; no overlap.
  void (*convert)(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n);
  // The same, in the same pass over memory: false if an element of src is infinite or NaN.
  bool (*convert_checked)(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n);
  // dst[i] += src[i], added in float32, rounded once to dst's dtype.
  void (*accumulate)(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n);
};

std::span<const ConvertKernels> convert_kernels();  // best first; every compiled one, supported here or not
// The best supported one, or the one that ROUNDPIPE_ISA or force_isa() names.
const ConvertKernels& active_convert_kernels();
void force_isa(const char* isa);  // null: automatic; throws InvalidArgument for an unknown or unsupported name

}  // namespace roundpipe::cpu
