#include "cpu/lion.h"

#include <cmath>
#include <random>
#include <string>

#include "update_rig.h"

namespace roundpipe::cpu {
namespace {

LionOptions random_options(std::mt19937& random) {
  LionOptions options;
  options.lr = uniform(random, 1e-3, 1e-1);
  options.beta1 = random() % 4 == 0 ? 0.0 : 0.9;
  options.beta2 = random() % 2 == 0 ? 0.99 : 0.95;
  options.weight_decay = random() % 2 == 0 ? 0.0 : 0.1;
  options.maximize = random() % 2 == 0;
  options.factor = random() % 3 == 0 ? 1.0 : uniform(random, 0.1, 2.0);
  return options;
}

class Lion : public UpdateTest {};

TEST_P(Lion, EverySizeFormatAndAlignment) {
  std::mt19937 random(1);
  std::size_t clear = 0, all = 0;
  for (const MasterFormat master : kMasters) {
    for (const DType gradient_dtype : kDTypes) {
      for (const DType moment_dtype : kDTypes) {
        for (std::size_t n = 0; n <= 1100; n += n < 35 ? 1 : 1 + random() % 400) {
          const LionOptions options = random_options(random);
          const bool publish = random() % 2 == 0;
          Weight weight(master, n, kDTypes[random() % 3], random);
          Tensor gradient(gradient_dtype, n, random() % 33), average(moment_dtype, n, random() % 33);
          std::vector<double> weights(n), averages(n);
          for (std::size_t i = 0; i < n; ++i) {
            weight.set(i, any_value(random));
            gradient.set(i, any_value(random));
            average.set(i, any_value(random));
            weights[i] = weight.get(i);
            averages[i] = average.get(i);
          }
          UpdateSpans spans;
          spans.weight = weight.span(publish);
          spans.gradient = gradient.data();
          spans.gradient_dtype = gradient_dtype;
          spans.moments[0] = {average.data(), moment_dtype};
          GetParam().lion(spans, lion_numbers(options), 0, n);
          ASSERT_TRUE(weight.master.guards_intact() && weight.published.guards_intact() && average.guards_intact());
          for (std::size_t i = 0; i < n; ++i) {
            const double g = gradient.get(i) * options.factor * (options.maximize ? -1 : 1);
            const double m = averages[i];
            const double direction = options.beta1 * m + (1 - options.beta1) * g;
            const double scale = std::fabs(m) + std::fabs(g);
            const auto where = [&] { return "n " + std::to_string(n) + " i " + std::to_string(i); };
            expect_near(average.get(i), options.beta2 * m + (1 - options.beta2) * g, scale, moment_dtype, where);
            if (HasFatalFailure()) return;
            ++all;
            // Where the two terms cancel, or fall below the smallest number, rounding decides the sign.
            if (direction != 0 && std::fabs(direction) < 1e-6 * scale + 1e-44) continue;
            ++clear;
            const double sign = std::isnan(direction) ? direction : (direction > 0) - (direction < 0);
            const double want = weights[i] * (1 - options.lr * options.weight_decay) - options.lr * sign;
            expect_near(weight.get(i), want, std::fabs(weights[i]) + 1, weight.precision(), where);
            if (publish && master == MasterFormat::kFloat32 && !std::isnan(weight.get(i))) {
              ASSERT_EQ(weight.published.bits(i), encode(weight.get(i), weight.published.dtype())) << where();
            }
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(clear, all / 10 * 9);
}

TEST_P(Lion, EverySizeOfEveryFormatHasTheBitsOfTheLongest) {
  std::mt19937 random(4);
  for_every_format([&](MasterFormat master, DType gradient, DType moment) {
    const LionNumbers numbers = lion_numbers(random_options(random));
    expect_bits_of_the_longest(master, gradient, moment, 1, random,
                               [&](const UpdateSpans& spans, std::size_t n) { GetParam().lion(spans, numbers, 0, n); });
  });
}

TEST_P(Lion, ANumberThatIsNoneReachesTheWeight) {
  Tensor weight(DType::kFloat32, 50), gradient(DType::kFloat32, 50), average(DType::kFloat32, 50);
  for (std::size_t i = 0; i < 50; ++i) {
    weight.set(i, 1);
    gradient.set(i, i % 3 == 0 ? std::nan("") : i % 3 == 1 ? INFINITY : -0.0);
  }
  UpdateSpans spans;
  spans.weight.master = weight.data();
  spans.gradient = gradient.data();
  spans.moments[0] = {average.data(), DType::kFloat32};
  LionOptions options;
  options.lr = 0.5;
  GetParam().lion(spans, lion_numbers(options), 0, 50);
  for (std::size_t i = 0; i < 50; ++i) {
    if (i % 3 == 0) {
      EXPECT_TRUE(std::isnan(weight.get(i)) && std::isnan(average.get(i)));
    } else {
      EXPECT_EQ(weight.get(i), i % 3 == 1 ? 0.5 : 1.0) << "infinite: one step; zero: none";
      EXPECT_EQ(average.get(i), i % 3 == 1 ? INFINITY : 0.0);
    }
  }
}

INSTANTIATE_UPDATE_TESTS(Lion);

}  // namespace
}  // namespace roundpipe::cpu
