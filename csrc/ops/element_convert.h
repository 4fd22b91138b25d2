// Element-wise target = / += source between host tensors: the vectorised kernels for float32, bfloat16 and float16,
// plain loops where float64 takes part, and copies of any one dtype.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ops/stable_abi.h"

namespace roundpipe::ops {

// One checked pair. `run` may be called concurrently on disjoint slices of [0, elements).
struct ElementConvert {
  const char* source = nullptr;
  char* target = nullptr;
  ScalarType source_dtype{};
  ScalarType target_dtype{};
  bool accumulate = false;
  std::size_t elements = 0;  // of the tensors
  std::size_t parts = 1;     // real numbers in an element: 2 when complex

  std::size_t source_bytes() const;
  std::size_t target_bytes() const;
  void run(std::size_t begin, std::size_t end) const;
  // The same, in one pass; false if an element of the source in this slice is infinite or NaN. Needs can_check().
  bool run_checked(std::size_t begin, std::size_t end) const;
  bool can_check() const;  // float32, bfloat16 or float16 on both sides, without accumulation
};

// InvalidArgument unless both are contiguous host tensors of as many elements whose memory does not overlap, and of
// dtypes between which we convert.
ElementConvert make_element_convert(const Tensor& source, const std::string& source_name, const Tensor& target,
                                    const std::string& target_name, bool accumulate);

}  // namespace roundpipe::ops
