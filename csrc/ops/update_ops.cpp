// adam_update, sgd_update, lion_update, split_master, join_master, encode_moment, decode_moment: fused optimizer steps
// on the caller's thread and torch's own pool.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cpu/update_kernels.h"
#include "ops/checks.h"
#include "ops/guard.h"
#include "ops/update_list.h"

namespace roundpipe::ops {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<std::int64_t>;
using Floats = std::vector<double>;

void require_finite(const char* argument, double value) {
  if (!std::isfinite(value)) refuse(argument, "a finite number", std::to_string(value));
}

void require_beta(const char* argument, double value) {
  if (!(value >= 0 && value < 1)) refuse(argument, "a number from 0 to 1 (exclusive)", std::to_string(value));
}

void adam_update(Tensors masters, Tensors published, Tensors gradients, Tensors exp_avgs, Tensors exp_avg_sqs,
                 Tensors max_exp_avg_sqs, Floats steps, double lr, double beta1, double beta2, double eps,
                 double weight_decay, bool decoupled, bool maximize, double factor, Integers seeds) {
  require_same_length("exp_avgs", exp_avgs.size(), "masters", masters.size());
  require_same_length("exp_avg_sqs", exp_avg_sqs.size(), "masters", masters.size());
  require_same_length("steps", steps.size(), "masters", masters.size());
  require_finite("lr", lr);
  require_beta("beta1", beta1);
  require_beta("beta2", beta2);
  require_finite("eps", eps);
  require_finite("weight_decay", weight_decay);
  const cpu::AdamOptions options{lr, beta1, beta2, eps, weight_decay, decoupled, maximize, factor};
  std::vector<cpu::AdamNumbers> numbers;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (!(steps[i] >= 1)) refuse(at("steps", i), "1 or more: count the step, then update", std::to_string(steps[i]));
    // Powers are slow beside a tiny tensor, and nearly always all steps are equal.
    numbers.push_back(i != 0 && steps[i] == steps[i - 1] ? numbers.back() : cpu::adam_numbers(options, steps[i]));
  }
  const UpdateList list({std::move(masters),
                         std::move(published),
                         std::move(gradients),
                         {{"exp_avgs", std::move(exp_avgs)},
                          {"exp_avg_sqs", std::move(exp_avg_sqs)},
                          {"max_exp_avg_sqs", std::move(max_exp_avg_sqs)}},
                         std::move(seeds),
                         std::move(steps)});
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  list.run_parallel(
      [&](std::size_t i, std::size_t begin, std::size_t end) { kernels.adam(list.spans(i), numbers[i], begin, end); });
}

void sgd_update(Tensors masters, Tensors published, Tensors gradients, Tensors momentum_buffers, Integers first,
                double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool maximize,
                double factor, Integers seeds, Floats steps) {
  require_same_length("momentum_buffers", momentum_buffers.size(), "masters", momentum == 0 ? 0 : masters.size());
  if (momentum != 0) require_same_length("first", first.size(), "masters", masters.size());
  require_finite("lr", lr);
  require_finite("momentum", momentum);
  require_finite("dampening", dampening);
  require_finite("weight_decay", weight_decay);
  const cpu::SgdOptions options{lr, momentum, dampening, weight_decay, nesterov, maximize, factor};
  const cpu::SgdNumbers numbers[] = {cpu::sgd_numbers(options, false), cpu::sgd_numbers(options, true)};
  const UpdateList list({std::move(masters),
                         std::move(published),
                         std::move(gradients),
                         {{"momentum_buffers", std::move(momentum_buffers)}},
                         std::move(seeds),
                         std::move(steps)});
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  list.run_parallel([&](std::size_t i, std::size_t begin, std::size_t end) {
    kernels.sgd(list.spans(i), numbers[momentum != 0 && first[i] != 0], begin, end);
  });
}

void lion_update(Tensors masters, Tensors published, Tensors gradients, Tensors exp_avgs, double lr, double beta1,
                 double beta2, double weight_decay, bool maximize, double factor, Integers seeds, Floats steps) {
  require_same_length("exp_avgs", exp_avgs.size(), "masters", masters.size());
  require_finite("lr", lr);
  require_beta("beta1", beta1);
  require_beta("beta2", beta2);
  require_finite("weight_decay", weight_decay);
  const cpu::LionNumbers numbers = cpu::lion_numbers({lr, beta1, beta2, weight_decay, maximize, factor});
  const UpdateList list({std::move(masters),
                         std::move(published),
                         std::move(gradients),
                         {{"exp_avgs", std::move(exp_avgs)}},
                         std::move(seeds),
                         std::move(steps)});
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  list.run_parallel(
      [&](std::size_t i, std::size_t begin, std::size_t end) { kernels.lion(list.spans(i), numbers, begin, end); });
}

void require_halves(const Tensor& whole, const char* name, const Tensor& upper, const Tensor& low) {
  const auto require = [&](const Tensor& tensor, const char* argument, ScalarType dtype, const char* expected) {
    require_contiguous(tensor, argument, Place{});
    if (tensor.scalar_type() != dtype) refuse(argument, expected, describe(tensor));
    if (tensor.numel() != whole.numel()) {
      refuse(argument, std::to_string(whole.numel()) + " elements, as '" + name + "'", describe(tensor));
    }
  };
  require(whole, name, ScalarType::Float, "float32");
  require(upper, "upper", ScalarType::BFloat16, "bfloat16");
  require(low, "low", ScalarType::Short, "int16");
}

constexpr std::int64_t kGrain = 1 << 16;

void split_master(Tensor source, Tensor upper, Tensor low) {
  require_halves(source, "source", upper, low);
  const auto* from = static_cast<const float*>(source.const_data_ptr());
  auto* high = static_cast<char*>(upper.mutable_data_ptr());
  auto* rest = static_cast<char*>(low.mutable_data_ptr());
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  parallel_for(0, source.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    kernels.split(high + 2 * begin, rest + 2 * begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

void join_master(Tensor upper, Tensor low, Tensor target) {
  require_halves(target, "target", upper, low);
  auto* to = static_cast<float*>(target.mutable_data_ptr());
  const auto* high = static_cast<const char*>(upper.const_data_ptr());
  const auto* rest = static_cast<const char*>(low.const_data_ptr());
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  parallel_for(0, target.numel(), kGrain, [&](std::int64_t begin, std::int64_t end) {
    kernels.join(to + begin, high + 2 * begin, rest + 2 * begin, static_cast<std::size_t>(end - begin));
  });
}

void require_codes(const Tensor& whole, const char* name, const Tensor& codes, const Tensor& scales,
                   std::int64_t moment) {
  const auto require = [&](const Tensor& tensor, const char* argument, ScalarType dtype, std::int64_t elements,
                           const char* what) {
    require_contiguous(tensor, argument, Place{});
    if (tensor.scalar_type() != dtype || tensor.numel() != elements) {
      refuse(argument, std::to_string(elements) + what, describe(tensor));
    }
  };
  require(whole, name, ScalarType::Float, whole.numel(), " float32");
  require(codes, "codes", ScalarType::Byte, whole.numel(), " uint8");
  constexpr std::int64_t kBlock = cpu::kCodeBlock;
  require(scales, "scales", ScalarType::Float, (whole.numel() + kBlock - 1) / kBlock, " float32, one for 256 codes");
  require_index("moment", moment, 3);
}

void encode_moment(Tensor source, Tensor codes, Tensor scales, std::int64_t moment) {
  require_codes(source, "source", codes, scales, moment);
  const auto* from = static_cast<const float*>(source.const_data_ptr());
  auto* to = static_cast<char*>(codes.mutable_data_ptr());
  auto* factors = static_cast<float*>(scales.mutable_data_ptr());
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  constexpr std::int64_t kBlock = cpu::kCodeBlock;
  parallel_for(0, scales.numel(), kGrain / kBlock, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t last = std::min(end * kBlock, source.numel());
    kernels.encode(to + begin * kBlock, factors + begin, from + begin * kBlock,
                   static_cast<std::size_t>(last - begin * kBlock), static_cast<std::size_t>(moment));
  });
}

void decode_moment(Tensor codes, Tensor scales, Tensor target, std::int64_t moment) {
  require_codes(target, "target", codes, scales, moment);
  const auto* from = static_cast<const char*>(codes.const_data_ptr());
  const auto* factors = static_cast<const float*>(scales.const_data_ptr());
  auto* to = static_cast<float*>(target.mutable_data_ptr());
  const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
  constexpr std::int64_t kBlock = cpu::kCodeBlock;
  parallel_for(0, scales.numel(), kGrain / kBlock, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t last = std::min(end * kBlock, target.numel());
    kernels.decode(to + begin * kBlock, from + begin * kBlock, factors + begin,
                   static_cast<std::size_t>(last - begin * kBlock), static_cast<std::size_t>(moment));
  });
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, adam_update);
  ROUNDPIPE_OP(library, sgd_update);
  ROUNDPIPE_OP(library, lion_update);
  ROUNDPIPE_OP(library, split_master);
  ROUNDPIPE_OP(library, join_master);
  ROUNDPIPE_OP(library, encode_moment);
  ROUNDPIPE_OP(library, decode_moment);
}
