#include "ops/element_convert.h"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>

#include "cpu/convert.h"
#include "ops/checks.h"

namespace roundpipe::ops {
namespace {

using c10::BFloat16;
using c10::Half;

std::optional<cpu::DType> kernel_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return cpu::DType::kFloat32;
    case ScalarType::BFloat16:
      return cpu::DType::kBFloat16;
    case ScalarType::Half:
      return cpu::DType::kFloat16;
    default:
      return std::nullopt;
  }
}

// The dtype of the real numbers that a complex one is made of.
std::pair<ScalarType, std::size_t> real_parts(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::ComplexHalf:
      return {ScalarType::Half, 2};
    case ScalarType::ComplexFloat:
      return {ScalarType::Float, 2};
    case ScalarType::ComplexDouble:
      return {ScalarType::Double, 2};
    default:
      return {dtype, 1};
  }
}

bool is_real_float(ScalarType dtype) { return dtype == ScalarType::Double || kernel_dtype(dtype).has_value(); }

// float64 is rare enough in host optimizers that plain loops serve it. To 16 bits it goes by way of float32, as torch's
// own cast does.
template <class Source, class Target>
void loop(const char* source, char* target, bool accumulate, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    Source from;
    std::memcpy(&from, source + i * sizeof(Source), sizeof(Source));
    Target to;
    if (accumulate) {
      std::memcpy(&to, target + i * sizeof(Target), sizeof(Target));
      to = static_cast<Target>(static_cast<double>(to) + static_cast<double>(from));
    } else {
      to = static_cast<Target>(from);
    }
    std::memcpy(target + i * sizeof(Target), &to, sizeof(Target));
  }
}

template <class Source>
void loop_to(ScalarType target_dtype, const char* source, char* target, bool accumulate, std::size_t n) {
  switch (target_dtype) {
    case ScalarType::Double:
      return loop<Source, double>(source, target, accumulate, n);
    case ScalarType::Float:
      return loop<Source, float>(source, target, accumulate, n);
    case ScalarType::BFloat16:
      return loop<Source, BFloat16>(source, target, accumulate, n);
    default:
      return loop<Source, Half>(source, target, accumulate, n);
  }
}

bool overlap(const char* a, std::size_t a_bytes, const char* b, std::size_t b_bytes) {
  const auto begin_a = reinterpret_cast<std::uintptr_t>(a);
  const auto begin_b = reinterpret_cast<std::uintptr_t>(b);
  return begin_a < begin_b + b_bytes && begin_b < begin_a + a_bytes;
}

}  // namespace

std::size_t ElementConvert::source_bytes() const { return elements * parts * element_bytes(source_dtype); }
std::size_t ElementConvert::target_bytes() const { return elements * parts * element_bytes(target_dtype); }

void ElementConvert::run(std::size_t begin, std::size_t end) const {
  const std::size_t n = (end - begin) * parts;
  if (n == 0) return;
  const char* from = source + begin * parts * element_bytes(source_dtype);
  char* to = target + begin * parts * element_bytes(target_dtype);
  if (!accumulate && source_dtype == target_dtype) {
    std::memcpy(to, from, n * element_bytes(source_dtype));
    return;
  }
  const auto kernel_from = kernel_dtype(source_dtype);
  const auto kernel_to = kernel_dtype(target_dtype);
  if (kernel_from && kernel_to) {
    const cpu::ConvertKernels& kernels = cpu::active_convert_kernels();
    (accumulate ? kernels.accumulate : kernels.convert)(to, *kernel_to, from, *kernel_from, n);
    return;
  }
  switch (source_dtype) {
    case ScalarType::Double:
      return loop_to<double>(target_dtype, from, to, accumulate, n);
    case ScalarType::Float:
      return loop_to<float>(target_dtype, from, to, accumulate, n);
    case ScalarType::BFloat16:
      return loop_to<BFloat16>(target_dtype, from, to, accumulate, n);
    default:
      return loop_to<Half>(target_dtype, from, to, accumulate, n);
  }
}

bool ElementConvert::can_check() const {
  return !accumulate && kernel_dtype(source_dtype) && kernel_dtype(target_dtype);
}

bool ElementConvert::run_checked(std::size_t begin, std::size_t end) const {
  return cpu::active_convert_kernels().convert_checked(
      target + begin * parts * element_bytes(target_dtype), *kernel_dtype(target_dtype),
      source + begin * parts * element_bytes(source_dtype), *kernel_dtype(source_dtype), (end - begin) * parts);
}

ElementConvert make_element_convert(const Tensor& source, const std::string& source_name, const Tensor& target,
                                    const std::string& target_name, bool accumulate) {
  require_contiguous(source, source_name, Place{});
  require_contiguous(target, target_name, Place{});
  if (source.numel() != target.numel()) {
    refuse(target_name, std::to_string(source.numel()) + " elements, as '" + source_name + "'",
           std::to_string(target.numel()));
  }
  const auto [from, from_parts] = real_parts(source.scalar_type());
  const auto [to, to_parts] = real_parts(target.scalar_type());
  const bool copy = !accumulate && source.scalar_type() == target.scalar_type();
  if (!copy && (!is_real_float(from) || !is_real_float(to) || from_parts != to_parts)) {
    refuse(target_name,
           accumulate ? "float dtypes on both sides, both real or both complex"
                      : "the dtype of '" + source_name + "', or float dtypes on both sides",
           describe(source) + " to " + describe(target));
  }
  ElementConvert pair;
  pair.source = static_cast<const char*>(source.const_data_ptr());
  pair.target = static_cast<char*>(target.mutable_data_ptr());
  pair.source_dtype = copy ? source.scalar_type() : from;
  pair.target_dtype = copy ? target.scalar_type() : to;
  pair.accumulate = accumulate;
  pair.elements = static_cast<std::size_t>(source.numel());
  pair.parts = copy ? 1 : from_parts;
  if (pair.elements > 0 && overlap(pair.source, pair.source_bytes(), pair.target, pair.target_bytes())) {
    refuse(target_name, "memory apart from that of '" + source_name + "'", "tensors that overlap");
  }
  return pair;
}

}  // namespace roundpipe::ops
