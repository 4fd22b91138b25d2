// Deterministic: the grid depends on the size alone, every block sums in a fixed order in float64, and a second pass
// adds the blocks' results in a fixed order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/gradient_stats.h"

namespace roundpipe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kMaxBlocks = 1024;

struct Stats {
  double squares;
  double non_finite;
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
  constexpr std::int64_t kWidth = kGradientAlignment / sizeof(T);
  struct alignas(kGradientAlignment) Vector {
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

std::int64_t block_count(std::int64_t bytes) {
  const std::int64_t per_block = kThreads * kGradientAlignment * 4;
  return std::clamp((bytes + per_block - 1) / per_block, std::int64_t{1}, kMaxBlocks);
}

template <class T>
void launch(const void* region, std::int64_t bytes, Stats* partials, cudaStream_t stream) {
  partial_stats<T><<<static_cast<unsigned>(block_count(bytes)), kThreads, 0, stream>>>(
      static_cast<const T*>(region), bytes / static_cast<std::int64_t>(sizeof(T)), partials);
}

}  // namespace

std::int64_t gradient_stats_scratch_bytes(std::int64_t bytes) {
  return block_count(bytes) * static_cast<std::int64_t>(sizeof(Stats));
}

void gradient_stats(std::int32_t device, const void* region, std::int64_t bytes, GradientElement element, void* scratch,
                    void* result, void* stream) {
  check(cudaSetDevice(device), "cudaSetDevice");  // our runtime is linked statically and has a state of its own
  auto* partials = static_cast<Stats*>(scratch);
  auto* queue = static_cast<cudaStream_t>(stream);
  switch (element) {
    case GradientElement::kFloat32:
      launch<float>(region, bytes, partials, queue);
      break;
    case GradientElement::kBfloat16:
      launch<__nv_bfloat16>(region, bytes, partials, queue);
      break;
    case GradientElement::kFloat16:
      launch<__half>(region, bytes, partials, queue);
      break;
  }
  check(cudaGetLastError(), "launch of partial_stats");
  total_stats<<<1, kThreads, 0, queue>>>(partials, block_count(bytes), static_cast<Stats*>(result));
  check(cudaGetLastError(), "launch of total_stats");
}

}  // namespace roundpipe::cuda
