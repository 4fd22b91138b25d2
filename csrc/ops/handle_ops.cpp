// handle_keeper: the end of handles without a line of Python.
#include <memory>
#include <utility>

#include "ops/checks.h"
#include "ops/guard.h"
#include "ops/handles.h"

namespace roundpipe::ops {
namespace {

// Python raises KeyboardInterrupt where any function of its own begins, in __del__ and in weakref.finalize as well, and
// there nobody hears of it: the handles would never end. The death of a tensor runs no Python.
Tensor handle_keeper(std::vector<std::int64_t> handles) {
  if (handles.empty()) refuse("handles", "one or more", "none");
  auto kept = std::make_shared<std::vector<std::int64_t>>(std::move(handles));
  const std::vector<std::int64_t> sizes{static_cast<std::int64_t>(kept->size())};
  // Ends what was given, whatever Python has written into the tensor since.
  return host_tensor(kept->data(), sizes, {1}, ScalarType::Long, [handles = *kept, kept](void*) {
    for (const std::int64_t handle : handles) HandleRegistry::global().forget_if_live(handle);
  });
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) { ROUNDPIPE_OP(library, handle_keeper); }
