// The tensors of one fused optimizer update, checked, and laid end to end in one index space that is cut into slices:
// a list of many tiny tensors costs as much as one tensor of their size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/state_formats.h"
#include "ops/stable_abi.h"

namespace roundpipe::ops {

// The names are those of the operator's arguments. An empty `published`, moment or `seeds` list: there is none.
struct UpdateTensors {
  std::vector<Tensor> masters, published, gradients;  // published[i] over masters[i]'s memory: none
  struct Moments {
    const char* name;
    std::vector<Tensor> tensors;      // one of no elements: this tensor has no such moment
    std::vector<Tensor> scales = {};  // of those that are uint8 codes; empty: there are none
  };
  std::vector<Moments> moments;
  std::vector<std::int64_t> seeds;   // one a tensor: bfloat16 moments are rounded stochastically
  std::vector<double> steps;         // one a tensor; of stochastic rounding
  std::vector<Tensor> sources = {};  // where weights are read (of a split master, its upper half); empty: where written
  bool ties_away = false;            // as in cpu::WeightSpan
};

class UpdateList {
 public:
  // InvalidArgument unless all are contiguous host tensors of as many elements a position and of dtypes we update.
  explicit UpdateList(const UpdateTensors& tensors);

  std::size_t size() const { return spans_.size(); }
  const cpu::UpdateSpans& spans(std::size_t i) const { return spans_[i]; }
  std::size_t elements(std::size_t i) const { return elements_[i]; }
  std::size_t index_space() const { return end_; }
  // Before the first run: the gradient lies elsewhere, in the same dtype.
  void place_gradient(std::size_t i, const void* gradient) { spans_[i].gradient = gradient; }

  // Calls update(position, begin, end) for the elements of each tensor that [begin, end) of the index space holds. May
  // run concurrently on disjoint slices; begin is a multiple of cpu::kUpdateAlignment.
  template <class Update>
  void run(std::size_t begin, std::size_t end, const Update& update) const {
    for (std::size_t i = first_at(begin); i < spans_.size() && starts_[i] < end; ++i) {
      const std::size_t from = begin > starts_[i] ? begin - starts_[i] : 0;
      const std::size_t to = end - starts_[i] < elements_[i] ? end - starts_[i] : elements_[i];
      if (from < to) update(i, from, to);
    }
  }

  // The whole index space on torch's threads.
  template <class Update>
  void run_parallel(const Update& update) const {
    constexpr std::size_t kUnit = 4096;
    const auto units = static_cast<std::int64_t>((end_ + kUnit - 1) / kUnit);
    parallel_for(0, units, 8, [&](std::int64_t first, std::int64_t last) {
      run(static_cast<std::size_t>(first) * kUnit, static_cast<std::size_t>(last) * kUnit, update);
    });
  }

 private:
  std::size_t first_at(std::size_t begin) const;

  std::vector<cpu::UpdateSpans> spans_;
  std::vector<std::size_t> elements_;
  std::vector<std::size_t> starts_;  // in the index space, ascending, multiples of cpu::kUpdateAlignment
  std::size_t end_ = 0;
};

}  // namespace roundpipe::ops
