// Sum of squares and number of non-finite elements of a packed gradient region, in one read of it. Deterministic: the
// grid depends on the size alone, every block sums in a fixed order in float64, and a second pass adds the blocks'
// results in a fixed order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace roundpipe::cuda {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;
constexpr std::int64_t kVectorBytes = 16;  // what one thread loads at a time

struct Stats {
  double squares;
  double non_finite;  // a count; float64 is exact far beyond any region's size
};

template <class T>
__device__ double squared(T value) {
  const double wide = static_cast<double>(static_cast<float>(value));
  return wide * wide;
}

template <class T>
__device__ bool finite(T value) {
  return isfinite(static_cast<float>(value));
}

__device__ void reduce_block(Stats mine, Stats* out) {
  __shared__ double squares[kThreads];
  __shared__ double counts[kThreads];
  squares[threadIdx.x] = mine.squares;
  counts[threadIdx.x] = mine.non_finite;
  __syncthreads();
  for (int stride = kThreads / 2; stride > 0; stride /= 2) {
    if (threadIdx.x < stride) {
      squares[threadIdx.x] += squares[threadIdx.x + stride];
      counts[threadIdx.x] += counts[threadIdx.x + stride];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = Stats{squares[0], counts[0]};
}

template <class T>
__global__ void partial_stats(const T* __restrict__ values, std::int64_t n, Stats* __restrict__ partials) {
  constexpr std::int64_t kWidth = kVectorBytes / sizeof(T);
  struct alignas(kVectorBytes) Vector {
    T lanes[kWidth];
  };
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  Stats mine{0.0, 0.0};
  const auto* vectors = reinterpret_cast<const Vector*>(values);
  for (std::int64_t i = thread; i < n / kWidth; i += threads) {
    const Vector vector = vectors[i];
#pragma unroll
    for (std::int64_t lane = 0; lane < kWidth; ++lane) {
      mine.squares += squared(vector.lanes[lane]);
      mine.non_finite += finite(vector.lanes[lane]) ? 0.0 : 1.0;
    }
  }
  for (std::int64_t i = n / kWidth * kWidth + thread; i < n; i += threads) {
    mine.squares += squared(values[i]);
    mine.non_finite += finite(values[i]) ? 0.0 : 1.0;
  }
  reduce_block(mine, &partials[blockIdx.x]);
}

__global__ void total_stats(const Stats* __restrict__ partials, std::int64_t n, Stats* __restrict__ total) {
  Stats mine{0.0, 0.0};
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    mine.squares += partials[i].squares;
    mine.non_finite += partials[i].non_finite;
  }
  reduce_block(mine, total);
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a sticky-free error must not be found by the next, innocent call
  throw std::runtime_error(std::string("roundpipe::gradient_stats: ") + what + ": " + cudaGetErrorName(status) + " (" +
                           cudaGetErrorString(status) + ")");
}

// Only the CUDA builds of torch have this function, so it is looked up instead of linked: this library must build
// against the headers of any torch. torch has loaded libtorch_cuda by the time a CUDA tensor can exist.
cudaStream_t current_stream(std::int32_t device) {
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
  return static_cast<cudaStream_t>(stream);
}

template <class T>
void launch(const void* region, std::int64_t bytes, Stats* partials, std::int64_t blocks, cudaStream_t stream) {
  partial_stats<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(region), bytes / static_cast<std::int64_t>(sizeof(T)), partials);
}

// Two float64 on the device: sum of squares, number of non-finite elements. Does not synchronise.
Tensor gradient_stats(const Tensor& region, ScalarType dtype) {
  const auto element = dtype == ScalarType::Float ? 4 : 2;
  if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
    throw std::runtime_error(
        std::string("roundpipe::gradient_stats: argument 'dtype': expected float32, bfloat16 or float16, got ") +
        torch::headeronly::toString(dtype));
  }
  const std::int64_t bytes = region.numel() * static_cast<std::int64_t>(region.element_size());
  const void* data = region.const_data_ptr();
  if (!region.is_cuda() || !region.is_contiguous() || bytes % element != 0 ||
      reinterpret_cast<std::uintptr_t>(data) % kVectorBytes != 0) {
    throw std::runtime_error(
        "roundpipe::gradient_stats: argument 'region': expected a contiguous CUDA tensor of whole elements at a "
        "multiple of 16 bytes; views of an engine's region are, copies by clone() too");
  }
  const std::int32_t device = region.get_device_index();
  torch::stable::accelerator::DeviceGuard guard(device);
  check(cudaSetDevice(device), "cudaSetDevice");  // our runtime is linked statically and has a state of its own

  const std::int64_t per_block = kThreads * kVectorBytes * 4;
  const std::int64_t blocks = std::clamp((bytes + per_block - 1) / per_block, std::int64_t{1}, kMaxBlocks);
  const std::int64_t total_size = 2;
  const std::int64_t partial_size = 2 * blocks;
  Tensor total = torch::stable::new_empty(region, {&total_size, 1}, ScalarType::Double);
  Tensor partials = torch::stable::new_empty(region, {&partial_size, 1}, ScalarType::Double);
  auto* partial_stats_out = static_cast<Stats*>(partials.mutable_data_ptr());
  const cudaStream_t stream = current_stream(device);
  if (dtype == ScalarType::Float) {
    launch<float>(data, bytes, partial_stats_out, blocks, stream);
  } else if (dtype == ScalarType::BFloat16) {
    launch<__nv_bfloat16>(data, bytes, partial_stats_out, blocks, stream);
  } else {
    launch<__half>(data, bytes, partial_stats_out, blocks, stream);
  }
  check(cudaGetLastError(), "launch of partial_stats");
  total_stats<<<1, kThreads, 0, stream>>>(partial_stats_out, blocks, static_cast<Stats*>(total.mutable_data_ptr()));
  check(cudaGetLastError(), "launch of total_stats");
  return total;
}

}  // namespace
}  // namespace roundpipe::cuda

STABLE_TORCH_LIBRARY_FRAGMENT(roundpipe, library) {
  library.def("gradient_stats(Tensor region, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CUDA, library) {
  library.impl("gradient_stats", TORCH_BOX(&roundpipe::cuda::gradient_stats));
}
