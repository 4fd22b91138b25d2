// The books of the host arena: which stretch of which mapping is free. No lock, no system call.
//
// Note [Pooled and dedicated mappings]
//   Small requests are cut best-fit out of *pooled* mappings, whose free ranges coalesce; a large request has a
//   *dedicated* mapping and always holds the whole of it. A mapping with nothing handed out is *idle*: kept for reuse
//   until the arena decides that too much is kept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "core/host_mapping.h"

namespace roundpipe {

class MappingPool {
 public:
  // Null when nothing fits. take_dedicated wastes at most an eighth of the request.
  std::byte* take_pooled(std::size_t bytes);
  std::byte* take_dedicated(std::size_t bytes);
  // A new mapping, whose first `bytes` are handed out at once.
  std::byte* add(HostMapping memory, bool pooled, std::size_t bytes);
  void give_back(std::byte* data, std::size_t bytes);

  // Takes one idle mapping out, so that at most `keep` idle bytes remain in the end; empty: they do. The longest idle
  // goes first, but one too large to be kept at all goes alone rather than after all others.
  HostMapping detach_idle(std::size_t keep);
  bool has_idle() const noexcept { return !idle_.empty(); }

  std::size_t reserved_bytes() const noexcept { return reserved_bytes_; }
  std::size_t registered_bytes() const noexcept { return registered_bytes_; }
  void leak_live() noexcept;  // HostMapping::leak of every mapping that still has something handed out

 private:
  struct Mapping {
    HostMapping memory;
    bool pooled = false;
    std::size_t live_bytes = 0;    // handed out
    std::uint64_t idle_since = 0;  // key in idle_; 0: not idle
  };
  using Mappings = std::map<std::byte*, Mapping>;
  using Ranges = std::map<std::byte*, std::size_t>;

  Mappings::iterator mapping_of(std::byte* data) { return std::prev(mappings_.upper_bound(data)); }
  void insert_range(std::byte* base, std::size_t bytes);
  void erase_range(Ranges::iterator range);
  void coalesce(std::byte* data, std::size_t bytes, Mappings::iterator at);
  void begin_idle(Mappings::iterator at);
  void end_idle(Mappings::iterator at);
  void hand_out(Mappings::iterator at, std::size_t bytes);

  Mappings mappings_;
  Ranges free_ranges_;                                              // of pooled mappings
  std::set<std::pair<std::size_t, std::byte*>> ranges_by_size_;     // the same ranges
  std::set<std::pair<std::size_t, std::byte*>> dedicated_by_size_;  // idle dedicated mappings
  std::map<std::uint64_t, std::byte*> idle_;                        // all idle mappings by age
  std::uint64_t idle_clock_ = 0;
  std::size_t idle_bytes_ = 0;
  std::size_t reserved_bytes_ = 0;
  std::size_t registered_bytes_ = 0;
};

}  // namespace roundpipe
