// Sum of squares and number of non-finite elements of a packed gradient region, in one read of it.
#pragma once

#include <cstdint>

namespace roundpipe::cuda {

enum class GradientElement : std::uint8_t { kFloat32, kBfloat16, kFloat16 };

// What a region must be aligned to: one thread loads this much at a time.
constexpr std::int64_t kGradientAlignment = 16;

// Bytes of device memory that gradient_stats needs beside its result, for a region of `bytes` bytes.
std::int64_t gradient_stats_scratch_bytes(std::int64_t bytes);

// Writes two float64 to `result` (device memory): the sum of squares, and the number of non-finite elements as a count
// that float64 holds exactly. Queued on `stream` (a cudaStream_t); does not synchronise. `scratch` and `result` must
// live until the stream has passed. Throws std::runtime_error with CUDA's reason.
void gradient_stats(std::int32_t device, const void* region, std::int64_t bytes, GradientElement element, void* scratch,
                    void* result, void* stream);

}  // namespace roundpipe::cuda
