#include "ops/arenas.h"

#include <algorithm>
#include <utility>

#include "ops/process.h"

namespace roundpipe::ops {

Arenas& Arenas::global() { return PerProcess<Arenas>::get(); }

void Arenas::add(const std::shared_ptr<HostArena>& arena) {
  std::lock_guard lock(mutex_);
  open_.push_back(arena);
  all_.push_back(arena);
}

void Arenas::retire(const std::shared_ptr<HostArena>& arena) {
  std::lock_guard lock(mutex_);
  open_.erase(std::remove(open_.begin(), open_.end(), arena), open_.end());
}

void Arenas::count(const std::shared_ptr<HostArena>& arena) {
  std::lock_guard lock(mutex_);
  all_.push_back(arena);
}

std::shared_ptr<HostArena> Arenas::newest() {
  std::lock_guard lock(mutex_);
  if (!open_.empty()) return open_.back();
  if (!unpinned_) {
    unpinned_ = HostArena::make(nullptr);
    all_.push_back(unpinned_);
  }
  return unpinned_;
}

HostArenaStats Arenas::stats() {
  std::vector<std::shared_ptr<HostArena>> living;  // the last reference must not die under the lock
  {
    std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const auto& arena) { return arena.expired(); });
    for (const auto& arena : all_) {
      if (auto alive = arena.lock()) living.push_back(std::move(alive));
    }
  }
  HostArenaStats sum;
  for (const auto& arena : living) {
    const HostArenaStats one = arena->stats();
    sum.reserved_bytes += one.reserved_bytes;
    sum.registered_bytes += one.registered_bytes;
    sum.used_bytes += one.used_bytes;
    sum.quarantined_bytes += one.quarantined_bytes;
    sum.peak_used_bytes += one.peak_used_bytes;
    sum.allocations += one.allocations;
  }
  return sum;
}

Tensor owned_host_tensor(void* data, const std::vector<std::int64_t>& sizes, ScalarType dtype,
                         std::shared_ptr<void> owner) {
  return owned_host_tensor(data, sizes, contiguous_strides(sizes), dtype, std::move(owner));
}

Tensor owned_host_tensor(void* data, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
                         ScalarType dtype, std::shared_ptr<void> owner) {
  auto* held = new std::shared_ptr<void>(std::move(owner));
  return host_tensor(data, sizes, strides, dtype, [held, born = process_generation()](void*) {
    if (process_generation() == born) delete held;
  });
}

}  // namespace roundpipe::ops
