#include "cpu/adam.h"

#include <array>
#include <cmath>
#include <random>
#include <string>

#include "core/errors.h"
#include "update_rig.h"

namespace roundpipe::cpu {
namespace {

struct State {
  double weight, average, variance, largest;
};

// The definition, in double, one element.
struct Expected {
  State next;
  double weight_scale, average_scale, variance_scale;
};
Expected oracle(const AdamOptions& options, double step, bool amsgrad, State now, double gradient) {
  double g = gradient * options.factor * (options.maximize ? -1 : 1);
  double w = now.weight;
  double coupled = 0;
  if (options.weight_decay != 0) {
    if (options.decoupled) {
      w *= 1 - options.lr * options.weight_decay;
    } else {
      coupled = options.weight_decay * w;
      g += coupled;
    }
  }
  Expected result{};
  // torch.lerp, whose two forms differ for infinities.
  const double rest = 1 - options.beta1;
  result.next.average = rest < 0.5 ? now.average + rest * (g - now.average) : g - (g - now.average) * options.beta1;
  result.next.variance = options.beta2 * now.variance + (1 - options.beta2) * g * g;
  double v = result.next.variance;
  if (amsgrad) {
    v = std::isnan(now.largest) || std::isnan(v) ? std::nan("") : std::max(now.largest, v);
    result.next.largest = v;
  }
  const double denominator = std::sqrt(v) / std::sqrt(1 - std::pow(options.beta2, step)) + options.eps;
  const double factor = options.lr / (1 - std::pow(options.beta1, step)) / denominator;
  result.next.weight = w - factor * result.next.average;
  const double gradient_scale = std::fabs(g) + std::fabs(coupled);
  result.average_scale = std::fabs(now.average) + gradient_scale;
  result.variance_scale = now.variance + gradient_scale * gradient_scale;
  // A variance that is small because the gradient and its decay cancel is known less exactly.
  const double cancelled = result.variance_scale / v;
  result.weight_scale =
      std::fabs(w) + std::fabs(factor) * result.average_scale * (std::isfinite(cancelled) ? 1 + cancelled : 1);
  return result;
}

AdamOptions random_options(std::mt19937& random) {
  AdamOptions options;
  options.lr = uniform(random, 1e-4, 1e-2);
  options.beta1 = random() % 4 == 0 ? 0.0 : random() % 3 == 0 ? 0.3 : 0.9;
  options.beta2 = random() % 2 == 0 ? 0.999 : 0.95;
  options.eps = random() % 2 == 0 ? 1e-8 : 1e-3;
  options.weight_decay = random() % 3 == 0 ? 0.0 : 0.1;
  options.decoupled = random() % 2 == 0;
  options.maximize = random() % 2 == 0;
  options.factor = random() % 3 == 0 ? 1.0 : uniform(random, 0.1, 2.0);
  return options;
}

class Adam : public UpdateTest {
 protected:
  void check_one_step(MasterFormat master, DType gradient_dtype, DType moment_dtype, bool amsgrad, std::size_t n,
                      std::mt19937& random) {
    const AdamOptions options = random_options(random);
    const double step = 1 + static_cast<double>(random() % 50);
    const bool publish = random() % 2 == 0;
    Weight weight(master, n, kDTypes[random() % 3], random);
    Tensor gradient(gradient_dtype, n, random() % 33);
    std::array<Tensor, 3> moments;
    for (Tensor& moment : moments) moment = Tensor(moment_dtype, n, random() % 33);
    std::vector<State> before(n);
    for (std::size_t i = 0; i < n; ++i) {
      weight.set(i, any_value(random));
      gradient.set(i, any_value(random));
      moments[0].set(i, any_value(random));
      moments[1].set(i, std::fabs(any_value(random)));
      moments[2].set(i, std::fabs(any_value(random)));
      before[i] = {weight.get(i), moments[0].get(i), moments[1].get(i), moments[2].get(i)};
    }
    UpdateSpans spans;
    spans.weight = weight.span(publish);
    spans.gradient = gradient.data();
    spans.gradient_dtype = gradient_dtype;
    for (std::size_t i = 0; i < (amsgrad ? 3 : 2); ++i) spans.moments[i] = {moments[i].data(), moment_dtype};
    GetParam().adam(spans, adam_numbers(options, step), 0, n);

    const std::string what = "n " + std::to_string(n) + " master " + std::to_string(static_cast<int>(master)) +
                             " gradient " + std::to_string(static_cast<int>(gradient_dtype)) + " moments " +
                             std::to_string(static_cast<int>(moment_dtype)) + " i ";
    ASSERT_TRUE(weight.master.guards_intact() && weight.published.guards_intact() && gradient.guards_intact()) << what;
    for (const Tensor& moment : moments) ASSERT_TRUE(moment.guards_intact()) << what;
    for (std::size_t i = 0; i < n; ++i) {
      const Expected want = oracle(options, step, amsgrad, before[i], gradient.get(i));
      const auto where = [&] { return what + std::to_string(i); };
      expect_near(moments[0].get(i), want.next.average, want.average_scale, moment_dtype, where, " average");
      expect_near(moments[1].get(i), want.next.variance, want.variance_scale, moment_dtype, where, " variance");
      if (amsgrad) {
        expect_near(moments[2].get(i), want.next.largest, want.variance_scale, moment_dtype, where, " largest");
      }
      expect_near(weight.get(i), want.next.weight, want.weight_scale, weight.precision(), where, " weight");
      if (HasFatalFailure()) return;
      if (publish && master != MasterFormat::kSplit) {
        // What is published is the new weight rounded once, where the master shows the new weight whole.
        if (master == MasterFormat::kFloat32 && !std::isnan(weight.get(i))) {
          ASSERT_EQ(weight.published.bits(i), encode(weight.get(i), weight.published.dtype())) << where();
        }
        expect_near(weight.published.get(i), want.next.weight, want.weight_scale, weight.published.dtype(), where);
      }
      if (HasFatalFailure()) return;
    }
  }
};

TEST_P(Adam, EverySizeFormatAndAlignment) {
  std::mt19937 random(1);
  for (const MasterFormat master : kMasters) {
    for (const DType gradient : kDTypes) {
      for (const DType moment : kDTypes) {
        for (std::size_t n = 0; n <= 1100; n += n < 35 ? 1 : 1 + random() % 400) {
          check_one_step(master, gradient, moment, random() % 2 == 0, n, random);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(Adam, EveryTailOfTheCommonFormats) {
  std::mt19937 random(2);
  for (std::size_t n = 0; n <= 1100; n += n < 150 ? 1 : 7) {
    check_one_step(MasterFormat::kFloat32, DType::kFloat32, DType::kFloat32, n % 2 == 0, n, random);
    check_one_step(MasterFormat::kSplit, DType::kBFloat16, DType::kFloat32, n % 3 == 0, n, random);
    if (HasFatalFailure()) return;
  }
}

TEST_P(Adam, EverySizeOfEveryFormatHasTheBitsOfTheLongest) {
  std::mt19937 random(4);
  for_every_format([&](MasterFormat master, DType gradient, DType moment) {
    const AdamNumbers numbers = adam_numbers(random_options(random), 1 + random() % 50);
    expect_bits_of_the_longest(master, gradient, moment, 2 + random() % 2, random,
                               [&](const UpdateSpans& spans, std::size_t n) { GetParam().adam(spans, numbers, 0, n); });
  });
}

TEST_P(Adam, HundredStepsOfEveryOption) {
  constexpr std::size_t kElements = 53;
  for (unsigned combination = 0; combination < 32; ++combination) {
    std::mt19937 random(combination);
    AdamOptions options;
    options.lr = 1e-2;
    options.decoupled = combination & 1;
    options.maximize = combination & 2;
    options.weight_decay = combination & 4 ? 0.05 : 0;
    options.beta1 = combination & 8 ? 0.0 : 0.9;
    options.factor = 1.0 / 128;
    const bool amsgrad = combination & 16;
    Tensor weight(DType::kFloat32, kElements), gradient(DType::kFloat32, kElements);
    std::array<Tensor, 3> moments;
    moments.fill(Tensor(DType::kFloat32, kElements));
    std::vector<State> want(kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      weight.set(i, either_sign(random, 0.01, 2));
      want[i] = {weight.get(i), 0, 0, 0};
    }
    UpdateSpans spans;
    spans.weight.master = weight.data();
    spans.gradient = gradient.data();
    for (std::size_t i = 0; i < (amsgrad ? 3 : 2); ++i) spans.moments[i] = {moments[i].data(), DType::kFloat32};
    for (int step = 1; step <= 100; ++step) {
      for (std::size_t i = 0; i < kElements; ++i) gradient.set(i, either_sign(random, 0.1, 300));
      GetParam().adam(spans, adam_numbers(options, step), 0, kElements);
      for (std::size_t i = 0; i < kElements; ++i) {
        want[i] = oracle(options, step, amsgrad, want[i], gradient.get(i)).next;
      }
    }
    for (std::size_t i = 0; i < kElements; ++i) {
      ASSERT_NEAR(weight.get(i), want[i].weight, 1e-6 + 1e-5 * std::fabs(want[i].weight)) << combination;
      ASSERT_NEAR(moments[1].get(i), want[i].variance, 1e-5 * want[i].variance) << combination;
    }
  }
}

TEST_P(Adam, SplitMasterIsTheFloat32MasterBitForBit) {
  constexpr std::size_t kElements = 1000;
  for (const DType gradient_dtype : kDTypes) {
    std::mt19937 random(3);
    AdamOptions options;
    options.weight_decay = 0.01;
    options.decoupled = gradient_dtype != DType::kFloat16;
    Weight whole(MasterFormat::kFloat32, kElements, DType::kBFloat16, random);
    Weight split(MasterFormat::kSplit, kElements, DType::kBFloat16, random);
    Tensor gradient(gradient_dtype, kElements);
    std::array<Tensor, 4> moments;
    moments.fill(Tensor(DType::kFloat32, kElements));
    for (std::size_t i = 0; i < kElements; ++i) {
      const double value = i < 300 ? any_value(random) : either_sign(random, 0, i < 500 ? 1e-39 : 2);
      whole.set(i, value);
      split.set(i, value);
    }
    UpdateSpans one, other;
    one.weight = whole.span(true);
    other.weight = split.span(true);
    one.gradient = other.gradient = gradient.data();
    one.gradient_dtype = other.gradient_dtype = gradient_dtype;
    for (std::size_t i = 0; i < 2; ++i) {
      one.moments[i] = {moments[i].data(), DType::kFloat32};
      other.moments[i] = {moments[i + 2].data(), DType::kFloat32};
    }
    for (int step = 1; step <= 200; ++step) {
      for (std::size_t i = 0; i < kElements; ++i) gradient.set(i, either_sign(random, 0, 1));
      const AdamNumbers numbers = adam_numbers(options, step);
      GetParam().adam(one, numbers, 0, kElements);
      GetParam().adam(other, numbers, 0, kElements);
      for (std::size_t i = 0; i < kElements; ++i) {
        const float exact = float_of(whole.master.bits(i));
        if (std::isnan(exact)) {
          ASSERT_TRUE(std::isnan(split.get(i)) && std::isnan(split.published.get(i)));
          continue;
        }
        ASSERT_EQ(bits_of(static_cast<float>(split.get(i))), bits_of(exact)) << "step " << step << " i " << i;
        // Published: nearest, as the float32 master's but for ties.
        const auto error = std::fabs(split.published.get(i) - static_cast<double>(exact));
        ASSERT_TRUE(error == std::fabs(whole.published.get(i) - static_cast<double>(exact)) || std::isinf(exact));
      }
    }
  }
}

TEST_P(Adam, SlicesDoNotChangeTheResult) {
  constexpr std::size_t kElements = 64 * 40 + 13;
  for (const bool stochastic : {false, true}) {
    const DType moment_dtype = stochastic ? DType::kBFloat16 : DType::kFloat32;
    std::mt19937 random(5);
    Weight whole(MasterFormat::kFloat32, kElements, DType::kBFloat16, random);
    Tensor gradient(DType::kBFloat16, kElements, 2);
    std::array<Tensor, 3> moments;
    for (Tensor& moment : moments) moment = Tensor(moment_dtype, kElements, 6);
    for (std::size_t i = 0; i < kElements; ++i) {
      whole.set(i, either_sign(random, 0, 1));
      gradient.set(i, either_sign(random, 0, 1));
      moments[1].set(i, uniform(random, 0, 1));
    }
    Weight cut = whole;
    auto cut_moments = moments;
    const AdamNumbers numbers = adam_numbers({}, 7);
    const auto spans_of = [&](Weight& weight, std::array<Tensor, 3>& held) {
      UpdateSpans spans;
      spans.weight = weight.span(true);
      spans.gradient = gradient.data();
      spans.gradient_dtype = DType::kBFloat16;
      for (std::size_t i = 0; i < 3; ++i) spans.moments[i] = {held[i].data(), moment_dtype};
      spans.rounding = {stochastic, 11, 7};
      return spans;
    };
    GetParam().adam(spans_of(whole, moments), numbers, 0, kElements);
    const UpdateSpans spans = spans_of(cut, cut_moments);
    std::vector<std::size_t> ends;
    for (std::size_t at = 0; at < kElements; at += kUpdateAlignment * (1 + random() % 5)) ends.push_back(at);
    ends.push_back(kElements);
    for (std::size_t i = ends.size() - 1; i > 0; --i) GetParam().adam(spans, numbers, ends[i - 1], ends[i]);
    for (std::size_t i = 0; i < kElements; ++i) {
      ASSERT_EQ(whole.master.bits(i), cut.master.bits(i)) << i;
      ASSERT_EQ(whole.published.bits(i), cut.published.bits(i)) << i;
      for (std::size_t m = 0; m < 3; ++m) ASSERT_EQ(moments[m].bits(i), cut_moments[m].bits(i)) << i;
    }
  }
}

// What torch's operators give in float32, where double would go on.
TEST_P(Adam, OverflowAndInfinityAsInFloat32) {
  struct Case {
    float weight, gradient, average, variance;
    float want_average, want_variance;
    double want_weight;
  };
  const float inf = INFINITY, nan = std::nanf("");
  AdamOptions options;
  options.beta2 = 0.5;
  options.beta1 = 0.5;
  options.lr = 1;
  const Case cases[] = {
      {1, inf, 0, 0, nan, inf, std::nan("")},          // lerp from the gradient: inf - inf
      {1, 1, inf, 1, inf, 1, -INFINITY},               //
      {1, 1e25F, 0, 0, 5e24F, inf, 1},                 // the square overflows: no change at all
      {1, nan, 1, 1, nan, nan, std::nan("")},          //
      {inf, 1, 0, 0, 0.5F, 0.5F, INFINITY},            //
      {1, 1, 0, inf, 0.5F, inf, 1},                    //
      {1, -1e-30F, 0, 0, -5e-31F, 0, 1},               // the square vanishes, eps remains
      {0, 0, 0, 0, 0, 0, 0},                           //
      {1, 2.5e19F, 0, 0, 1.25e19F, 3.125e38F, 1 - 1},  // (rest * g) * g fits where g * g would not
  };
  Tensor weight(DType::kFloat32, 1), gradient(DType::kFloat32, 1), average(DType::kFloat32, 1),
      variance(DType::kFloat32, 1);
  for (const Case& each : cases) {
    weight.set(0, static_cast<double>(each.weight));
    gradient.set(0, static_cast<double>(each.gradient));
    average.set(0, static_cast<double>(each.average));
    variance.set(0, static_cast<double>(each.variance));
    UpdateSpans spans;
    spans.weight.master = weight.data();
    spans.gradient = gradient.data();
    spans.moments[0] = {average.data(), DType::kFloat32};
    spans.moments[1] = {variance.data(), DType::kFloat32};
    GetParam().adam(spans, adam_numbers(options, 1), 0, 1);
    const auto where = [&] { return "gradient " + std::to_string(each.gradient); };
    expect_near(average.get(0), static_cast<double>(each.want_average), std::fabs(static_cast<double>(each.gradient)),
                DType::kFloat32, where, " average");
    expect_near(variance.get(0), static_cast<double>(each.want_variance),
                std::fabs(static_cast<double>(each.want_variance)), DType::kFloat32, where, " variance");
    expect_near(weight.get(0), each.want_weight, 1, DType::kFloat32, where, " weight");
  }
}

TEST_P(Adam, KeepsSubnormalNumbers) {
  AdamOptions options;
  options.eps = 1e-3;
  options.lr = 1;
  Tensor weight(DType::kFloat32, 70), gradient(DType::kFloat32, 70), average(DType::kFloat32, 70),
      variance(DType::kFloat32, 70);
  for (std::size_t i = 0; i < 70; ++i) {
    weight.set(i, 3e-40);
    gradient.set(i, 1e-40 * static_cast<double>(i));
    average.set(i, 2e-40);
    variance.set(i, 4e-40);
  }
  UpdateSpans spans;
  spans.weight.master = weight.data();
  spans.gradient = gradient.data();
  spans.moments[0] = {average.data(), DType::kFloat32};
  spans.moments[1] = {variance.data(), DType::kFloat32};
  GetParam().adam(spans, adam_numbers(options, 1), 0, 70);
  for (std::size_t i = 0; i < 70; ++i) {
    const double want = 1.8e-40 + 1e-41 * static_cast<double>(i);
    EXPECT_NEAR(average.get(i), want, 5e-45);
    EXPECT_NEAR(variance.get(i), 3.996e-40, 5e-45);
    EXPECT_NEAR(weight.get(i), 3e-40 - 10 * want / 1e-3, 3e-41);
  }
}

TEST_P(Adam, ZeroDecayLeavesInfiniteWeightsOutOfTheGradient) {
  Tensor weight(DType::kFloat32, 40), gradient(DType::kFloat32, 40), average(DType::kFloat32, 40),
      variance(DType::kFloat32, 40);
  for (std::size_t i = 0; i < 40; ++i) {
    weight.set(i, -INFINITY);
    gradient.set(i, 1);
  }
  UpdateSpans spans;
  spans.weight.master = weight.data();
  spans.gradient = gradient.data();
  spans.moments[0] = {average.data(), DType::kFloat32};
  spans.moments[1] = {variance.data(), DType::kFloat32};
  GetParam().adam(spans, adam_numbers({}, 1), 0, 40);
  for (std::size_t i = 0; i < 40; ++i) {
    EXPECT_NEAR(average.get(i), 0.1, 1e-7);
    EXPECT_EQ(weight.get(i), -INFINITY);
  }
}

INSTANTIATE_UPDATE_TESTS(Adam);

TEST(AdamNumbers, StepCountsFromOne) {
  EXPECT_THROW(adam_numbers({}, 0), InvalidArgument);
  EXPECT_THROW(adam_numbers({}, std::nan("")), InvalidArgument);
  EXPECT_NEAR(static_cast<double>(adam_numbers({}, 1).negative_step_size), -1e-2, 1e-9);
}

// Both use fused multiply-add, so only their vector lengths differ.
TEST(AdamInstructionSets, Avx512AndAvx2AgreeBitForBit) {
  const auto kernels = update_kernels();
  if (kernels.size() < 3 || !kernels[0].supported()) GTEST_SKIP() << "this processor has no avx512";
  constexpr std::size_t kElements = 777;
  std::mt19937 random(9);
  std::array<Weight, 2> weights{Weight(MasterFormat::kSplit, kElements, DType::kBFloat16, random),
                                Weight(MasterFormat::kSplit, kElements, DType::kBFloat16, random)};
  Tensor gradient(DType::kFloat16, kElements);
  std::array<Tensor, 4> moments;
  moments.fill(Tensor(DType::kBFloat16, kElements));
  for (std::size_t i = 0; i < kElements; ++i) {
    const double value = either_sign(random, 0, 1);
    for (Weight& weight : weights) weight.set(i, value);
    gradient.set(i, either_sign(random, 0, 1));
  }
  for (int step = 1; step < 20; ++step) {
    for (std::size_t k = 0; k < 2; ++k) {
      UpdateSpans spans;
      spans.weight = weights[k].span(true);
      spans.gradient = gradient.data();
      spans.gradient_dtype = DType::kFloat16;
      spans.moments[0] = {moments[2 * k].data(), DType::kBFloat16};
      spans.moments[1] = {moments[2 * k + 1].data(), DType::kBFloat16};
      spans.rounding = {true, 1, static_cast<std::uint64_t>(step)};
      kernels[k].adam(spans, adam_numbers({}, step), 0, kElements);
    }
  }
  for (std::size_t i = 0; i < kElements; ++i) {
    ASSERT_EQ(weights[0].get(i), weights[1].get(i)) << i;
    ASSERT_EQ(moments[0].bits(i), moments[2].bits(i)) << i;
    ASSERT_EQ(moments[1].bits(i), moments[3].bits(i)) << i;
  }
}

}  // namespace
}  // namespace roundpipe::cpu
