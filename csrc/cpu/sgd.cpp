#include "cpu/sgd.h"

namespace roundpipe::cpu {

SgdNumbers sgd_numbers(const SgdOptions& options, bool first) {
  SgdNumbers numbers{};
  numbers.factor = static_cast<float>(options.maximize ? -options.factor : options.factor);
  numbers.weight_decay = static_cast<float>(options.weight_decay);
  numbers.momentum = static_cast<float>(options.momentum);
  numbers.dampening_rest = static_cast<float>(1 - options.dampening);
  numbers.negative_lr = static_cast<float>(-options.lr);
  numbers.nesterov = options.nesterov;
  numbers.first = first;
  return numbers;
}

}  // namespace roundpipe::cpu
