// Stochastic gradient descent with momentum, one pass over memory.
#pragma once

#include <cstddef>

#include "cpu/state_formats.h"

namespace roundpipe::cpu {

struct SgdOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  double factor = 1;  // multiplies every gradient
};

struct SgdNumbers {
  float factor;  // negative to maximize
  float weight_decay;
  float momentum;
  float dampening_rest;
  float negative_lr;
  bool nesterov;
  bool first;  // the buffer becomes the gradient, undampened; what it held is not looked at
};
SgdNumbers sgd_numbers(const SgdOptions& options, bool first);

// Moments: the momentum buffer, none without momentum. Elements [begin, end); begin is a multiple of kUpdateAlignment.
using SgdKernel = void (*)(const UpdateSpans& spans, const SgdNumbers& numbers, std::size_t begin, std::size_t end);

}  // namespace roundpipe::cpu
