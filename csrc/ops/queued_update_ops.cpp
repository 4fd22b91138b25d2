// update_fused, update_square_sum: optimizer steps of whole units on the engine's queue, and what clipping needs
// before.
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/update_kernels.h"
#include "ops/checks.h"
#include "ops/guard.h"
#include "ops/update_list.h"
#include "ops/update_tickets.h"

namespace roundpipe::ops {
namespace {

using Tensors = std::vector<Tensor>;
using Integers = std::vector<std::int64_t>;
using Floats = std::vector<double>;

constexpr std::size_t kGrain = 1 << 16;  // elements: a slice outweighs the cost of handing it to a thread

// One row of `options`, read in the order of the algorithm's numbers.
class Row {
 public:
  Row(const Floats& options, std::size_t row, std::size_t width) : options_(options), at_(row * width) {}
  double number() {
    const double value = options_[at_];
    if (!std::isfinite(value)) refuse(at("options", at_), "a finite number", std::to_string(value));
    ++at_;
    return value;
  }
  double beta() {
    const double value = number();
    if (!(value >= 0 && value < 1)) {
      refuse(at("options", at_ - 1), "a number from 0 to 1 (exclusive)", std::to_string(value));
    }
    return value;
  }
  bool flag() { return number() != 0; }

 private:
  const Floats& options_;
  std::size_t at_;
};

// What each algorithm takes from its row, and what it does to a tensor.
struct AdamSteps {
  static constexpr std::size_t kWidth = 7, kMoments = 3;
  using Numbers = cpu::AdamNumbers;
  static Numbers numbers(Row row, double factor, double step) {
    cpu::AdamOptions options;
    options.lr = row.number();
    options.beta1 = row.beta();
    options.beta2 = row.beta();
    options.eps = row.number();
    options.weight_decay = row.number();
    options.decoupled = row.flag();
    options.maximize = row.flag();
    options.factor = factor;
    return cpu::adam_numbers(options, step);
  }
  static auto kernel(const cpu::UpdateKernels& kernels) { return kernels.adam; }
};

struct SgdSteps {
  static constexpr std::size_t kWidth = 6, kMoments = 1;
  using Numbers = cpu::SgdNumbers;
  static Numbers numbers(Row row, double factor, double step) {
    cpu::SgdOptions options;
    options.lr = row.number();
    options.momentum = row.number();
    options.dampening = row.number();
    options.weight_decay = row.number();
    options.nesterov = row.flag();
    options.maximize = row.flag();
    options.factor = factor;
    return cpu::sgd_numbers(options, step == 1);
  }
  static auto kernel(const cpu::UpdateKernels& kernels) { return kernels.sgd; }
};

struct LionSteps {
  static constexpr std::size_t kWidth = 5, kMoments = 1;
  using Numbers = cpu::LionNumbers;
  static Numbers numbers(Row row, double factor, double) {
    cpu::LionOptions options;
    options.lr = row.number();
    options.beta1 = row.beta();
    options.beta2 = row.beta();
    options.weight_decay = row.number();
    options.maximize = row.flag();
    options.factor = factor;
    return cpu::lion_numbers(options);
  }
  static auto kernel(const cpu::UpdateKernels& kernels) { return kernels.lion; }
};

void declare(Update& update, Access access, const void* range, std::size_t bytes, const char* what) {
  if (range != nullptr && bytes != 0) update.accesses.push_back({access, range, bytes, what});
}

void declare_spans(Update& update, const cpu::UpdateSpans& spans, std::size_t elements) {
  const cpu::WeightSpan& weight = spans.weight;
  const std::size_t master = weight.format == cpu::MasterFormat::kFloat32 ? 4 : 2;
  declare(update, Access::kRead, spans.gradient, elements * size_of(spans.gradient_dtype), "update reads gradients");
  declare(update, Access::kRead, weight.before, elements * master, "update reads weights");
  declare(update, Access::kRead, weight.upper, elements * 2, "update reads weights");
  declare(update, Access::kWrite, weight.master, elements * master, "update writes masters");
  declare(update, Access::kWrite, weight.published, elements * size_of(weight.published_dtype),
          "update writes weights");
  for (const cpu::MomentSpan& moment : spans.moments) {
    const std::size_t bytes = moment.scales != nullptr ? 1 : size_of(moment.dtype);
    declare(update, Access::kWrite, moment.data, elements * bytes, "update writes moments");
    declare(update, Access::kWrite, moment.scales, (elements + cpu::kCodeBlock - 1) / cpu::kCodeBlock * sizeof(float),
            "update writes scales");
  }
}

void hold_all(std::vector<Tensor>& held, const Tensors& tensors) {
  for (const Tensor& tensor : tensors) held.push_back(detached(tensor));
}

template <class Steps>
struct FusedUpdate {
  UpdateList list;
  std::vector<typename Steps::Numbers> numbers;
  std::vector<Tensor> held;

  explicit FusedUpdate(const UpdateTensors& tensors) : list(tensors) {}
};

template <class Steps>
Update make_update(UpdateTensors tensors, Tensors moments, Tensors scales, const Integers& groups,
                   const Floats& options, double factor) {
  const std::size_t count = tensors.masters.size();
  require_same_length("groups", groups.size(), "masters", count);
  require_same_length("steps", tensors.steps.size(), "masters", count);
  if (options.size() % Steps::kWidth != 0) {
    refuse("options", std::to_string(Steps::kWidth) + " numbers a group", std::to_string(options.size()));
  }
  if (count == 0 ? !moments.empty() : moments.size() % count != 0 || moments.size() / count > Steps::kMoments) {
    refuse("moments", "as many as masters, times at most " + std::to_string(Steps::kMoments),
           std::to_string(moments.size()) + " for " + std::to_string(count));
  }
  if (!scales.empty()) require_same_length("scales", scales.size(), "moments", moments.size());
  for (std::size_t first = 0; first < moments.size(); first += count) {
    const auto part = [&](const Tensors& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
      return all.empty() ? Tensors() : Tensors(begin, begin + static_cast<std::ptrdiff_t>(count));
    };
    tensors.moments.push_back({"moments", part(moments), part(scales)});
  }
  auto fused = std::make_shared<FusedUpdate<Steps>>(tensors);
  for (std::size_t i = 0; i < count; ++i) {
    const double step = tensors.steps[i];
    if (!(step >= 1)) refuse(at("steps", i), "1 or more: count the step, then update", std::to_string(step));
    const auto row = static_cast<std::size_t>(require_index("groups", groups[i], options.size() / Steps::kWidth));
    // Powers are slow beside a tiny tensor, and nearly always all of a group stand at one step.
    const bool as_before = i != 0 && step == tensors.steps[i - 1] && groups[i] == groups[i - 1];
    fused->numbers.push_back(as_before ? fused->numbers.back()
                                       : Steps::numbers(Row(options, row, Steps::kWidth), factor, step));
  }
  Update update;
  for (std::size_t i = 0; i < count; ++i) {
    declare_spans(update, fused->list.spans(i), static_cast<std::size_t>(tensors.masters[i].numel()));
  }
  for (const Tensors* list :
       {&tensors.masters, &tensors.sources, &tensors.published, &tensors.gradients, &moments, &scales}) {
    hold_all(fused->held, *list);
  }
  update.elements = fused->list.index_space();
  update.grain = kGrain;
  update.body = [fused](std::size_t begin, std::size_t end) {
    const auto kernel = Steps::kernel(cpu::active_update_kernels());
    fused->list.run(begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      kernel(fused->list.spans(i), fused->numbers[i], from, to);
    });
  };
  return update;
}

std::int64_t update_fused(std::int64_t engine, Integers tickets, std::string algorithm, Tensors masters,
                          Tensors sources, Tensors published, Tensors gradients, Tensors moments, Tensors scales,
                          Floats steps, Integers seeds, Integers groups, Floats options, double factor) {
  EngineUse use(engine, "engine");
  UpdateTensors tensors;
  tensors.masters = std::move(masters);
  tensors.sources = std::move(sources);
  tensors.published = std::move(published);
  tensors.gradients = std::move(gradients);
  tensors.steps = std::move(steps);
  tensors.seeds = std::move(seeds);
  tensors.ties_away = true;
  Update update;
  if (algorithm == "adam") {
    update = make_update<AdamSteps>(std::move(tensors), std::move(moments), std::move(scales), groups, options, factor);
  } else if (algorithm == "sgd") {
    update = make_update<SgdSteps>(std::move(tensors), std::move(moments), std::move(scales), groups, options, factor);
  } else if (algorithm == "lion") {
    update = make_update<LionSteps>(std::move(tensors), std::move(moments), std::move(scales), groups, options, factor);
  } else {
    refuse("algorithm", "'adam', 'sgd' or 'lion'", "'" + algorithm + "'");
  }
  give_tickets(use, tickets, "tickets", update);
  return static_cast<std::int64_t>(use->queue().submit(std::move(update)));
}

std::int64_t update_square_sum(std::int64_t engine, Integers tickets, Tensors sources, Tensor sums) {
  EngineUse use(engine, "engine");
  UpdateTensors tensors;
  tensors.masters = sources;  // as an update that writes nothing: the same checks and the same index space
  tensors.gradients = sources;
  struct Sums {
    UpdateList list;
    std::vector<Tensor> held;
    double* sums = nullptr;
  };
  auto work = std::make_shared<Sums>(Sums{UpdateList(tensors), {}});
  require_contiguous(sums, "sums", Place{});
  const std::size_t chunks = (work->list.index_space() + kGrain - 1) / kGrain;
  if (sums.scalar_type() != ScalarType::Double || sums.numel() != static_cast<std::int64_t>(chunks)) {
    refuse("sums", std::to_string(chunks) + " float64", describe(sums));
  }
  work->sums = static_cast<double*>(sums.mutable_data_ptr());
  hold_all(work->held, sources);
  work->held.push_back(detached(sums));
  Update update;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    declare(update, Access::kRead, sources[i].const_data_ptr(), byte_count(sources[i]), "norm reads gradients");
  }
  declare(update, Access::kWrite, work->sums, chunks * sizeof(double), "norm writes sums");
  update.elements = work->list.index_space();
  update.grain = kGrain;
  update.body = [work](std::size_t begin, std::size_t end) {
    const cpu::UpdateKernels& kernels = cpu::active_update_kernels();
    // A slice may hold several chunks; a sum that followed slices would depend on the number of threads.
    for (std::size_t chunk = begin / kGrain; chunk * kGrain < end; ++chunk) {
      double sum = 0;
      work->list.run(
          chunk * kGrain, std::min(end, (chunk + 1) * kGrain), [&](std::size_t i, std::size_t from, std::size_t to) {
            const cpu::UpdateSpans& spans = work->list.spans(i);
            const auto* base = static_cast<const std::byte*>(spans.gradient);
            sum += kernels.square_sum(base + from * size_of(spans.gradient_dtype), spans.gradient_dtype, to - from);
          });
      work->sums[chunk] = sum;
    }
  };
  give_tickets(use, tickets, "tickets", update);
  return static_cast<std::int64_t>(use->queue().submit(std::move(update)));
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, update_fused);
  ROUNDPIPE_OP(library, update_square_sum);
}
