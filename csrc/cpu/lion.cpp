#include "cpu/lion.h"

namespace roundpipe::cpu {

LionNumbers lion_numbers(const LionOptions& options) {
  LionNumbers numbers{};
  numbers.factor = static_cast<float>(options.maximize ? -options.factor : options.factor);
  numbers.decay = static_cast<float>(1 - options.lr * options.weight_decay);
  numbers.beta1 = static_cast<float>(options.beta1);
  numbers.beta1_rest = static_cast<float>(1 - options.beta1);
  numbers.beta2 = static_cast<float>(options.beta2);
  numbers.beta2_rest = static_cast<float>(1 - options.beta2);
  numbers.negative_lr = static_cast<float>(-options.lr);
  return numbers;
}

}  // namespace roundpipe::cpu
