// The operator over cuda/gradient_stats.h: checks its arguments, finds torch's stream.
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/gradient_stats.h"

namespace roundpipe::ops {
namespace {

using cuda::GradientElement;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Only the CUDA builds of torch have this function, so it is looked up instead of linked: this library must build
// against the headers of any torch. torch has loaded libtorch_cuda by the time a CUDA tensor can exist.
void* current_stream(std::int32_t device) {
  using GetStream = AOTITorchError (*)(std::int32_t, void**);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  if (get == nullptr || get(device, &stream) != 0) {
    throw std::runtime_error("roundpipe::gradient_stats: this torch has no CUDA streams; it is a CPU build");
  }
  return stream;
}

GradientElement element_of(ScalarType dtype) {
  if (dtype == ScalarType::Float) return GradientElement::kFloat32;
  if (dtype == ScalarType::BFloat16) return GradientElement::kBfloat16;
  if (dtype == ScalarType::Half) return GradientElement::kFloat16;
  throw std::runtime_error(
      std::string("roundpipe::gradient_stats: argument 'dtype': expected float32, bfloat16 or float16, got ") +
      torch::headeronly::toString(dtype));
}

// Two float64 on the device: sum of squares, number of non-finite elements. Does not synchronise.
Tensor gradient_stats(const Tensor& region, ScalarType dtype) {
  const GradientElement element = element_of(dtype);
  const std::int64_t width = element == GradientElement::kFloat32 ? 4 : 2;
  const std::int64_t bytes = region.numel() * static_cast<std::int64_t>(region.element_size());
  const void* data = region.const_data_ptr();
  if (!region.is_cuda() || !region.is_contiguous() || bytes % width != 0 ||
      reinterpret_cast<std::uintptr_t>(data) % cuda::kGradientAlignment != 0) {
    throw std::runtime_error(
        "roundpipe::gradient_stats: argument 'region': expected a contiguous CUDA tensor of whole elements at a "
        "multiple of 16 bytes; views of an engine's region are, copies by clone() too");
  }
  const std::int32_t device = region.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  const std::int64_t total_size = 2;
  const std::int64_t scratch_size =
      cuda::gradient_stats_scratch_bytes(bytes) / static_cast<std::int64_t>(sizeof(double));
  Tensor total = torch::stable::new_empty(region, {&total_size, 1}, ScalarType::Double);
  Tensor scratch = torch::stable::new_empty(region, {&scratch_size, 1}, ScalarType::Double);
  cuda::gradient_stats(device, data, bytes, element, scratch.mutable_data_ptr(), total.mutable_data_ptr(),
                       current_stream(device));
  return total;
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_FRAGMENT(roundpipe, library) {
  library.def("gradient_stats(Tensor region, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CUDA, library) {
  library.impl("gradient_stats", TORCH_BOX(&roundpipe::ops::gradient_stats));
}
