// One step of an optimizer for the tensors of one unit, made ready for the queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/optimizer_queue.h"
#include "ops/stable_abi.h"

namespace roundpipe::ops {

constexpr std::size_t kUpdateGrain = 1 << 16;  // elements: a slice outweighs the cost of handing it to a thread

// What update_fused is given, in the order of its schema.
struct FusedArguments {
  std::string algorithm;
  std::vector<Tensor> masters, sources, published, gradients, moments, scales;
  std::vector<double> steps;
  std::vector<std::int64_t> seeds, groups;
  std::vector<double> options;
  double factor = 1;
};

struct PreparedUpdate {
  Update update;  // without tickets
  // For gradients that come to a place which nobody knows yet: those at `offsets` of the image at `place`, which is
  // held until the update has ended. Their dtypes are those of the tensors that stood for them.
  std::function<void(Update& update, const std::vector<std::int64_t>& offsets, std::shared_ptr<std::byte> place)> place;
};

// InvalidArgument for anything that cannot be updated. `placed`: the gradients stand for others, which are placed
// later.
PreparedUpdate prepare_fused(FusedArguments arguments, bool placed);

void declare_access(Update& update, Access access, const void* range, std::size_t bytes, const char* what);
void hold_all(std::vector<Tensor>& held, const std::vector<Tensor>& tensors);

}  // namespace roundpipe::ops
