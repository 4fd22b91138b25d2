// The optimizers' kernels, one table of instruction sets chosen at run time: the same choice as convert.h's.
#pragma once

#include <cstddef>
#include <span>

#include "cpu/adam.h"
#include "cpu/lion.h"
#include "cpu/sgd.h"

namespace roundpipe::cpu {

struct UpdateKernels {
  const char* isa;  // "avx512", "avx2", "portable"
  bool (*supported)() noexcept;
  AdamKernel adam;
  SgdKernel sgd;
  LionKernel lion;
  // float32 to and from a split master, see Note [Split master]. No alignment needed; no overlap.
  void (*split)(void* upper, void* low, const float* from, std::size_t n);
  void (*join)(float* to, const void* upper, const void* low, std::size_t n);
  // In double, in one order for all instruction sets; infinite or NaN exactly if some element is.
  double (*square_sum)(const void* from, DType dtype, std::size_t n);
  // float32 to and from the codes of a moment (0: signed) and their scales, see Note [Dynamic code].
  void (*encode)(void* codes, float* scales, const float* from, std::size_t n, std::size_t moment);
  void (*decode)(float* to, const void* codes, const float* scales, std::size_t n, std::size_t moment);
};

std::span<const UpdateKernels> update_kernels();  // best first; every compiled one, supported here or not
const UpdateKernels& active_update_kernels();     // of the instruction set of active_convert_kernels()

}  // namespace roundpipe::cpu
