#include "cpu/adam.h"

#include <cmath>
#include <string>

#include "core/errors.h"

namespace roundpipe::cpu {

AdamNumbers adam_numbers(const AdamOptions& options, double step) {
  RP_REQUIRE(step >= 1, "adam: step is " + std::to_string(step) + ", expected 1 or more: count the step, then update");
  const double correction1 = 1 - std::pow(options.beta1, step);
  const double correction2 = 1 - std::pow(options.beta2, step);
  const double rest1 = 1 - options.beta1;
  AdamNumbers numbers{};
  numbers.factor = static_cast<float>(options.maximize ? -options.factor : options.factor);
  numbers.decay = static_cast<float>(options.decoupled ? 1 - options.lr * options.weight_decay : 1.0);
  numbers.coupled_decay = static_cast<float>(options.decoupled ? 0.0 : options.weight_decay);
  numbers.lerp_from_gradient = rest1 >= 0.5;
  numbers.lerp = static_cast<float>(numbers.lerp_from_gradient ? -options.beta1 : rest1);
  numbers.beta2 = static_cast<float>(options.beta2);
  numbers.beta2_rest = static_cast<float>(1 - options.beta2);
  numbers.inverse_correction2_sqrt = static_cast<float>(1 / std::sqrt(correction2));
  numbers.eps = static_cast<float>(options.eps);
  numbers.negative_step_size = static_cast<float>(-options.lr / correction1);
  return numbers;
}

}  // namespace roundpipe::cpu
