// Pinned host memory in which gradients stay from their download to the update that reads them, for units that keep no
// gradient image of their own.
//
// Note [Places of gradients]
//   A download takes its place when it is about to begin, and the place goes back when the update that reads it has
//   ended. Nobody who holds a place waits for another one: the download has begun, so it ends; its update is submitted
//   when it has ended, behind tickets of the same unit alone, all of which have ended by then (below); and the
//   optimizer queue runs whatever is ready (Note [First ready, first run]). So every place comes back, in the end the
//   pool is empty, and whoever waits fits, because no request is larger than the pool: there is no deadlock, whatever
//   the sizes, the number of devices and the order in which units finish. This asks two things of whoever dispatches.
//   Backward of a unit must come after every forward that uses it, in compute, so that no upload that the update waits
//   for can still be waiting for room. And a unit that several jobs of one call write cannot take part: its place would
//   be held from the first download to the last, and the last may wait for others' places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace roundpipe {

class HappensBefore;

struct GradientPoolStats {
  std::size_t bytes = 0;
  std::size_t used_bytes = 0;
  std::size_t peak_bytes = 0;
  std::uint64_t taken = 0;    // places ever
  std::uint64_t refused = 0;  // requests for which there was no room at that moment
};

class GradientPool : public std::enable_shared_from_this<GradientPool> {
 public:
  // `memory` holds what `base` points to. `poke`: called, without a lock, whenever room was given back.
  static std::shared_ptr<GradientPool> make(void* base, std::size_t bytes, std::shared_ptr<void> memory,
                                            std::function<void()> poke, HappensBefore* checker);
  ~GradientPool();
  GradientPool(const GradientPool&) = delete;
  GradientPool& operator=(const GradientPool&) = delete;

  // A place of that size, 256-byte aligned where the pool is, given back with the last copy of the pointer, which also
  // keeps the pool. Null: there is no room now, and a poke follows. InvalidArgument: there never is.
  std::shared_ptr<std::byte> try_take(std::size_t bytes);
  std::size_t bytes() const noexcept { return bytes_; }
  GradientPoolStats stats() const;

 private:
  GradientPool(void* base, std::size_t bytes, std::shared_ptr<void> memory, std::function<void()> poke,
               HappensBefore* checker);
  void give_back(std::size_t begin) noexcept;

  std::byte* const base_;
  const std::size_t bytes_;
  const std::shared_ptr<void> memory_;
  const std::function<void()> poke_;
  // Places are filled with NaNs as they are given back when there is one, so that a late reader is seen by value too.
  HappensBefore* const checker_;

  mutable std::mutex mutex_;                   // guards everything below
  std::map<std::size_t, std::size_t> places_;  // taken: offset of the first byte and of the one behind the last
  GradientPoolStats stats_;
};

}  // namespace roundpipe
