// Host memory that somebody else allocated and in which weights stay: page-locked where it is, or left pageable.
//
// Note [Registration in place]
//   The driver page-locks whole pages, each at most once, and about 65,000 ranges in all (by one process with several
//   GPUs, or several processes, fewer). So the ranges of a claim are rounded to pages, overlapping and adjacent ones
//   merged, and what somebody has locked already is left out: a tensor that the user pinned, and a page that another
//   claim shares with us. The largest ranges are locked first. What is not worth a registration (a tiny tensor in a
//   page of its own) or cannot have one stays pageable and goes through bounce buffers, which is always correct. All
//   claims of a backend share a number of registrations well below the driver's. A driver that refuses after many
//   ranges were locked has reached a limit on their number, and the rest, the smallest ones, stays pageable too;
//   refused earlier, it is memory that lacks, and the claim fails as a whole. A copy must not cross the border of two
//   registrations; `pieces` cuts there. Locking a private mapping of a file copies all of it into memory of the
//   process, so it is counted at full size before it is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/address_ranges.h"
#include "core/backend.h"
#include "core/memory_map.h"

namespace roundpipe {

struct HostRange {
  void* base;
  std::size_t bytes;
};

struct HostPiece {
  void* base;
  std::size_t bytes;
  HostMemory memory;
};

struct HostClaimOptions {
  bool pin = true;  // false: everything stays pageable, but for what is pinned already
  std::size_t registration_bytes = std::size_t{64} << 30;  // the largest piece registered at once
  std::size_t least_bytes = std::size_t{256} << 10;        // smaller ranges are not worth a registration
  std::size_t most_registrations = 16384;                  // of all claims of the backend
  std::size_t many_registrations = 1024;                   // so many locked: a refusal is about their number
};

struct HostClaimStats {
  std::size_t registered_bytes = 0;  // by this claim, whole pages
  std::size_t pinned_bytes = 0;      // that others had page-locked
  std::size_t pageable_bytes = 0;    // the rest; of it
  std::size_t file_bytes = 0;        // a file stands behind these
  std::size_t registrations = 0;
};

class HostClaim {
 public:
  // `owners` keeps the memory alive, as long as the claim. Ranges may overlap; those of 0 bytes are ignored. Throws
  // HostOutOfMemory or DriverError; then nothing is left registered.
  HostClaim(std::shared_ptr<Backend> backend, std::vector<HostRange> ranges, const HostClaimOptions& options,
            std::shared_ptr<void> owners);
  // Gives every registration back. No copy may be under way that uses the memory. A forked child leaks them.
  ~HostClaim();
  HostClaim(const HostClaim&) = delete;
  HostClaim& operator=(const HostClaim&) = delete;

  // A range of the claim's memory, in order, cut where its kind changes and at the borders of registrations.
  std::vector<HostPiece> pieces(void* base, std::size_t bytes) const;
  const HostClaimStats& stats() const noexcept { return stats_; }

  // Over all living claims of the process: how many, their registered bytes, their registrations.
  static std::size_t live();
  static HostClaimStats total();

 private:
  using Address = std::uintptr_t;
  using Ranges = AddressRanges;
  Ranges claimed_by_others() const;
  std::size_t registrations_of_others() const;
  Ranges page_ranges() const;
  void choose(Ranges& ranges) const;
  void check_memory(const Ranges& ranges) const;
  void register_all(const Ranges& ranges);
  void unregister_all() noexcept;
  void count();
  void begin_new_life() noexcept;

  const int owner_;  // the process whose driver knows the registrations
  const std::shared_ptr<Backend> backend_;
  const HostClaimOptions options_;
  const std::shared_ptr<void> owners_;
  std::vector<HostRange> ranges_;  // as given
  MemoryMap map_;
  Ranges registered_;
  Ranges pinned_;      // page-locked by others
  bool once_ = false;  // files too large to be kept in memory: what was copied may be dropped
  HostClaimStats stats_;
};

}  // namespace roundpipe
