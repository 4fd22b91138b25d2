// How much memory may be page-locked, beyond how much there is.
//
// Note [Walls of page-locking]
//   Under WSL2 the driver asks Windows for page-locked memory, which grants far less than there is; how much is written
//   nowhere and differs between machines. Half of what the guest has is the most that was ever granted, so more is
//   refused before it is tried; the driver may refuse less than that by itself.
//   RLIMIT_MEMLOCK is reported because people look for it: the driver locks pages in the kernel and does not apply it.
#pragma once

#include <cstddef>
#include <string>

#include "core/memory_limits.h"

namespace roundpipe {

struct PinLimits {
  std::size_t wall_bytes = 0;     // WSL2; 0: none known
  std::size_t memlock_bytes = 0;  // RLIMIT_MEMLOCK; SIZE_MAX: unlimited; 0 also when it cannot be read
  std::size_t locked_bytes = 0;   // by RoundPipe in this process

  // What can still be page-locked of `headroom` bytes of memory.
  std::size_t room_bytes(std::size_t headroom) const noexcept;
  // "" without a wall, else ", WSL2 page-locks at most about 8.00 GiB with 2.00 GiB locked".
  std::string describe() const;
};

PinLimits read_pin_limits(const MemoryLimits& memory, const std::string& root = "");

// Counts what this process locks and unlocks.
void note_locked(std::size_t bytes) noexcept;
void note_unlocked(std::size_t bytes) noexcept;

}  // namespace roundpipe
