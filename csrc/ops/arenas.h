// Which arena serves host_empty: the one of the newest open engine, or without an engine one that pins nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "core/host_arena.h"
#include "ops/stable_abi.h"

namespace roundpipe::ops {

class Arenas {
 public:
  static Arenas& global();

  void add(const std::shared_ptr<HostArena>& arena);     // becomes the newest
  void retire(const std::shared_ptr<HostArena>& arena);  // serves no more; its blocks live on
  void count(const std::shared_ptr<HostArena>& arena);   // only in stats(): serves no host_empty
  std::shared_ptr<HostArena> newest();
  HostArenaStats stats();  // summed over every arena that still has memory, closed engines' too

 private:
  std::mutex mutex_;  // guards everything below
  std::vector<std::shared_ptr<HostArena>> open_;
  std::vector<std::weak_ptr<HostArena>> all_;
  std::shared_ptr<HostArena> unpinned_;  // made at first use
};

// A host tensor over memory that `owner` keeps alive. In a forked child the owner is never destroyed: the memory is not
// there (it is advised away from children) and the arena's lock may be held for ever.
Tensor owned_host_tensor(void* data, const std::vector<std::int64_t>& sizes, ScalarType dtype,
                         std::shared_ptr<void> owner);
Tensor owned_host_tensor(void* data, const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
                         ScalarType dtype, std::shared_ptr<void> owner);

}  // namespace roundpipe::ops
