#include "ops/fused_update.h"

#include <cmath>
#include <utility>

#include "cpu/update_kernels.h"
#include "ops/checks.h"
#include "ops/update_list.h"

namespace roundpipe::ops {
namespace {

using Tensors = std::vector<Tensor>;
using Floats = std::vector<double>;

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

void declare_gradient(Update& update, const cpu::UpdateSpans& spans, std::size_t elements) {
  declare_access(update, Access::kRead, spans.gradient, elements * size_of(spans.gradient_dtype),
                 "update reads gradients");
}

void declare_spans(Update& update, const cpu::UpdateSpans& spans, std::size_t elements) {
  const cpu::WeightSpan& weight = spans.weight;
  const std::size_t master = weight.format == cpu::MasterFormat::kFloat32 ? 4 : 2;
  declare_access(update, Access::kRead, weight.before, elements * master, "update reads weights");
  declare_access(update, Access::kRead, weight.upper, elements * 2, "update reads weights");
  declare_access(update, Access::kWrite, weight.master, elements * master, "update writes masters");
  declare_access(update, Access::kWrite, weight.published, elements * size_of(weight.published_dtype),
                 "update writes weights");
  for (const cpu::MomentSpan& moment : spans.moments) {
    const std::size_t bytes = moment.scales != nullptr ? 1 : size_of(moment.dtype);
    declare_access(update, Access::kWrite, moment.data, elements * bytes, "update writes moments");
    declare_access(update, Access::kWrite, moment.scales,
                   (elements + cpu::kCodeBlock - 1) / cpu::kCodeBlock * sizeof(float), "update writes scales");
  }
}

template <class Steps>
struct FusedUpdate {
  UpdateList list;
  std::vector<typename Steps::Numbers> numbers;
  std::vector<Tensor> held;
  std::shared_ptr<std::byte> place;  // of gradients in a pool

  explicit FusedUpdate(const UpdateTensors& tensors) : list(tensors) {}
};

template <class Steps>
PreparedUpdate prepare(FusedArguments arguments, bool placed) {
  UpdateTensors tensors;
  tensors.masters = std::move(arguments.masters);
  tensors.sources = std::move(arguments.sources);
  tensors.published = std::move(arguments.published);
  tensors.gradients = std::move(arguments.gradients);
  tensors.steps = std::move(arguments.steps);
  tensors.seeds = std::move(arguments.seeds);
  tensors.ties_away = true;
  Tensors &moments = arguments.moments, &scales = arguments.scales;
  const Floats& options = arguments.options;
  const std::size_t count = tensors.masters.size();
  require_same_length("groups", arguments.groups.size(), "masters", count);
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
    const auto& groups = arguments.groups;
    const auto row = static_cast<std::size_t>(require_index("groups", groups[i], options.size() / Steps::kWidth));
    // Powers are slow beside a tiny tensor, and nearly always all of a group stand at one step.
    const bool as_before = i != 0 && step == tensors.steps[i - 1] && groups[i] == groups[i - 1];
    fused->numbers.push_back(as_before ? fused->numbers.back()
                                       : Steps::numbers(Row(options, row, Steps::kWidth), arguments.factor, step));
  }
  PreparedUpdate prepared;
  for (std::size_t i = 0; i < count; ++i) {
    const auto elements = static_cast<std::size_t>(tensors.masters[i].numel());
    if (!placed) declare_gradient(prepared.update, fused->list.spans(i), elements);
    declare_spans(prepared.update, fused->list.spans(i), elements);
  }
  for (const Tensors* list : {&tensors.masters, &tensors.sources, &tensors.published, &moments, &scales}) {
    hold_all(fused->held, *list);
  }
  if (!placed) hold_all(fused->held, tensors.gradients);
  prepared.update.elements = fused->list.index_space();
  prepared.update.grain = kUpdateGrain;
  prepared.update.body = [fused](std::size_t begin, std::size_t end) {
    const auto kernel = Steps::kernel(cpu::active_update_kernels());
    fused->list.run(begin, end, [&](std::size_t i, std::size_t from, std::size_t to) {
      kernel(fused->list.spans(i), fused->numbers[i], from, to);
    });
  };
  if (placed) {
    prepared.place = [fused](Update& update, const std::vector<std::int64_t>& offsets,
                             std::shared_ptr<std::byte> place) {
      for (std::size_t i = 0; i < fused->list.size(); ++i) {
        fused->list.place_gradient(i, place.get() + offsets[i]);
        declare_gradient(update, fused->list.spans(i), fused->list.elements(i));
      }
      fused->place = std::move(place);
    };
  }
  return prepared;
}

}  // namespace

void declare_access(Update& update, Access access, const void* range, std::size_t bytes, const char* what) {
  if (range != nullptr && bytes != 0) update.accesses.push_back({access, range, bytes, what});
}

void hold_all(Tensors& held, const Tensors& tensors) {
  for (const Tensor& tensor : tensors) held.push_back(detached(tensor));
}

PreparedUpdate prepare_fused(FusedArguments arguments, bool placed) {
  const std::string algorithm = arguments.algorithm;
  if (algorithm == "adam") return prepare<AdamSteps>(std::move(arguments), placed);
  if (algorithm == "sgd") return prepare<SgdSteps>(std::move(arguments), placed);
  if (algorithm == "lion") return prepare<LionSteps>(std::move(arguments), placed);
  refuse("algorithm", "'adam', 'sgd' or 'lion'", "'" + algorithm + "'");
}

}  // namespace roundpipe::ops
