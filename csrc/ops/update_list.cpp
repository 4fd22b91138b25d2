#include "ops/update_list.h"

#include <algorithm>
#include <optional>

#include "ops/checks.h"

namespace roundpipe::ops {
namespace {

using cpu::DType;
using cpu::MasterFormat;

std::optional<DType> kernel_dtype(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      return std::nullopt;
  }
}

DType require_float(const Tensor& tensor, const std::string& argument, std::int64_t elements) {
  require_contiguous(tensor, argument, Place{});
  const auto dtype = kernel_dtype(tensor.scalar_type());
  if (!dtype) refuse(argument, "float32, bfloat16 or float16", describe(tensor));
  if (tensor.numel() != elements) {
    refuse(argument, std::to_string(elements) + " elements, as its master", describe(tensor));
  }
  return *dtype;
}

void set_weight(cpu::WeightSpan& weight, const UpdateTensors& tensors, std::size_t i) {
  const Tensor& master = tensors.masters[i];
  const std::string name = at("masters", i);
  require_contiguous(master, name, Place{});
  const bool split = master.scalar_type() == ScalarType::Short;
  const auto dtype = kernel_dtype(master.scalar_type());
  if (!split && !dtype) {
    refuse(name, "float32, bfloat16, float16, or int16 (the low half of a split master)", describe(master));
  }
  weight.master = master.mutable_data_ptr();
  weight.ties_away = tensors.ties_away;
  weight.format = split                       ? MasterFormat::kSplit
                  : *dtype == DType::kFloat32 ? MasterFormat::kFloat32
                  : *dtype == DType::kFloat16 ? MasterFormat::kFloat16
                                              : MasterFormat::kBFloat16;
  if (!split && !tensors.sources.empty()) {
    const Tensor& source = tensors.sources[i];
    if (require_float(source, at("sources", i), master.numel()) != *dtype) {
      refuse(at("sources", i), "the dtype of its master, " + describe(master), describe(source));
    }
    weight.before = source.const_data_ptr();
  }
  if (tensors.published.empty()) {
    if (split) refuse("published", "a bfloat16 tensor for the split master " + name, "no tensors");
    return;
  }
  const Tensor& published = tensors.published[i];
  weight.published_dtype = require_float(published, at("published", i), master.numel());
  if (split && weight.published_dtype != DType::kBFloat16) {
    refuse(at("published", i), "bfloat16, the upper half of the split master " + name, describe(published));
  }
  if (!split && published.const_data_ptr() == weight.master) return;
  weight.published = published.mutable_data_ptr();
  if (!split) return;
  weight.upper = weight.published;
  if (tensors.sources.empty()) return;
  const Tensor& source = tensors.sources[i];
  if (require_float(source, at("sources", i), master.numel()) != DType::kBFloat16) {
    refuse(at("sources", i), "bfloat16, the upper half of the split master " + name, describe(source));
  }
  weight.upper = source.const_data_ptr();
}

void set_scales(cpu::MomentSpan& moment, const Tensor& codes, const std::string& codes_name, const Tensor& scales,
                const std::string& scales_name, std::int64_t elements) {
  require_contiguous(codes, codes_name, Place{});
  require_contiguous(scales, scales_name, Place{});
  if (codes.numel() != elements) {
    refuse(codes_name, std::to_string(elements) + " elements, as its master", describe(codes));
  }
  constexpr std::int64_t kBlock = cpu::kCodeBlock;
  const std::int64_t blocks = (elements + kBlock - 1) / kBlock;
  if (scales.scalar_type() != ScalarType::Float || scales.numel() != blocks) {
    refuse(scales_name, std::to_string(blocks) + " float32, one for 256 codes", describe(scales));
  }
  moment.scales = static_cast<float*>(scales.mutable_data_ptr());
}

}  // namespace

UpdateList::UpdateList(const UpdateTensors& tensors) {
  const std::size_t count = tensors.masters.size();
  const auto require_length = [&](const char* name, std::size_t length, bool may_be_empty) {
    if (length != 0 || !may_be_empty) require_same_length(name, length, "masters", count);
  };
  require_length("gradients", tensors.gradients.size(), false);
  require_length("published", tensors.published.size(), true);
  require_length("seeds", tensors.seeds.size(), true);
  require_length("sources", tensors.sources.size(), true);
  for (const auto& [name, list, scales] : tensors.moments) {
    require_length(name, list.size(), true);
    require_length("scales", scales.size(), true);
  }
  if (!tensors.seeds.empty()) require_length("steps", tensors.steps.size(), false);
  for (std::size_t i = 0; i < count; ++i) {
    cpu::UpdateSpans spans;
    set_weight(spans.weight, tensors, i);
    const std::int64_t elements = tensors.masters[i].numel();
    spans.gradient_dtype = require_float(tensors.gradients[i], at("gradients", i), elements);
    spans.gradient = tensors.gradients[i].const_data_ptr();
    for (std::size_t m = 0; m < tensors.moments.size(); ++m) {
      const auto& [name, list, scales] = tensors.moments[m];
      if (list.empty() || (list[i].numel() == 0 && elements != 0)) continue;
      spans.moments[m].data = list[i].mutable_data_ptr();
      if (list[i].scalar_type() == ScalarType::Byte && !scales.empty()) {
        set_scales(spans.moments[m], list[i], at(name, i), scales[i], at("scales", i), elements);
      } else {
        spans.moments[m].dtype = require_float(list[i], at(name, i), elements);
      }
    }
    if (!tensors.seeds.empty()) {
      if (!(tensors.steps[i] >= 0 && tensors.steps[i] < 1e18)) {
        refuse(at("steps", i), "a count of steps", std::to_string(tensors.steps[i]));
      }
      spans.rounding = {true, static_cast<std::uint64_t>(tensors.seeds[i]),
                        static_cast<std::uint64_t>(tensors.steps[i])};
    }
    spans_.push_back(spans);
    elements_.push_back(static_cast<std::size_t>(elements));
    starts_.push_back(end_);
    end_ += (elements_.back() + cpu::kUpdateAlignment - 1) / cpu::kUpdateAlignment * cpu::kUpdateAlignment;
  }
}

std::size_t UpdateList::first_at(std::size_t begin) const {
  // The last tensor that starts at or before `begin`; empty ones share their start with the next.
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), begin);
  return after == starts_.begin() ? 0 : static_cast<std::size_t>(after - starts_.begin()) - 1;
}

}  // namespace roundpipe::ops
