// Pinned memory through which pageable weights go up to a device: a ring of buffers, one a chunk of a lane, filled by a
// few threads while the copies before it are under way.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "core/host_arena.h"
#include "core/slice_pool.h"
#include "core/transfer_engine.h"

namespace roundpipe {

// Used by one lane: the issuer fills, the reaper says which chunks are complete.
class BounceBuffers {
 public:
  // `count` buffers of `buffer_bytes` from `arena`, made when the first is needed. `threads` counts the filling thread.
  BounceBuffers(std::shared_ptr<HostArena> arena, std::size_t buffer_bytes, std::size_t count, std::size_t threads,
                HappensBefore* checker);
  ~BounceBuffers();

  // The next chunk begins. The lane never has `count` chunks in flight before that, so the ring's next buffer is free.
  void begin_chunk();
  // Copies a piece behind what the chunk holds so far and returns where it stands now. All pieces of a chunk fit in one
  // buffer.
  const void* fill(const CopySegment& piece);
  // Reaper: the host has seen a chunk complete, so its buffer may be filled again.
  void chunk_complete();

  std::size_t bytes() const noexcept;  // of pinned memory held

 private:
  const std::shared_ptr<HostArena> arena_;
  const std::size_t buffer_bytes_, count_, threads_;
  HappensBefore* const checker_;
  std::unique_ptr<SlicePool> pool_;  // null until used
  std::vector<HostBlock> buffers_;
  std::size_t current_ = 0;
  std::size_t filled_ = 0;  // of the current buffer
  bool begun_ = false;      // the present chunk has a buffer
};

}  // namespace roundpipe
