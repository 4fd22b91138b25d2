#include "cpu/state_formats.h"

#include <cmath>
#include <map>
#include <random>
#include <string>

#include "core/errors.h"
#include "update_rig.h"

namespace roundpipe::cpu {
namespace {

class StateFormats : public UpdateTest {
 protected:
  // One step that only rounds: the moment becomes the gradient, the weights do not matter.
  void round_to_moment(const Tensor& values, Tensor& moment, Rounding rounding, std::size_t begin, std::size_t end) {
    Tensor gradient = values, weight(DType::kFloat32, values.size());
    UpdateSpans spans;
    spans.weight.master = weight.data();
    spans.gradient = gradient.data();
    spans.moments[0] = {moment.data(), moment.dtype()};
    spans.rounding = rounding;
    SgdOptions options;
    options.momentum = 0.9;
    GetParam().sgd(spans, sgd_numbers(options, true), begin, end);
  }
};

TEST_P(StateFormats, EveryFloatSplitsAndJoinsExactly) {
  std::mt19937 random(1);
  constexpr std::uint32_t kSpecial[] = {0,          0x80000000, 1,          0x80000001, 0x00008000, 0x00007FFF,
                                        0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x3F808000,
                                        0x3F818000, 0xBF808000, 0x3F807FFF, 0x3F808001, 0x007FFFFF, 0x00800000,
                                        0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000, 0x7F808000};
  for (std::size_t n = 0; n <= 1100; ++n) {
    std::vector<float> values(n), back(n + 8, 7.0F);
    Tensor upper(DType::kBFloat16, n, random() % 33), low(DType::kFloat16, n, random() % 33);
    for (std::size_t i = 0; i < n; ++i) {
      values[i] =
          float_of(random() % 3 == 0 ? kSpecial[random() % std::size(kSpecial)] : static_cast<std::uint32_t>(random()));
    }
    GetParam().split(upper.data(), low.data(), values.data(), n);
    GetParam().join(back.data(), upper.data(), low.data(), n);
    ASSERT_TRUE(upper.guards_intact() && low.guards_intact());
    for (std::size_t i = 0; i < 8; ++i) ASSERT_EQ(back[n + i], 7.0F);
    for (std::size_t i = 0; i < n; ++i) {
      if (std::isnan(values[i])) {
        ASSERT_EQ(upper.bits(i), 0x7FC0U);
        ASSERT_EQ(low.bits(i), 0U);
        ASSERT_TRUE(std::isnan(back[i]));
        continue;
      }
      const std::uint32_t bits = bits_of(values[i]);
      ASSERT_EQ(bits_of(back[i]), bits) << std::hex << bits;
      if (std::isinf(values[i])) {
        ASSERT_EQ(upper.get(i), static_cast<double>(values[i]));
      }
      // Nearest: no neighbour is nearer, and of two equally near ones it is that with the larger magnitude.
      const double exact = static_cast<double>(values[i]);
      const std::uint32_t rounded = upper.bits(i);
      ASSERT_EQ(rounded >> 15, bits >> 31) << "the sign stays";
      const double error = std::fabs(upper.get(i) - exact);
      if (std::isinf(upper.get(i))) {
        ASSERT_GE(bits & 0x7FFFFFFF, 0x7F7F8000U);
        continue;
      }
      const double inner =
          (rounded & 0x7FFF) == 0 ? INFINITY : std::fabs(decode(rounded - 1, DType::kBFloat16) - exact);
      const double outer = std::fabs(decode(rounded + 1, DType::kBFloat16) - exact);
      ASSERT_LE(error, inner) << std::hex << bits;
      ASSERT_LT(error, outer) << std::hex << bits;
    }
  }
}

// With a float32 master the devices must see the very weights that a split master would show them.
TEST_P(StateFormats, APublishedWeightRoundsAsASplitOneOnRequest) {
  std::mt19937 random(8);
  for (std::size_t n = 0; n <= 1100; ++n) {
    Tensor values(DType::kFloat32, n, random() % 33), master(DType::kFloat32, n, random() % 33);
    Tensor published(DType::kBFloat16, n, random() % 33), low(DType::kFloat16, n), upper(DType::kBFloat16, n);
    Tensor gradient(DType::kBFloat16, n);
    for (std::size_t i = 0; i < n; ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      values.set_bits(i, random() % 2 == 0 ? (bits & 0xFFFF0000) | 0x8000 : bits);  // ties
    }
    UpdateSpans spans;
    spans.weight.master = master.data();
    spans.weight.before = values.data();  // read here, written there
    spans.weight.published = published.data();
    spans.weight.ties_away = true;
    spans.gradient = gradient.data();
    spans.gradient_dtype = DType::kBFloat16;
    SgdOptions options;
    options.lr = 0;
    GetParam().sgd(spans, sgd_numbers(options, true), 0, n);
    GetParam().split(upper.data(), low.data(), reinterpret_cast<const float*>(values.data()), n);
    ASSERT_TRUE(master.guards_intact() && published.guards_intact() && values.guards_intact());
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(published.bits(i), upper.bits(i)) << std::hex << values.bits(i);
      if (!std::isnan(values.get(i))) {
        ASSERT_EQ(master.bits(i), values.bits(i));
      }
    }
  }
}

TEST_P(StateFormats, SquaresAreSummedInDoubleForEverySizeAndAlignment) {
  std::mt19937 random(9);
  for (const DType dtype : kDTypes) {
    for (std::size_t n = 0; n <= 1100; ++n) {
      Tensor values(dtype, n, random() % 33);
      double sum = 0, largest = 0;
      for (std::size_t i = 0; i < n; ++i) {
        values.set(i, either_sign(random, 0, random() % 4 == 0 && dtype != DType::kFloat16 ? 1e30 : 4));
        sum += values.get(i) * values.get(i);
        largest = std::max(largest, sum);
      }
      const double got = GetParam().square_sum(values.data(), dtype, n);
      ASSERT_LE(std::fabs(got - sum), 1e-13 * largest) << n;
      for (const UpdateKernels& other : update_kernels()) {
        if (other.supported()) {
          ASSERT_EQ(other.square_sum(values.data(), dtype, n), got) << other.isa;
        }
      }
      if (n == 0) continue;
      values.set(random() % n, random() % 2 == 0 ? INFINITY : std::nan(""));
      ASSERT_FALSE(std::isfinite(GetParam().square_sum(values.data(), dtype, n))) << n;
    }
  }
}

TEST_P(StateFormats, StochasticRoundingIsReproducibleAndIndependentOfSlices) {
  constexpr std::size_t kElements = 1000;
  std::mt19937 random(2);
  Tensor values(DType::kFloat32, kElements);
  for (std::size_t i = 0; i < kElements; ++i) values.set(i, either_sign(random, 0.5, 1));
  Tensor first(DType::kBFloat16, kElements), again = first, cut = first, seed = first, step = first;
  round_to_moment(values, first, {true, 5, 9}, 0, kElements);
  round_to_moment(values, again, {true, 5, 9}, 0, kElements);
  round_to_moment(values, seed, {true, 6, 9}, 0, kElements);
  round_to_moment(values, step, {true, 5, 10}, 0, kElements);
  for (std::size_t at = 0; at < kElements; at += 3 * kUpdateAlignment) {
    round_to_moment(values, cut, {true, 5, 9}, at, std::min(kElements, at + 3 * kUpdateAlignment));
  }
  std::size_t other_seed = 0, other_step = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    ASSERT_EQ(first.bits(i), again.bits(i));
    ASSERT_EQ(first.bits(i), cut.bits(i));
    other_seed += first.bits(i) != seed.bits(i);
    other_step += first.bits(i) != step.bits(i);
  }
  // Two independent roundings of a number that lies uniformly between its neighbours differ in one case of three.
  EXPECT_NEAR(static_cast<double>(other_seed), kElements / 3.0, 60);
  EXPECT_NEAR(static_cast<double>(other_step), kElements / 3.0, 60);
}

TEST_P(StateFormats, AnElementsRoundingDoesNotDependOnTheLength) {
  std::mt19937 random(6);
  Tensor values(DType::kFloat32, 200);
  for (std::size_t i = 0; i < 200; ++i) values.set(i, either_sign(random, 0.5, 1));
  Tensor longest(DType::kBFloat16, 200);
  round_to_moment(values, longest, {true, 1, 2}, 0, 200);
  for (std::size_t n = 1; n < 200; ++n) {
    Tensor shorter(DType::kBFloat16, 200);
    round_to_moment(values, shorter, {true, 1, 2}, 0, n);
    for (std::size_t i = 0; i < n; ++i) ASSERT_EQ(shorter.bits(i), longest.bits(i)) << "n " << n << " i " << i;
  }
}

// With one random number for both, an average that is rounded up would go with a variance that is rounded up.
TEST_P(StateFormats, AverageAndVarianceRoundIndependently) {
  constexpr std::size_t kElements = 20000;
  std::mt19937 random(7);
  Tensor weight(DType::kFloat32, kElements), gradient(DType::kFloat32, kElements);
  Tensor average(DType::kBFloat16, kElements), variance(DType::kBFloat16, kElements);
  for (std::size_t i = 0; i < kElements; ++i) gradient.set(i, uniform(random, 1, 1.4));
  UpdateSpans spans;
  spans.weight.master = weight.data();
  spans.gradient = gradient.data();
  spans.moments[0] = {average.data(), DType::kBFloat16};
  spans.moments[1] = {variance.data(), DType::kBFloat16};
  spans.rounding = {true, 1, 1};
  AdamOptions options;
  options.beta1 = options.beta2 = 0;
  GetParam().adam(spans, adam_numbers(options, 1), 0, kElements);
  double differ = 0;
  for (std::size_t i = 0; i < kElements; ++i) {
    const double g = gradient.get(i);
    differ += (average.get(i) > g) != (variance.get(i) > g * g);
  }
  EXPECT_NEAR(differ / kElements, 0.5, 0.02);  // a third if one number decided both
}

TEST_P(StateFormats, StochasticRoundingIsRightOnAverage) {
  constexpr std::size_t kElements = 256;
  constexpr int kSteps = 2000;
  std::mt19937 random(3);
  Tensor values(DType::kFloat32, kElements), moment(DType::kBFloat16, kElements);
  for (std::size_t i = 0; i < kElements; ++i) {
    values.set(i, i % 16 == 0 ? either_sign(random, 0, 1e-39) : either_sign(random, 0.5, 1));
  }
  std::vector<double> sum(kElements, 0.0);
  for (int step = 0; step < kSteps; ++step) {
    round_to_moment(values, moment, {true, 77, static_cast<std::uint64_t>(step)}, 0, kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      sum[i] += moment.get(i);
      // Always one of the two neighbours.
      const std::uint32_t cut = encode(values.get(i), DType::kFloat32) >> 16;
      ASSERT_TRUE(moment.bits(i) == cut || moment.bits(i) == cut + 1);
    }
  }
  for (std::size_t i = 0; i < kElements; ++i) {
    // One rounding deviates by at most half a spacing (in the mean square); five times that over sqrt(steps).
    const double spacing = 2 * rounding_error(values.get(i), DType::kBFloat16);
    EXPECT_NEAR(sum[i] / kSteps, values.get(i), 5 * spacing / 2 / std::sqrt(kSteps)) << i;
  }
}

TEST_P(StateFormats, NeighboursRoundIndependently) {
  constexpr std::size_t kElements = 1 << 15;
  Tensor values(DType::kFloat32, kElements), moment(DType::kBFloat16, kElements);
  for (std::size_t i = 0; i < kElements; ++i) values.set(i, 1 + std::ldexp(0.5, -7));  // half way
  round_to_moment(values, moment, {true, 0, 1}, 0, kElements);
  const auto up = [&](std::size_t i) { return moment.bits(i) != 0x3F80; };
  for (const std::size_t distance : {1U, 2U, 7U, 8U, 16U, 64U, 256U, 4096U}) {
    double equal = 0;
    for (std::size_t i = 0; i + distance < kElements; ++i) equal += up(i) == up(i + distance);
    const double pairs = static_cast<double>(kElements - distance);
    EXPECT_NEAR(equal / pairs, 0.5, 2.5 / std::sqrt(pairs)) << distance;
  }
}

TEST_P(StateFormats, StochasticRoundingKeepsWhatNeedsNone) {
  const float values[] = {
      0.0F, -0.0F, 1.5F, -2.0F, INFINITY, -INFINITY, std::nanf(""), float_of(0x7F800001), float_of(0xFFFFFFFF)};
  Tensor source(DType::kFloat32, 90), moment(DType::kBFloat16, 90);
  for (std::size_t i = 0; i < 90; ++i) source.set_bits(i, bits_of(values[i % 9]));
  round_to_moment(source, moment, {true, 1, 1}, 0, 90);
  for (std::size_t i = 0; i < 90; ++i) {
    if (i % 9 >= 6) {
      ASSERT_TRUE(std::isnan(moment.get(i)));
    } else {
      ASSERT_EQ(moment.bits(i), bits_of(values[i % 9]) >> 16);
    }
  }
}

TEST_P(StateFormats, TheLargestVarianceIsRoundedAsTheVariance) {
  constexpr std::size_t kElements = 640;
  std::mt19937 random(4);
  Tensor weight(DType::kFloat32, kElements), gradient(DType::kFloat32, kElements);
  Tensor average(DType::kBFloat16, kElements), variance = average, largest = average;
  UpdateSpans spans;
  spans.weight.master = weight.data();
  spans.gradient = gradient.data();
  spans.moments = {MomentSpan{average.data(), DType::kBFloat16}, MomentSpan{variance.data(), DType::kBFloat16},
                   MomentSpan{largest.data(), DType::kBFloat16}};
  std::vector<double> most(kElements, 0.0);
  for (int step = 1; step <= 20; ++step) {
    for (std::size_t i = 0; i < kElements; ++i) gradient.set(i, either_sign(random, 0, 1));
    spans.rounding = {true, 3, static_cast<std::uint64_t>(step)};
    AdamOptions options;
    options.beta2 = 0.7;
    GetParam().adam(spans, adam_numbers(options, step), 0, kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      most[i] = std::max(most[i], variance.get(i));
      ASSERT_EQ(largest.get(i), most[i]) << "step " << step << " i " << i;
    }
  }
}

// With a decay of 0.999 a bfloat16 that is rounded to nearest cannot move: stochastic rounding is what makes it follow.
TEST_P(StateFormats, ASlowAverageFollowsOnlyWithStochasticRounding) {
  constexpr std::size_t kElements = 512;
  for (const bool stochastic : {true, false}) {
    Tensor weight(DType::kFloat32, kElements), gradient(DType::kFloat32, kElements);
    Tensor average(DType::kBFloat16, kElements), variance(DType::kBFloat16, kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      gradient.set(i, 1);
      variance.set(i, 4);
    }
    UpdateSpans spans;
    spans.weight.master = weight.data();
    spans.gradient = gradient.data();
    spans.moments[0] = {average.data(), DType::kBFloat16};
    spans.moments[1] = {variance.data(), DType::kBFloat16};
    double mean = 0;
    for (int step = 1; step <= 1000; ++step) {
      spans.rounding = {stochastic, 3, static_cast<std::uint64_t>(step)};
      GetParam().adam(spans, adam_numbers({}, step), 0, kElements);
    }
    for (std::size_t i = 0; i < kElements; ++i) mean += variance.get(i) / kElements;
    const double exact = 1 + 3 * std::pow(0.999, 1000);
    if (stochastic) {
      EXPECT_NEAR(mean, exact, 0.05);
    } else {
      EXPECT_GT(mean, exact + 1);
    }
  }
}

INSTANTIATE_UPDATE_TESTS(StateFormats);

TEST(UpdateKernelTable, HasTheRowsOfTheConversions) {
  ASSERT_EQ(update_kernels().size(), convert_kernels().size());
  for (std::size_t i = 0; i < update_kernels().size(); ++i) {
    EXPECT_STREQ(update_kernels()[i].isa, convert_kernels()[i].isa);
    EXPECT_EQ(update_kernels()[i].supported(), convert_kernels()[i].supported());
    if (!update_kernels()[i].supported()) continue;
    force_isa(update_kernels()[i].isa);
    EXPECT_STREQ(active_update_kernels().isa, update_kernels()[i].isa);
    force_isa(nullptr);
  }
  EXPECT_STREQ(active_update_kernels().isa, active_convert_kernels().isa);
}

}  // namespace
}  // namespace roundpipe::cpu
