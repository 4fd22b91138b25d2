#include "cpu/dynamic_code.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "update_rig.h"

namespace roundpipe::cpu {
namespace {

// The published construction, in double: decade after decade, the middles of equal parts of 0.1 to 1.
std::vector<double> published(bool is_signed) {
  std::vector<double> values{0.0, 1.0};
  for (int i = 0; i < 7; ++i) {
    const int parts = 1 << (is_signed ? i : i + 1);
    for (int k = 0; k < parts; ++k) {
      const double low = 0.1 + 0.9 * k / parts, high = 0.1 + 0.9 * (k + 1) / parts;
      const double value = std::pow(10.0, i - 6) * (low + high) / 2;
      values.push_back(value);
      if (is_signed) values.push_back(-value);
    }
  }
  std::sort(values.begin(), values.end());
  return values;
}

TEST(DynamicCode, HasThePublishedValuesInOrder) {
  for (const bool is_signed : {true, false}) {
    const std::vector<double> want = published(is_signed);
    ASSERT_EQ(want.size(), 256U);
    const DynamicCode& code = is_signed ? signed_code() : unsigned_code();
    for (std::size_t i = 0; i < 256; ++i) {
      EXPECT_NEAR(static_cast<double>(code.values[i]), want[i], 1e-7 * std::fabs(want[i])) << i;
    }
  }
}

TEST(DynamicCode, NoKeyHoldsTwoMidpoints) {
  for (const DynamicCode* code : {&signed_code(), &unsigned_code()}) {
    std::set<std::uint32_t> keys;
    for (const float midpoint : code->midpoints) {
      if (std::isinf(midpoint)) break;
      EXPECT_TRUE(keys.insert(bits_of(midpoint) >> 16).second) << midpoint;
      EXPECT_GE(bits_of(midpoint) >> 16, DynamicCode::kFirstKey);
    }
    EXPECT_EQ(keys.size(), code->is_signed ? 128U : 255U);
  }
}

class DynamicCodes : public UpdateTest {
 protected:
  struct Coded {
    std::vector<std::uint8_t> codes;
    std::vector<float> scales;
    explicit Coded(std::size_t n) : codes(n + 16, 0xA5), scales((n + kCodeBlock - 1) / kCodeBlock + 1, 7.0F) {}
    bool guards_intact(std::size_t n) const {
      return std::all_of(codes.begin() + static_cast<std::ptrdiff_t>(n), codes.end(),
                         [](std::uint8_t c) { return c == 0xA5; }) &&
             scales.back() == 7.0F;
    }
  };
  Coded encode(const std::vector<float>& values, std::size_t moment) {
    Coded coded(values.size());
    GetParam().encode(coded.codes.data(), coded.scales.data(), values.data(), values.size(), moment);
    return coded;
  }
  std::vector<float> decode(const Coded& coded, std::size_t n, std::size_t moment) {
    std::vector<float> values(n + 8, 3.0F);
    GetParam().decode(values.data(), coded.codes.data(), coded.scales.data(), n, moment);
    for (std::size_t i = n; i < n + 8; ++i) EXPECT_EQ(values[i], 3.0F);
    values.resize(n);
    return values;
  }
};

TEST_P(DynamicCodes, EveryValueTakesTheNearestCode) {
  std::mt19937 random(1);
  for (const std::size_t moment : {0U, 1U}) {
    const std::vector<double> values = published(moment == 0);
    for (std::size_t n = 0; n <= 1100; ++n) {
      const double size = std::pow(10.0, uniform(random, -30, 30));
      std::vector<float> given(n);
      for (float& value : given) {
        value = static_cast<float>(size * std::pow(10.0, uniform(random, -8, 0)));
        if (random() % 16 == 0) value = 0;
        if (moment == 0 && random() % 2 == 0) value = -value;
      }
      const Coded coded = encode(given, moment);
      const std::vector<float> back = decode(coded, n, moment);
      ASSERT_TRUE(coded.guards_intact(n));
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t begin = i / kCodeBlock * kCodeBlock, end = std::min(n, begin + kCodeBlock);
        double scale = 0;
        for (std::size_t k = begin; k < end; ++k) scale = std::max(scale, std::fabs(static_cast<double>(given[k])));
        ASSERT_EQ(std::fabs(static_cast<double>(coded.scales[i / kCodeBlock])), scale);
        if (std::fabs(given[i]) == scale) {
          ASSERT_EQ(back[i], given[i]) << "the largest is exact";
        }
        double nearest = INFINITY;
        const double factor = static_cast<double>(coded.scales[i / kCodeBlock]);
        for (const double value : values) nearest = std::min(nearest, std::fabs(value * factor - given[i]));
        const double error = std::fabs(static_cast<double>(back[i]) - given[i]);
        if (moment == 1 && given[i] > 0) {
          ASSERT_GT(back[i], 0) << "a variance that was not zero became zero";
          if (given[i] < 1.63e-7 * scale) continue;  // and so is not the nearest
        }
        ASSERT_LE(error, nearest + 1e-6 * scale * std::fabs(static_cast<double>(given[i]) / scale) + 1e-9 * scale)
            << given[i] << " of " << scale << ", moment " << moment;
      }
    }
  }
}

TEST_P(DynamicCodes, EncodingAgainChangesNothing) {
  std::mt19937 random(2);
  for (const std::size_t moment : {0U, 1U}) {
    std::vector<float> given(1000);
    for (float& value : given)
      value = static_cast<float>(moment == 0 ? either_sign(random, 0, 3) : uniform(random, 0, 3));
    const Coded first = encode(given, moment);
    const std::vector<float> back = decode(first, given.size(), moment);
    const Coded second = encode(back, moment);
    EXPECT_EQ(first.codes, second.codes);
    EXPECT_EQ(first.scales, second.scales);
  }
}

TEST_P(DynamicCodes, WhatIsNotFiniteShowsInItsBlockAndNoOther) {
  for (const float bad : {std::nanf(""), INFINITY, -INFINITY}) {
    std::vector<float> given(3 * kCodeBlock - 7, 0.5F);
    given[kCodeBlock + 3] = bad;
    const std::vector<float> back = decode(encode(given, 0), given.size(), 0);
    for (std::size_t i = 0; i < given.size(); ++i) {
      if (i / kCodeBlock == 1) {
        ASSERT_TRUE(std::isnan(back[i])) << i;
      } else {
        ASSERT_EQ(back[i], 0.5F) << i;
      }
    }
  }
}

// One step on codes is: decode, the step on floats (which has its own oracle), encode. For every size, in slices.
TEST_P(DynamicCodes, AStepIsTheStepOnWhatTheCodesStandFor) {
  std::mt19937 random(3);
  for (std::size_t n = 0; n <= 1100; ++n) {
    Tensor gradient(kDTypes[random() % 3], n, random() % 33);
    Weight weight(kMasters[random() % 4], n, kDTypes[random() % 3], random);
    std::vector<float> average(n), variance(n);
    for (std::size_t i = 0; i < n; ++i) {
      gradient.set(i, either_sign(random, 0, 2));
      weight.set(i, either_sign(random, 0.01, 2));
      average[i] = static_cast<float>(either_sign(random, 0, 1));
      variance[i] = static_cast<float>(uniform(random, 0, 1));
    }
    Coded averages = encode(average, 0), variances = encode(variance, 1);
    AdamOptions options;
    options.weight_decay = 0.1;
    options.decoupled = random() % 2 == 0;
    const AdamNumbers numbers = adam_numbers(options, 7);

    Weight plain = weight;
    std::vector<float> plain_average = decode(averages, n, 0), plain_variance = decode(variances, n, 1);
    UpdateSpans spans;
    spans.weight = plain.span(true);
    spans.gradient = gradient.data();
    spans.gradient_dtype = gradient.dtype();
    spans.moments[0] = {plain_average.data(), DType::kFloat32};
    spans.moments[1] = {plain_variance.data(), DType::kFloat32};
    GetParam().adam(spans, numbers, 0, n);
    const Coded want_averages = encode(plain_average, 0), want_variances = encode(plain_variance, 1);

    Weight got = weight;
    Coded got_averages = averages, got_variances = variances;
    spans.weight = got.span(true);
    spans.moments[0] = {got_averages.codes.data(), DType::kFloat32, got_averages.scales.data()};
    spans.moments[1] = {got_variances.codes.data(), DType::kFloat32, got_variances.scales.data()};
    for (std::size_t at = 0; at < n; at += 2 * kUpdateAlignment) {
      GetParam().adam(spans, numbers, at, std::min(n, at + 2 * kUpdateAlignment));
    }
    ASSERT_EQ(got_averages.codes, want_averages.codes) << n;
    ASSERT_EQ(got_averages.scales, want_averages.scales) << n;
    ASSERT_EQ(got_variances.codes, want_variances.codes) << n;
    ASSERT_EQ(got_variances.scales, want_variances.scales) << n;
    ASSERT_TRUE(got.master.guards_intact() && got.published.guards_intact());
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(got.master.bits(i), plain.master.bits(i)) << n << " " << i;
      ASSERT_EQ(got.published.bits(i), plain.published.bits(i)) << n << " " << i;
    }
  }
}

TEST_P(DynamicCodes, AreTheSameForEveryInstructionSet) {
  std::mt19937 random(4);
  std::vector<float> given(5000);
  for (float& value : given)
    value = static_cast<float>(either_sign(random, 0, 1) * std::pow(10.0, uniform(random, -9, 0)));
  for (const std::size_t moment : {0U, 1U}) {
    std::vector<float> values = given;
    if (moment == 1) std::transform(values.begin(), values.end(), values.begin(), [](float x) { return std::fabs(x); });
    const Coded mine = encode(values, moment);
    for (const UpdateKernels& kernels : update_kernels()) {
      if (!kernels.supported()) continue;
      Coded other(values.size());
      kernels.encode(other.codes.data(), other.scales.data(), values.data(), values.size(), moment);
      EXPECT_EQ(other.codes, mine.codes) << kernels.isa;
      EXPECT_EQ(other.scales, mine.scales) << kernels.isa;
    }
  }
}

INSTANTIATE_UPDATE_TESTS(DynamicCodes);

}  // namespace
}  // namespace roundpipe::cpu
