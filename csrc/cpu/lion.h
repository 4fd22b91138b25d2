// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), one pass over memory:
//   weight *= 1 - lr * weight_decay
//   weight -= lr * sign(beta1 * moment + (1 - beta1) * gradient)
//   moment  = beta2 * moment + (1 - beta2) * gradient
// The sign of NaN is NaN here, not 0 as torch.sign has it: a gradient that is not a number must show in the weight, not
// stop its training in silence.
#pragma once

#include <cstddef>

#include "cpu/state_formats.h"

namespace roundpipe::cpu {

struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;
  bool maximize = false;
  double factor = 1;  // multiplies every gradient
};

struct LionNumbers {
  float factor;  // negative to maximize
  float decay;   // multiplies the weight
  float beta1, beta1_rest;
  float beta2, beta2_rest;
  float negative_lr;
};
LionNumbers lion_numbers(const LionOptions& options);

// Moments: the average of gradients. Elements [begin, end); begin is a multiple of kUpdateAlignment.
using LionKernel = void (*)(const UpdateSpans& spans, const LionNumbers& numbers, std::size_t begin, std::size_t end);

}  // namespace roundpipe::cpu
