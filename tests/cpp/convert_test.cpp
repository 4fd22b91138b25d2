#include "cpu/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"

namespace roundpipe::cpu {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
constexpr std::size_t kLargest = 1100;

const char* name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

// The oracle works from the definition of the formats, in double, which holds every number of all three exactly.
struct Format {
  int digits;        // of the significand, with the hidden one
  int smallest_exp;  // of normal numbers
  int largest_exp;
};
Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {24, -126, 127};
    case DType::kBFloat16:
      return {8, -126, 127};
    default:
      return {11, -14, 15};
  }
}

double decode(std::uint32_t bits, DType dtype) {
  const Format format = format_of(dtype);
  const int fraction_bits = format.digits - 1;
  const int exponent_bits = (dtype == DType::kFloat32 ? 31 : 15) - fraction_bits;
  const std::uint32_t fraction = bits & ((1U << fraction_bits) - 1);
  const int exponent = static_cast<int>((bits >> fraction_bits) & ((1U << exponent_bits) - 1));
  const double sign = (bits >> (fraction_bits + exponent_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? std::nan("") : sign * INFINITY;
  const double significand = std::ldexp(fraction, -fraction_bits) + (exponent != 0 ? 1.0 : 0.0);
  return sign * std::ldexp(significand, std::max(exponent, 1) - 1 + format.smallest_exp);
}

// Round to nearest even, without NaN.
std::uint32_t encode(double value, DType dtype) {
  const Format format = format_of(dtype);
  const int fraction_bits = format.digits - 1;
  const int total_bits = dtype == DType::kFloat32 ? 32 : 16;
  const std::uint32_t sign = std::signbit(value) ? 1U << (total_bits - 1) : 0U;
  const std::uint32_t infinity = ((1U << (total_bits - 1 - fraction_bits)) - 1) << fraction_bits;
  double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), format.smallest_exp);
  const double units = std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent));  // of the last place
  magnitude = std::ldexp(units, exponent - fraction_bits);
  if (magnitude >= std::ldexp(1.0, format.largest_exp + 1)) return sign | infinity;
  // The hidden digit adds one to the exponent field by itself; subnormal numbers have none.
  return sign | ((static_cast<std::uint32_t>(exponent - format.smallest_exp) << fraction_bits) +
                 static_cast<std::uint32_t>(units));
}

class Elements {
 public:
  // `shift` bytes past an aligned address, with guard bytes at both ends.
  Elements(DType dtype, std::size_t n, std::size_t shift)
      : dtype_(dtype), n_(n), shift_(shift), bytes_(n * size_of(dtype) + shift + 64, std::byte{0xA5}) {}
  std::byte* data() { return bytes_.data() + shift_; }
  std::uint32_t get(std::size_t i) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, data() + i * size_of(dtype_), size_of(dtype_));
    return bits;
  }
  void set(std::size_t i, std::uint32_t bits) { std::memcpy(data() + i * size_of(dtype_), &bits, size_of(dtype_)); }
  double value(std::size_t i) { return decode(get(i), dtype_); }
  bool guards_intact() {
    for (std::size_t i = 0; i < shift_; ++i) {
      if (bytes_[i] != std::byte{0xA5}) return false;
    }
    for (std::size_t i = shift_ + n_ * size_of(dtype_); i < bytes_.size(); ++i) {
      if (bytes_[i] != std::byte{0xA5}) return false;
    }
    return true;
  }

 private:
  DType dtype_;
  std::size_t n_, shift_;
  std::vector<std::byte> bytes_;
};

// Bit patterns that meet every edge: ties, subnormals, overflow, infinities, NaN.
std::uint32_t interesting(std::mt19937& random, DType dtype) {
  const std::uint32_t bits = static_cast<std::uint32_t>(random());
  if (dtype != DType::kFloat32) return bits & 0xFFFF;
  switch (bits % 6) {
    case 0:  // near a tie of bfloat16
      return (static_cast<std::uint32_t>(random()) & 0xFFFF0000) + 0x7FFE + (bits >> 8) % 5;
    case 1: {  // near a tie of float16, in its normal range
      const std::uint32_t exponent = 110 + (bits >> 4) % 36;
      return (bits & 0x80000000) | (exponent << 23) |
             (((static_cast<std::uint32_t>(random()) & 0x3FF) << 13) + 0x0FFE + (bits >> 12) % 5);
    }
    case 2:  // about float16's subnormal range, whose ties stand elsewhere
      return encode(std::ldexp(static_cast<double>(random() % 4096), -26) * (bits & 8 ? 1 : -1), dtype);
    case 3:  // float32's subnormal numbers
      return (bits & 0x80000000) | (static_cast<std::uint32_t>(random()) & 0x7FFFFF);
    case 4: {
      constexpr std::uint32_t kSpecial[] = {0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0,
                                            0x80000000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x7F7F7FFF, 0x7F7F8000,
                                            0x33000000, 0x33000001, 0x00008000, 0x00018000};
      return kSpecial[(bits >> 8) % std::size(kSpecial)];
    }
    default:
      return static_cast<std::uint32_t>(random());
  }
}

bool same(std::uint32_t got, double want, DType dtype) {
  if (std::isnan(want)) return std::isnan(decode(got, dtype));
  return got == encode(want, dtype);
}

class Convert : public ::testing::TestWithParam<ConvertKernels> {
 protected:
  void SetUp() override {
    if (!GetParam().supported()) GTEST_SKIP() << "this processor has no " << GetParam().isa;
  }
  void check_convert(DType to, DType from, std::size_t n, std::size_t to_shift, std::size_t from_shift,
                     const std::function<std::uint32_t(std::size_t)>& pattern) {
    Elements src(from, n, from_shift), dst(to, n, to_shift);
    for (std::size_t i = 0; i < n; ++i) src.set(i, pattern(i));
    GetParam().convert(dst.data(), to, src.data(), from, n);
    ASSERT_TRUE(dst.guards_intact()) << name(from) << " -> " << name(to) << " n " << n;
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_TRUE(to == from ? dst.get(i) == src.get(i) : same(dst.get(i), src.value(i), to))
          << name(from) << " -> " << name(to) << " n " << n << " i " << i << ": " << std::hex << src.get(i)
          << " became " << dst.get(i);
    }
    Elements checked(to, n, to_shift);
    bool finite = true;
    for (std::size_t i = 0; i < n; ++i) finite = finite && std::isfinite(src.value(i));
    ASSERT_EQ(GetParam().convert_checked(checked.data(), to, src.data(), from, n), finite)
        << name(from) << " -> " << name(to) << " n " << n;
    ASSERT_TRUE(checked.guards_intact());
    ASSERT_EQ(n == 0 ? 0 : std::memcmp(checked.data(), dst.data(), n * size_of(to)), 0);
  }
};

TEST_P(Convert, EverySizeAndAlignment) {
  std::mt19937 random(1);
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      for (std::size_t n = 0; n <= kLargest; ++n) {
        check_convert(to, from, n, random() % 33, random() % 33,
                      [&](std::size_t) { return interesting(random, from); });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Convert, OneElementThatIsNotFiniteIsFoundAnywhere) {
  const std::size_t large = (std::size_t{1} << 18) + 37;  // streamed
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      const std::uint32_t bad[] = {encode(INFINITY, from), encode(-INFINITY, from),
                                   from == DType::kFloat32 ? 0x7FC00000U : 0x7FFFU};
      for (const std::size_t n : {std::size_t{1}, std::size_t{53}, std::size_t{4100}, large}) {
        Elements src(from, n, 2), dst(to, n, 6);
        for (std::size_t i = 0; i < n; ++i) src.set(i, encode(static_cast<double>(i % 7) - 3, from));
        ASSERT_TRUE(GetParam().convert_checked(dst.data(), to, src.data(), from, n));
        for (const std::size_t at : {std::size_t{0}, n / 3, n / 2, n - 1}) {
          const std::uint32_t good = src.get(at);
          for (const std::uint32_t bits : bad) {
            src.set(at, bits);
            ASSERT_FALSE(GetParam().convert_checked(dst.data(), to, src.data(), from, n)) << n << " " << at;
          }
          src.set(at, good);
        }
      }
    }
  }
}

TEST_P(Convert, Every16BitPattern) {
  for (const DType from : {DType::kBFloat16, DType::kFloat16}) {
    for (const DType to : kDTypes) {
      check_convert(to, from, 65536, 0, 0, [](std::size_t i) { return static_cast<std::uint32_t>(i); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Convert, SampledFloat32Patterns) {
  std::mt19937 random(2);
  for (const DType to : {DType::kBFloat16, DType::kFloat16}) {
    // Large enough for the stores that go past the caches, at an address that they must first align.
    check_convert(to, DType::kFloat32, std::size_t{1} << 21, 2, 4,
                  [&](std::size_t) { return interesting(random, DType::kFloat32); });
    check_convert(to, DType::kFloat32, (std::size_t{1} << 20) + 5, 1, 3,  // an address that cannot be aligned
                  [&](std::size_t) { return interesting(random, DType::kFloat32); });
    if (HasFatalFailure()) return;
  }
  check_convert(DType::kFloat32, DType::kBFloat16, (std::size_t{1} << 19) + 37, 12, 0,
                [&](std::size_t) { return interesting(random, DType::kBFloat16); });
}

TEST_P(Convert, NanOfBFloat16IsCanonical) {
  Elements src(DType::kFloat32, 40, 0), dst(DType::kBFloat16, 40, 0);
  for (std::size_t i = 0; i < 40; ++i) src.set(i, i % 2 == 0 ? 0x7F800001U : 0xFFFFFFFFU);
  GetParam().convert(dst.data(), DType::kBFloat16, src.data(), DType::kFloat32, 40);
  for (std::size_t i = 0; i < 40; ++i) EXPECT_EQ(dst.get(i), 0x7FC0U);
}

TEST_P(Convert, AccumulateAddsInFloat32AndRoundsOnce) {
  std::mt19937 random(3);
  for (const DType to : kDTypes) {
    for (const DType from : kDTypes) {
      for (std::size_t n = 0; n <= kLargest; ++n) {
        Elements src(from, n, random() % 33), dst(to, n, random() % 33);
        std::vector<float> want(n);
        for (std::size_t i = 0; i < n; ++i) {
          src.set(i, interesting(random, from));
          dst.set(i, interesting(random, to));
          want[i] = static_cast<float>(dst.value(i)) + static_cast<float>(src.value(i));
        }
        GetParam().accumulate(dst.data(), to, src.data(), from, n);
        ASSERT_TRUE(dst.guards_intact());
        for (std::size_t i = 0; i < n; ++i) {
          ASSERT_TRUE(same(dst.get(i), static_cast<double>(want[i]), to))
              << name(to) << " += " << name(from) << " n " << n << " i " << i;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Isa, Convert, ::testing::ValuesIn(convert_kernels().begin(), convert_kernels().end()),
                         [](const auto& tested) { return std::string(tested.param.isa); });

TEST(ConvertOracle, AgreesWithTheProcessorOnFloat32) {
  std::mt19937 random(4);
  for (int i = 0; i < 200000; ++i) {
    const std::uint32_t bits = interesting(random, DType::kFloat32);
    const auto value = std::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    ASSERT_EQ(decode(bits, DType::kFloat32), static_cast<double>(value));
    ASSERT_EQ(encode(static_cast<double>(value), DType::kFloat32), bits);
  }
}

TEST(ConvertTable, IsOrderedAndForcible) {
  ASSERT_FALSE(convert_kernels().empty());
  EXPECT_STREQ(convert_kernels().back().isa, "portable");
  EXPECT_TRUE(convert_kernels().back().supported());
  for (const ConvertKernels& kernels : convert_kernels()) {
    if (kernels.supported()) {
      force_isa(kernels.isa);
      EXPECT_STREQ(active_convert_kernels().isa, kernels.isa);
    } else {
      EXPECT_THROW(force_isa(kernels.isa), InvalidArgument);
    }
  }
  force_isa(nullptr);
  for (const ConvertKernels& kernels : convert_kernels()) {
    if (!kernels.supported()) continue;
    EXPECT_STREQ(active_convert_kernels().isa, kernels.isa) << "the best supported one is the default";
    break;
  }
  try {
    force_isa("mmx");
    FAIL() << "mmx was accepted";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos) << error.what();
  }
}

// The variable is read once a process, so each value needs one of its own.
TEST(ConvertTableDeathTest, TheEnvironmentNamesTheInstructionSet) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("ROUNDPIPE_ISA", "portable", 1);
        std::exit(std::string(active_convert_kernels().isa) == "portable" ? 7 : 1);
      },
      ::testing::ExitedWithCode(7), "");
  EXPECT_EXIT(
      {
        setenv("ROUNDPIPE_ISA", "mmx", 1);
        try {
          active_convert_kernels();
        } catch (const InvalidArgument&) {
          std::exit(8);
        }
        std::exit(1);
      },
      ::testing::ExitedWithCode(8), "");
}

}  // namespace
}  // namespace roundpipe::cpu
