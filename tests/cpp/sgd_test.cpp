#include "cpu/sgd.h"

#include <cmath>
#include <random>
#include <string>

#include "update_rig.h"

namespace roundpipe::cpu {
namespace {

struct Expected {
  double weight, buffer, scale;
};
Expected oracle(const SgdOptions& options, bool first, double weight, double buffer, double gradient) {
  double g = gradient * options.factor * (options.maximize ? -1 : 1);
  Expected result{};
  result.scale = std::fabs(g);
  if (options.weight_decay != 0) {
    result.scale += std::fabs(options.weight_decay * weight);
    g += options.weight_decay * weight;
  }
  if (options.momentum != 0) {
    result.buffer = first ? g : options.momentum * buffer + (1 - options.dampening) * g;
    if (!first) result.scale += std::fabs(buffer);
    g = options.nesterov ? g + options.momentum * result.buffer : result.buffer;
  }
  result.weight = weight - options.lr * g;
  return result;
}

SgdOptions random_options(std::mt19937& random) {
  SgdOptions options;
  options.lr = uniform(random, 1e-3, 1e-1);
  options.momentum = random() % 3 == 0 ? 0.0 : 0.9;
  options.dampening = random() % 2 == 0 ? 0.0 : 0.25;
  options.weight_decay = random() % 2 == 0 ? 0.0 : 0.1;
  options.nesterov = random() % 2 == 0;
  options.maximize = random() % 2 == 0;
  options.factor = random() % 3 == 0 ? 1.0 : uniform(random, 0.1, 2.0);
  return options;
}

class Sgd : public UpdateTest {};

TEST_P(Sgd, EverySizeFormatAndAlignment) {
  std::mt19937 random(1);
  for (const MasterFormat master : kMasters) {
    for (const DType gradient_dtype : kDTypes) {
      for (const DType moment_dtype : kDTypes) {
        for (std::size_t n = 0; n <= 1100; n += n < 35 ? 1 : 1 + random() % 400) {
          const SgdOptions options = random_options(random);
          const bool first = random() % 3 == 0;
          const bool publish = random() % 2 == 0;
          Weight weight(master, n, kDTypes[random() % 3], random);
          Tensor gradient(gradient_dtype, n, random() % 33), buffer(moment_dtype, n, random() % 33);
          std::vector<double> weights(n), buffers(n);
          for (std::size_t i = 0; i < n; ++i) {
            weight.set(i, any_value(random));
            gradient.set(i, any_value(random));
            buffer.set(i, first ? std::nan("") : any_value(random));
            weights[i] = weight.get(i);
            buffers[i] = buffer.get(i);
          }
          UpdateSpans spans;
          spans.weight = weight.span(publish);
          spans.gradient = gradient.data();
          spans.gradient_dtype = gradient_dtype;
          if (options.momentum != 0) spans.moments[0] = {buffer.data(), moment_dtype};
          GetParam().sgd(spans, sgd_numbers(options, first), 0, n);
          ASSERT_TRUE(weight.master.guards_intact() && weight.published.guards_intact() && buffer.guards_intact());
          for (std::size_t i = 0; i < n; ++i) {
            const Expected want = oracle(options, first, weights[i], buffers[i], gradient.get(i));
            const auto where = [&] { return "n " + std::to_string(n) + " i " + std::to_string(i); };
            expect_near(weight.get(i), want.weight, std::fabs(weights[i]) + want.scale, weight.precision(), where);
            if (options.momentum != 0) expect_near(buffer.get(i), want.buffer, want.scale, moment_dtype, where);
            if (publish && master == MasterFormat::kFloat32 && !std::isnan(weight.get(i))) {
              ASSERT_EQ(weight.published.bits(i), encode(weight.get(i), weight.published.dtype())) << where();
            }
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_P(Sgd, EverySizeOfEveryFormatHasTheBitsOfTheLongest) {
  std::mt19937 random(4);
  for_every_format([&](MasterFormat master, DType gradient, DType moment) {
    const SgdOptions options = random_options(random);
    const SgdNumbers numbers = sgd_numbers(options, random() % 3 == 0);
    expect_bits_of_the_longest(master, gradient, moment, options.momentum != 0 ? 1 : 0, random,
                               [&](const UpdateSpans& spans, std::size_t n) { GetParam().sgd(spans, numbers, 0, n); });
  });
}

TEST_P(Sgd, HundredStepsOfEveryOption) {
  constexpr std::size_t kElements = 37;
  for (unsigned combination = 0; combination < 32; ++combination) {
    std::mt19937 random(combination);
    SgdOptions options;
    options.lr = 1e-2;
    options.momentum = combination & 1 ? 0.9 : 0.0;
    options.dampening = combination & 2 ? 0.3 : 0.0;
    options.nesterov = combination & 4;
    options.maximize = combination & 8;
    options.weight_decay = combination & 16 ? 0.1 : 0.0;
    Tensor weight(DType::kFloat32, kElements), gradient(DType::kFloat32, kElements), buffer(DType::kFloat32, kElements);
    std::vector<Expected> want(kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      weight.set(i, either_sign(random, 0, 1));
      want[i].weight = weight.get(i);
    }
    UpdateSpans spans;
    spans.weight.master = weight.data();
    spans.gradient = gradient.data();
    if (options.momentum != 0) spans.moments[0] = {buffer.data(), DType::kFloat32};
    for (int step = 0; step < 100; ++step) {
      for (std::size_t i = 0; i < kElements; ++i) gradient.set(i, either_sign(random, 0, 1));
      GetParam().sgd(spans, sgd_numbers(options, step == 0), 0, kElements);
      for (std::size_t i = 0; i < kElements; ++i) {
        want[i] = oracle(options, step == 0, want[i].weight, want[i].buffer, gradient.get(i));
      }
    }
    for (std::size_t i = 0; i < kElements; ++i) {
      ASSERT_NEAR(weight.get(i), want[i].weight, 2e-6 + 1e-5 * std::fabs(want[i].weight)) << combination;
    }
  }
}

TEST_P(Sgd, SplitMasterIsTheFloat32MasterBitForBit) {
  constexpr std::size_t kElements = 500;
  std::mt19937 random(3);
  SgdOptions options;
  options.momentum = 0.9;
  options.weight_decay = 0.01;
  Weight whole(MasterFormat::kFloat32, kElements, DType::kBFloat16, random);
  Weight split(MasterFormat::kSplit, kElements, DType::kBFloat16, random);
  Tensor gradient(DType::kBFloat16, kElements), one_buffer(DType::kFloat32, kElements);
  Tensor other_buffer(DType::kFloat32, kElements);
  for (std::size_t i = 0; i < kElements; ++i) {
    const double value = any_value(random);
    whole.set(i, value);
    split.set(i, value);
  }
  UpdateSpans one, other;
  one.weight = whole.span(false);
  other.weight = split.span(false);
  one.gradient = other.gradient = gradient.data();
  one.gradient_dtype = other.gradient_dtype = DType::kBFloat16;
  one.moments[0] = {one_buffer.data(), DType::kFloat32};
  other.moments[0] = {other_buffer.data(), DType::kFloat32};
  for (int step = 0; step < 200; ++step) {
    for (std::size_t i = 0; i < kElements; ++i) gradient.set(i, either_sign(random, 0, 1));
    GetParam().sgd(one, sgd_numbers(options, step == 0), 0, kElements);
    GetParam().sgd(other, sgd_numbers(options, step == 0), 0, kElements);
    for (std::size_t i = 0; i < kElements; ++i) {
      if (std::isnan(whole.get(i))) {
        ASSERT_TRUE(std::isnan(split.get(i)));
      } else {
        ASSERT_EQ(encode(split.get(i), DType::kFloat32), whole.master.bits(i)) << "step " << step << " i " << i;
      }
    }
  }
}

INSTANTIATE_UPDATE_TESTS(Sgd);

}  // namespace
}  // namespace roundpipe::cpu
