// Streams the units of one device's jobs through one region of device memory, prefetching the next job's weights while
// the present one computes, ready unit by unit.
//
// Note [Two ends of one region]
//   Jobs alternate between the two ends of the region: even jobs are packed upward from its beginning, odd ones
//   downward from its end, each in the order of its units. So a job's place depends only on its own sizes and parity,
//   two consecutive jobs coexist whenever their sizes add up to at most the region, and there is no fragmentation: a
//   unit waits only for the not yet released units whose bytes it overlaps. Placement is strictly in job order and unit
//   order, and every job alone fits (enqueue refuses others), so the oldest job can always be placed whole: no
//   deadlock. A weight extent is free once compute recorded past its last reader; a gradient extent once its download
//   is complete.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/gradient_pool.h"
#include "core/transfer_engine.h"
#include "core/weight_unit.h"

namespace roundpipe {

struct UnitUse {
  std::shared_ptr<WeightUnit> unit;
  bool gradients = false;          // this job writes the unit's gradients
  void* gradient_load = nullptr;   // host image to start from; null: zeros
  void* gradient_store = nullptr;  // host image to write; required when gradients, unless there is a pool
  std::shared_ptr<GradientPool> gradient_pool = nullptr;  // they go to a place of it, which `finished` gets
};

// How a download of gradients ended, on the lane's thread: its failure, and where they lie when that is a place of a
// pool, which is given back with the last copy of the pointer (null: they are in their store, or have failed).
using GradientsFinished = std::function<void(const std::exception_ptr& failure, std::shared_ptr<std::byte> place)>;

struct UnitPlace {
  void* weights = nullptr;    // device address of the packed image
  void* gradients = nullptr;  // null: none
};

enum class WaitResult : std::uint8_t { kTimedOut, kDone };

class StageStreamer {
 public:
  StageStreamer(Device& device, TransferEngine& engine);
  ~StageStreamer();  // open jobs are aborted and copies under way waited for; in a forked child it leaks everything

  // Device bytes of one job, as packed here (weights and gradients of each unit, 256-byte aligned).
  static std::size_t job_bytes(const std::vector<UnitUse>& units);

  // Leases the region. Only while no job is open and no transfer under way, else InvalidArgument. Compute launched
  // before on this memory, under whatever name the framework gave it, must be complete: uploads do not wait for it. A
  // null `base` with 0 bytes gives the region up.
  void set_region(void* base, std::size_t bytes);
  // The same, and first waits (host) for all that was launched on `compute`, the stream for which the framework
  // allocated the region: its allocator may hand out memory that kernels still under way use.
  void set_region(void* base, std::size_t bytes, Stream& compute);
  std::size_t region_bytes() const;

  // Caller's thread, program order: takes the tickets (upload; with gradients: load if gradient_load, write) of every
  // unit and queues its uploads. Throws DeviceOutOfMemory naming both sizes when the job alone exceeds the region.
  // Between submission and the first use nothing is touched before the tickets are ready and the place is free.
  std::uint64_t enqueue(std::vector<UnitUse> units);

  // Worker's thread. Waits (host) until unit `index` was issued and lets `compute` continue after it. Also declares to
  // the checker that compute reads the weights and writes the gradients. Rethrows failures; Poisoned if a ticket was.
  WaitResult wait_unit(std::uint64_t job, std::size_t index, Stream& compute, std::chrono::milliseconds timeout,
                       UnitPlace* place);
  // No more compute of this job reads the unit's weights: its place may be overwritten after what `compute` has so far.
  void weights_done(std::uint64_t job, std::size_t index, Stream& compute);
  // The last microbatch has passed the unit: its gradients start down after what `compute` has so far; on the host's
  // sight of completion the write ticket completes. `finished` (may be empty) runs after that, on the lane's thread.
  void gradients_done(std::uint64_t job, std::size_t index, Stream& compute, GradientsFinished finished = {});
  // Ends the job: whatever was not done is released the same way (weights) or poisoned (gradients never handed over).
  void close(std::uint64_t job, Stream& compute);
  // Ends a job that will not run or has failed. Poisons its unfinished tickets; copies already issued are waited for
  // before their place is reused. Legal in any state of the job, also after close (no-op), and from another thread
  // while the worker is in one of the calls above, which then throws Poisoned; but no more compute of the job may be
  // launched once abort has begun.
  void abort(std::uint64_t job, Stream& compute);

  std::size_t open_jobs() const;                      // enqueued, not yet closed or aborted
  bool wait_idle(std::chrono::milliseconds timeout);  // no open job and every gradient download finished

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace roundpipe
