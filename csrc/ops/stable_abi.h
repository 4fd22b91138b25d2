// Every name that csrc/ops takes from torch, through its stable ABI alone: one build serves every torch >= 2.11.
#pragma once

#include <torch/csrc/stable/device.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/Layout.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace roundpipe::ops {

using torch::headeronly::DeviceType;
using torch::headeronly::Layout;
using torch::headeronly::ScalarType;
using torch::stable::parallel_for;
using torch::stable::Tensor;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

inline std::size_t element_bytes(ScalarType dtype) {
  const auto code = torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(dtype));
  return aoti_torch_dtype_element_size(code);
}

// A tensor object of our own over the same memory. We hold these, never the caller's: an object that Python has seen
// may need the interpreter lock to die, and ours die on threads of the engine.
inline Tensor detached(const Tensor& tensor) {
  std::array<StableIValue, 1> stack{torch::stable::detail::from(tensor)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::detach", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

inline std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  return strides;
}

// A host tensor over memory that `deleter` lets go.
template <class Deleter>
Tensor host_tensor(void* data, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
                   ScalarType dtype, Deleter deleter) {
  return torch::stable::from_blob(data, Sizes(sizes.data(), sizes.size()), Sizes(strides.data(), strides.size()),
                                  torch::stable::Device(DeviceType::CPU), dtype, std::move(deleter));
}

}  // namespace roundpipe::ops
