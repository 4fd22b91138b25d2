// Adam and AdamW, one pass over memory: gradient times factor, decay, moments, weight, published weight.
#pragma once

#include <cstddef>

#include "cpu/state_formats.h"

namespace roundpipe::cpu {

struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool decoupled = false;  // the decay scales the weight (AdamW) instead of joining the gradient
  bool maximize = false;
  double factor = 1;  // multiplies every gradient: one over the loss scale, times what clips it
};

// The numbers of one step, computed in double and rounded once, as torch does.
struct AdamNumbers {
  float factor;  // negative to maximize
  float decay;   // multiplies the weight
  float coupled_decay;
  // The first moment is base + lerp * (gradient - moment), where base is the nearer end: exact for beta1 = 0.
  float lerp;
  bool lerp_from_gradient;
  float beta2, beta2_rest;
  float inverse_correction2_sqrt;
  float eps;
  float negative_step_size;
};
AdamNumbers adam_numbers(const AdamOptions& options, double step);  // step >= 1, counted with this one

// Moments: average of gradients, of their squares, and, for amsgrad, the largest of the latter. Elements [begin, end);
// begin is a multiple of kUpdateAlignment.
using AdamKernel = void (*)(const UpdateSpans& spans, const AdamNumbers& numbers, std::size_t begin, std::size_t end);

}  // namespace roundpipe::cpu
