// What the tests of the optimizers' kernels share: tensors at any address between guard bytes, and comparison with
// numbers computed in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/update_kernels.h"

namespace roundpipe::cpu {

inline constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline constexpr MasterFormat kMasters[] = {MasterFormat::kFloat32, MasterFormat::kBFloat16, MasterFormat::kFloat16,
                                            MasterFormat::kSplit};

inline int digits_of(DType dtype) { return dtype == DType::kFloat32 ? 24 : dtype == DType::kBFloat16 ? 8 : 11; }
inline int smallest_exponent_of(DType dtype) { return dtype == DType::kFloat16 ? -14 : -126; }

inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// The definition of the formats, in double, which holds every number of all three exactly.
inline double decode(std::uint32_t bits, DType dtype) {
  const int fraction_bits = digits_of(dtype) - 1;
  const int total = dtype == DType::kFloat32 ? 32 : 16;
  const int exponent_bits = total - 1 - fraction_bits;
  const std::uint32_t fraction = bits & ((1U << fraction_bits) - 1);
  const int exponent = static_cast<int>((bits >> fraction_bits) & ((1U << exponent_bits) - 1));
  const double sign = (bits >> (total - 1)) & 1 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * INFINITY;
  const double significand = std::ldexp(fraction, -fraction_bits) + (exponent != 0 ? 1.0 : 0.0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - 1 + smallest_exponent_of(dtype));
}

// To nearest even; beyond the largest number infinity.
inline std::uint32_t encode(double value, DType dtype) {
  const int fraction_bits = digits_of(dtype) - 1;
  const int total = dtype == DType::kFloat32 ? 32 : 16;
  const std::uint32_t infinity = ((1U << (total - 1 - fraction_bits)) - 1) << fraction_bits;
  const std::uint32_t sign = std::signbit(value) ? 1U << (total - 1) : 0U;
  if (std::isnan(value)) return infinity | 1U << (fraction_bits - 1);
  if (value == 0) return sign;
  if (std::isinf(value)) return sign | infinity;
  const int exponent = std::max(std::ilogb(value), smallest_exponent_of(dtype));
  const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(std::fabs(value), fraction_bits - exponent)));
  const std::uint32_t magnitude =
      (static_cast<std::uint32_t>(exponent - smallest_exponent_of(dtype)) << fraction_bits) + units;
  return sign | std::min(magnitude, infinity);
}

// Half of the distance between two numbers of the format near `value`: the error of one rounding.
inline double rounding_error(double value, DType dtype) {
  const int exponent =
      value == 0 ? smallest_exponent_of(dtype) : std::max(std::ilogb(std::fabs(value)), smallest_exponent_of(dtype));
  return std::ldexp(1.0, exponent - digits_of(dtype));
}

class Tensor {  // `shift` bytes past an aligned address, with guard bytes at both ends
 public:
  Tensor() = default;
  Tensor(DType dtype, std::size_t n, std::size_t shift = 0)
      : dtype_(dtype), n_(n), shift_(shift), bytes_(n * size_of(dtype) + shift + 64, std::byte{0xA5}) {
    for (std::size_t i = 0; i < n; ++i) set(i, 0);
  }
  std::size_t size() const { return n_; }
  DType dtype() const { return dtype_; }
  std::byte* data() { return bytes_.data() + shift_; }
  std::uint32_t bits(std::size_t i) const {
    std::uint32_t bits = 0;
    std::memcpy(&bits, bytes_.data() + shift_ + i * size_of(dtype_), size_of(dtype_));
    return bits;
  }
  void set_bits(std::size_t i, std::uint32_t bits) {
    std::memcpy(data() + i * size_of(dtype_), &bits, size_of(dtype_));
  }
  void take(const Tensor& longer) { std::memcpy(data(), longer.bytes_.data() + longer.shift_, n_ * size_of(dtype_)); }
  bool equals_start_of(const Tensor& longer) const {
    return std::memcmp(bytes_.data() + shift_, longer.bytes_.data() + longer.shift_, n_ * size_of(dtype_)) == 0;
  }
  double get(std::size_t i) const { return decode(bits(i), dtype_); }
  void set(std::size_t i, double value) { set_bits(i, encode(value, dtype_)); }
  bool guards_intact() const {
    return std::all_of(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(shift_), is_guard) &&
           std::all_of(bytes_.begin() + static_cast<std::ptrdiff_t>(shift_ + n_ * size_of(dtype_)), bytes_.end(),
                       is_guard);
  }

 private:
  static bool is_guard(std::byte byte) { return byte == std::byte{0xA5}; }
  DType dtype_ = DType::kFloat32;
  std::size_t n_ = 0, shift_ = 0;
  std::vector<std::byte> bytes_;
};

// A weight in any master format, read and written as a number.
struct Weight {
  MasterFormat format;
  Tensor master, published;

  Weight(MasterFormat format_, std::size_t n, DType published_dtype, std::mt19937& random)
      : format(format_),
        master(format_ == MasterFormat::kFloat32    ? DType::kFloat32
               : format_ == MasterFormat::kBFloat16 ? DType::kBFloat16
                                                    : DType::kFloat16,
               n, random() % 33),
        published(format_ == MasterFormat::kSplit ? DType::kBFloat16 : published_dtype, n, random() % 33) {}

  double get(std::size_t i) const {
    if (format != MasterFormat::kSplit) return master.get(i);
    const auto low = static_cast<std::int16_t>(master.bits(i));
    return static_cast<double>(float_of((published.bits(i) << 16) + static_cast<std::uint32_t>(std::int32_t{low})));
  }
  void set(std::size_t i, double value) {
    if (format != MasterFormat::kSplit) return master.set(i, value);
    const std::uint32_t bits = encode(value, DType::kFloat32);
    const std::uint32_t upper = std::isnan(value) ? 0x7FC0 : (bits + 0x8000) >> 16;
    published.set_bits(i, upper);
    master.set_bits(i, std::isnan(value) ? 0 : bits & 0xFFFF);
  }
  DType precision() const { return format == MasterFormat::kSplit ? DType::kFloat32 : master.dtype(); }
  WeightSpan span(bool publish) {
    WeightSpan span;
    span.format = format;
    span.master = master.data();
    span.published_dtype = published.dtype();
    if (publish || format == MasterFormat::kSplit) span.published = published.data();
    if (format == MasterFormat::kSplit) span.upper = published.data();
    return span;
  }
};

inline double uniform(std::mt19937& random, double low, double high) {
  return low + (high - low) * (static_cast<double>(random()) / 4294967296.0);
}
inline double either_sign(std::mt19937& random, double low, double high) {
  return uniform(random, low, high) * (random() % 2 == 0 ? 1 : -1);
}

// Values that a weight, gradient or first moment may meet: moderate, tiny, zero, now and then infinite or NaN.
inline double any_value(std::mt19937& random) {
  const std::uint32_t kind = random() % 64;
  if (kind == 0) return INFINITY;
  if (kind == 1) return -INFINITY;
  if (kind == 2) return std::nan("");
  if (kind < 6) return 0.0;
  if (kind < 10) return either_sign(random, 0, 1e-40);
  if (kind < 14) return either_sign(random, 0, 1e-6);
  return either_sign(random, 0.001, 4);
}

// `scale` is the size of the terms that were added up: float32's error is relative to it. Its smallest number, divided
// by eps, is the absolute error.
template <class Where>  // says in which case, called on failure only
void expect_near(double got, double want, double scale, DType dtype, const Where& where, const char* what = "") {
  if (std::isnan(want)) {
    ASSERT_TRUE(std::isnan(got)) << where() << what << ": got " << got << ", want NaN";
    return;
  }
  if (std::isinf(want)) {
    ASSERT_EQ(got, want) << where() << what;
    return;
  }
  if (std::isinf(got) && std::fabs(want) > 65000 && dtype == DType::kFloat16) return;
  const double allowed = 1.001 * rounding_error(want, dtype) + 2e-6 * scale + 1e-36;
  ASSERT_LE(std::fabs(got - want), allowed) << where() << what << ": got " << got << ", want " << want;
}

class UpdateTest : public ::testing::TestWithParam<UpdateKernels> {
 protected:
  void SetUp() override {
    if (!GetParam().supported()) GTEST_SKIP() << "this processor has no " << GetParam().isa;
  }
};

// What an update reads and writes, at any addresses.
struct Updated {
  Weight weight;
  Tensor gradient;
  std::array<Tensor, 3> moments;

  Updated(MasterFormat master, DType published, DType gradient_dtype, DType moment_dtype, std::size_t n,
          std::mt19937& random)
      : weight(master, n, published, random), gradient(gradient_dtype, n, random() % 33) {
    for (Tensor& moment : moments) moment = Tensor(moment_dtype, n, random() % 33);
  }
  std::array<Tensor*, 6> all() {
    return {&weight.master, &weight.published, &gradient, &moments[0], &moments[1], &moments[2]};
  }
  UpdateSpans spans(bool publish, std::size_t used_moments) {
    UpdateSpans spans;
    spans.weight = weight.span(publish);
    spans.gradient = gradient.data();
    spans.gradient_dtype = gradient.dtype();
    for (std::size_t i = 0; i < used_moments; ++i) spans.moments[i] = {moments[i].data(), moments[i].dtype()};
    return spans;
  }
};

// Calls `test(master, gradient, moments)` for every combination of formats.
template <class Test>
void for_every_format(const Test& test) {
  for (const MasterFormat master : kMasters) {
    for (const DType gradient : kDTypes) {
      for (const DType moment : kDTypes) {
        test(master, gradient, moment);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

// An element's result hangs neither on how many others there are nor on where they lie: at every size the bits are
// those of the longest run, which the tests beside this one compare with the oracle. `update(spans, n)` is the kernel.
template <class Update>
void expect_bits_of_the_longest(MasterFormat master, DType gradient, DType moment, std::size_t used_moments,
                                std::mt19937& random, const Update& update) {
  constexpr std::size_t kLongest = 1100;
  const DType published = kDTypes[random() % 3];
  const bool publish = random() % 2 == 0;
  Updated source(master, published, gradient, moment, kLongest, random);
  for (std::size_t i = 0; i < kLongest; ++i) {
    source.weight.set(i, any_value(random));
    source.gradient.set(i, any_value(random));
    for (Tensor& each : source.moments) each.set(i, std::fabs(any_value(random)));
  }
  Updated longest = source;
  update(longest.spans(publish, used_moments), kLongest);
  for (std::size_t n = 0; n <= kLongest; ++n) {
    Updated shorter(master, published, gradient, moment, n, random);
    for (std::size_t i = 0; i < 6; ++i) shorter.all()[i]->take(*source.all()[i]);
    update(shorter.spans(publish, used_moments), n);
    for (std::size_t i = 0; i < 6; ++i) {
      ASSERT_TRUE(shorter.all()[i]->guards_intact()) << "n " << n << " tensor " << i;
      ASSERT_TRUE(shorter.all()[i]->equals_start_of(*longest.all()[i])) << "n " << n << " tensor " << i;
    }
  }
}

#define INSTANTIATE_UPDATE_TESTS(Suite)                                                                       \
  INSTANTIATE_TEST_SUITE_P(Isa, Suite, ::testing::ValuesIn(update_kernels().begin(), update_kernels().end()), \
                           [](const auto& tested) { return std::string(tested.param.isa); })

}  // namespace roundpipe::cpu
