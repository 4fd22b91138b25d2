// host_empty, host_stats.
#include <limits>
#include <memory>
#include <utility>

#include "core/errors.h"
#include "ops/arenas.h"
#include "ops/checks.h"
#include "ops/guard.h"

namespace roundpipe::ops {
namespace {

Tensor host_empty(std::vector<std::int64_t> size, ScalarType dtype) {
  const std::size_t element = element_bytes(dtype);
  constexpr auto kMost = static_cast<std::size_t>(std::numeric_limits<std::int64_t>::max());
  // A zero anywhere makes the tensor empty, whatever the other sizes are.
  bool empty = false;
  for (std::size_t i = 0; i < size.size(); ++i) {
    if (size[i] < 0) refuse(at("size", i), "0 or more", std::to_string(size[i]));
    empty = empty || size[i] == 0;
  }
  std::size_t bytes = empty ? 0 : element;
  for (std::size_t i = 0; i < size.size() && !empty; ++i) {
    const auto extent = static_cast<std::size_t>(size[i]);
    if (bytes > kMost / extent) refuse("size", "fewer than 2^63 bytes in all", "a shape that needs more");
    bytes *= extent;
  }
  auto block = std::make_shared<HostBlock>(Arenas::global().newest()->allocate(bytes, /*zeroed=*/true));
  void* data = block->data();
  return owned_host_tensor(data, size, dtype, std::move(block));
}

std::vector<std::int64_t> host_stats() {
  const HostArenaStats stats = Arenas::global().stats();
  std::vector<std::int64_t> values;
  for (const std::uint64_t value :
       {std::uint64_t{stats.reserved_bytes}, std::uint64_t{stats.registered_bytes}, std::uint64_t{stats.used_bytes},
        std::uint64_t{stats.quarantined_bytes}, std::uint64_t{stats.peak_used_bytes}, stats.allocations}) {
    values.push_back(static_cast<std::int64_t>(value));
  }
  return values;
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, host_empty);
  ROUNDPIPE_OP(library, host_stats);
}
