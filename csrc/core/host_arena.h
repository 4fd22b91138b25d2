// Exact-size pinned host memory: mappings with transparent huge pages and MADV_DONTFORK, registered once with the
// backend, sub-allocated at 256-byte alignment, returned with hysteresis. No power-of-two rounding.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "core/backend.h"

namespace roundpipe {

struct HostArenaOptions {
  // Requests of up to a quarter of this share mappings of about this size; larger ones get their own.
  std::size_t mapping_bytes = std::size_t{64} << 20;
  std::size_t keep_free_bytes = std::size_t{512} << 20;  // wholly free mappings up to this total are kept (hysteresis)
  // Also keeps what brings the arena back to its peak: for users that fill and empty it in turn. Registering anew every
  // time would cost more than the copies, and it synchronises the device. trim() ends it until the next peak.
  bool keep_peak = false;
  bool huge_pages = true;
  std::size_t registration_bytes = std::size_t{64} << 30;  // the largest piece registered at once
};

struct HostArenaStats {
  std::size_t reserved_bytes = 0;     // mapped
  std::size_t registered_bytes = 0;   // page-locked with the backend
  std::size_t used_bytes = 0;         // handed out and not retired, rounded to 256
  std::size_t quarantined_bytes = 0;  // retired and perhaps still read, rounded to 256
  std::size_t peak_used_bytes = 0;
  std::uint64_t allocations = 0;  // ever
};

class HostArena;

// Move-only owner of one allocation. Destroying it frees at once; `retire` frees once `safe` returns true.
class HostBlock {
 public:
  HostBlock() = default;
  HostBlock(HostBlock&&) noexcept;
  HostBlock& operator=(HostBlock&&) noexcept;
  ~HostBlock();
  void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // Quarantine: the block goes back only when `safe()` (cheap, called under the arena's next allocations) says that no
  // copy can still touch it.
  void retire(std::function<bool()> safe);

 private:
  friend class HostArena;
  std::shared_ptr<HostArena> arena_;
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Note [Whose memory after a fork]
//   A forked child does not have the mappings (MADV_DONTFORK) and must not talk to the driver or wait for threads that
//   it does not have. So in a child blocks and arena leak everything on purpose, and allocate() throws.
class HostArena : public std::enable_shared_from_this<HostArena> {
 public:
  // `backend` may be null (unpinned); it is held as long as the arena.
  static std::shared_ptr<HostArena> make(std::shared_ptr<Backend> backend, const HostArenaOptions& options = {});
  // Waits up to two seconds for quarantined blocks to become safe, then leaks those that did not.
  ~HostArena();

  // `zeroed`: the bytes are 0. Throws HostOutOfMemory with bytes asked, MemAvailable and the cgroup limit before the
  // kernel's OOM killer would decide (ROUNDPIPE_SKIP_MEMORY_CHECK=1 overrides). bytes == 0 gives a valid empty block.
  HostBlock allocate(std::size_t bytes, bool zeroed);
  HostArenaStats stats() const;
  void trim();  // gives every wholly free mapping back

 private:
  friend class HostBlock;
  HostArena(std::shared_ptr<Backend> backend, const HostArenaOptions& options);
  void free(void* data, std::size_t bytes) noexcept;
  void quarantine(void* data, std::size_t bytes, std::function<bool()> safe);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace roundpipe
