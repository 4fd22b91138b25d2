// The optimizers over one instruction set (vector.h), and the row of update_kernels.h that they make.
#pragma once

#include "cpu/state_loops.h"
#include "cpu/update_kernels.h"

namespace roundpipe::cpu {
namespace {

template <class Isa>
class Adam {
 public:
  using Vec = typename Isa::Vec;

  RP_INLINE explicit Adam(const AdamNumbers& numbers)
      : numbers_(numbers),
        factor_(Isa::broadcast(numbers.factor)),
        decay_(Isa::broadcast(numbers.decay)),
        coupled_decay_(Isa::broadcast(numbers.coupled_decay)),
        lerp_(Isa::broadcast(numbers.lerp)),
        beta2_(Isa::broadcast(numbers.beta2)),
        beta2_rest_(Isa::broadcast(numbers.beta2_rest)),
        inverse_correction2_sqrt_(Isa::broadcast(numbers.inverse_correction2_sqrt)),
        eps_(Isa::broadcast(numbers.eps)),
        negative_step_size_(Isa::broadcast(numbers.negative_step_size)) {}

  RP_INLINE void step(const UpdateSpans& spans, std::size_t at, typename Isa::Bits random) const {
    Vec gradient = Isa::multiply(factor_, load_any<Isa>(spans.gradient, spans.gradient_dtype, at));
    Vec weight = load_weight<Isa>(spans.weight, at);
    // Not always: 0 times an infinite weight is NaN.
    if (numbers_.coupled_decay != 0) gradient = Isa::multiply_add(coupled_decay_, weight, gradient);

    Vec average = load_moment<Isa>(spans.moments[0], at);
    average =
        Isa::multiply_add(lerp_, Isa::subtract(gradient, average), numbers_.lerp_from_gradient ? gradient : average);
    store_moment<Isa>(spans, 0, at, average, random);

    // In torch's order: the rest times the gradient first, so that a large gradient overflows no sooner.
    const Vec square = Isa::multiply(Isa::multiply(beta2_rest_, gradient), gradient);
    Vec variance = Isa::multiply_add(beta2_, load_moment<Isa>(spans.moments[1], at), square);
    store_moment<Isa>(spans, 1, at, variance, random);
    if (spans.moments[2].data != nullptr) {
      variance = Isa::maximum(load_moment<Isa>(spans.moments[2], at), variance);
      store_moment<Isa>(spans, 2, at, variance, random);
    }

    const Vec denominator = Isa::multiply_add(Isa::square_root(variance), inverse_correction2_sqrt_, eps_);
    const Vec change = Isa::divide(Isa::multiply(negative_step_size_, average), denominator);
    store_weight<Isa>(spans.weight, at, Isa::multiply_add(weight, decay_, change));
  }

 private:
  AdamNumbers numbers_;
  Vec factor_, decay_, coupled_decay_, lerp_, beta2_, beta2_rest_, inverse_correction2_sqrt_, eps_, negative_step_size_;
};

template <class Isa>
class Sgd {
 public:
  using Vec = typename Isa::Vec;

  RP_INLINE explicit Sgd(const SgdNumbers& numbers)
      : numbers_(numbers),
        factor_(Isa::broadcast(numbers.factor)),
        weight_decay_(Isa::broadcast(numbers.weight_decay)),
        momentum_(Isa::broadcast(numbers.momentum)),
        dampening_rest_(Isa::broadcast(numbers.dampening_rest)),
        negative_lr_(Isa::broadcast(numbers.negative_lr)) {}

  RP_INLINE void step(const UpdateSpans& spans, std::size_t at, typename Isa::Bits random) const {
    Vec gradient = Isa::multiply(factor_, load_any<Isa>(spans.gradient, spans.gradient_dtype, at));
    const Vec weight = load_weight<Isa>(spans.weight, at);
    if (numbers_.weight_decay != 0) gradient = Isa::multiply_add(weight_decay_, weight, gradient);
    if (spans.moments[0].data != nullptr) {
      Vec buffer = gradient;
      if (!numbers_.first) {
        const Vec decayed = Isa::multiply(momentum_, load_moment<Isa>(spans.moments[0], at));
        buffer = Isa::multiply_add(dampening_rest_, gradient, decayed);
      }
      store_moment<Isa>(spans, 0, at, buffer, random);
      gradient = numbers_.nesterov ? Isa::multiply_add(momentum_, buffer, gradient) : buffer;
    }
    store_weight<Isa>(spans.weight, at, Isa::multiply_add(negative_lr_, gradient, weight));
  }

 private:
  SgdNumbers numbers_;
  Vec factor_, weight_decay_, momentum_, dampening_rest_, negative_lr_;
};

template <class Isa>
class Lion {
 public:
  using Vec = typename Isa::Vec;

  RP_INLINE explicit Lion(const LionNumbers& numbers)
      : factor_(Isa::broadcast(numbers.factor)),
        decay_(Isa::broadcast(numbers.decay)),
        beta1_(Isa::broadcast(numbers.beta1)),
        beta1_rest_(Isa::broadcast(numbers.beta1_rest)),
        beta2_(Isa::broadcast(numbers.beta2)),
        beta2_rest_(Isa::broadcast(numbers.beta2_rest)),
        negative_lr_(Isa::broadcast(numbers.negative_lr)) {}

  RP_INLINE void step(const UpdateSpans& spans, std::size_t at, typename Isa::Bits random) const {
    const Vec gradient = Isa::multiply(factor_, load_any<Isa>(spans.gradient, spans.gradient_dtype, at));
    const Vec average = load_moment<Isa>(spans.moments[0], at);
    const Vec direction = Isa::sign(Isa::multiply_add(beta1_, average, Isa::multiply(beta1_rest_, gradient)));
    store_moment<Isa>(spans, 0, at, Isa::multiply_add(beta2_, average, Isa::multiply(beta2_rest_, gradient)), random);
    const Vec weight = Isa::multiply(load_weight<Isa>(spans.weight, at), decay_);
    store_weight<Isa>(spans.weight, at, Isa::multiply_add(negative_lr_, direction, weight));
  }

 private:
  Vec factor_, decay_, beta1_, beta1_rest_, beta2_, beta2_rest_, negative_lr_;
};

template <class Isa>
RP_TARGET void split_loop(void* upper, void* low, const float* from, std::size_t n) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Isa::store_split(element(upper, i, 2), element(low, i, 2),
                     Isa::template load<DType::kFloat32>(element(from, i, 4)));
  }
  if (i == n) return;
  alignas(64) std::byte source[kLanes * 4] = {}, high[kLanes * 2], rest[kLanes * 2];
  std::memcpy(source, from + i, (n - i) * 4);
  Isa::store_split(high, rest, Isa::template load<DType::kFloat32>(source));
  std::memcpy(element(upper, i, 2), high, (n - i) * 2);
  std::memcpy(element(low, i, 2), rest, (n - i) * 2);
}

template <class Isa>
RP_TARGET void join_loop(float* to, const void* upper, const void* low, std::size_t n) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Isa::template store<DType::kFloat32>(element(to, i, 4), Isa::load_split(element(upper, i, 2), element(low, i, 2)));
  }
  if (i == n) return;
  alignas(64) std::byte high[kLanes * 2] = {}, rest[kLanes * 2] = {}, target[kLanes * 4];
  std::memcpy(high, element(upper, i, 2), (n - i) * 2);
  std::memcpy(rest, element(low, i, 2), (n - i) * 2);
  Isa::template store<DType::kFloat32>(target, Isa::load_split(high, rest));
  std::memcpy(to + i, target, (n - i) * 4);
}

template <class Isa>
RP_TARGET double square_sum_loop(const void* from, DType dtype, std::size_t n) {
  typename Isa::Squares sum = Isa::no_squares();
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) sum = Isa::add_squares(sum, load_any<Isa>(from, dtype, i));
  if (i < n) {
    alignas(64) std::byte rest[kLanes * 4] = {};
    std::memcpy(rest, element(from, i, width(dtype)), (n - i) * width(dtype));
    sum = Isa::add_squares(sum, load_any<Isa>(rest, dtype, 0));
  }
  double lanes[kLanes];
  Isa::store_squares(lanes, sum);
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

template <class Isa>
RP_TARGET void encode_loop(void* codes, float* scales, const float* from, std::size_t n, std::size_t moment) {
  for (std::size_t at = 0; at < n; at += kCodeBlock) {
    encode_block(static_cast<std::uint8_t*>(codes) + at, scales + at / kCodeBlock, from + at,
                 n - at < kCodeBlock ? n - at : kCodeBlock, code_of(moment));
  }
}

template <class Isa>
RP_TARGET void decode_loop(float* to, const void* codes, const float* scales, std::size_t n, std::size_t moment) {
  for (std::size_t at = 0; at < n; at += kCodeBlock) {
    decode_block(to + at, static_cast<const std::uint8_t*>(codes) + at, scales[at / kCodeBlock],
                 n - at < kCodeBlock ? n - at : kCodeBlock, code_of(moment));
  }
}

template <class Isa>
constexpr UpdateKernels update_row(const char* isa) {
  return {isa,
          Isa::supported,
          update_loop<Isa, Adam, AdamNumbers>,
          update_loop<Isa, Sgd, SgdNumbers>,
          update_loop<Isa, Lion, LionNumbers>,
          split_loop<Isa>,
          join_loop<Isa>,
          square_sum_loop<Isa>,
          encode_loop<Isa>,
          decode_loop<Isa>};
}

}  // namespace
}  // namespace roundpipe::cpu
