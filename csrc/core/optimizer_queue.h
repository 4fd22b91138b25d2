// CPU work beside the GPUs: per-unit updates, run one after the other, each in slices on a thread pool of its own.
//
// Note [First ready, first run]
//   Of the updates whose tickets are ready the one that was submitted first runs next. None waits behind one of another
//   unit that is not ready: what an update waits for may itself wait for a later one. (A download that needs a place of
//   a gradient pool waits for updates that were submitted when *their* downloads were complete.) Updates of one unit
//   run in the order of their tickets where these are of one kind, else in that of submission; one without tickets
//   starts when all before it have.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/layer_clock.h"
#include "core/weight_unit.h"

namespace roundpipe {

struct HostAccess {  // declared to the checker for the whole update
  Access access;
  const void* range;
  std::size_t bytes;
  const char* what;
};

struct UpdateTicket {
  std::shared_ptr<WeightUnit> unit;  // that issued it
  Ticket ticket;
};

struct Update {
  // All waited for, and all completed (or poisoned) afterwards: an update in place takes gradients and publishes.
  std::vector<UpdateTicket> tickets;
  std::size_t elements = 0;
  // Smallest slice; every slice begins at a multiple of it.
  std::size_t grain = std::size_t{1} << 16;
  // Called concurrently on disjoint slices; dropped before the update counts as ended.
  std::function<void(std::size_t begin, std::size_t end)> body;
  std::vector<HostAccess> accesses;
};

class OptimizerQueue {
 public:
  // threads == 0: ROUNDPIPE_OPTIMIZER_THREADS, or the processors of this process less a quarter and at least two
  // (for device workers), but at least one thread. The dispatcher is one of them.
  OptimizerQueue(std::size_t threads, HappensBefore* checker);
  ~OptimizerQueue();

  // A number that only grows, from 1. Throws Error after shutdown.
  std::uint64_t submit(Update update);
  // The number of an update that comes later, so that it can be waited for now. Ends with submit or give_up; submit
  // after shutdown throws, and the update's tickets are the caller's to poison.
  std::uint64_t reserve();
  void submit(std::uint64_t reserved, Update update);
  void give_up(std::uint64_t reserved, std::exception_ptr failure);
  // True once this update has ended; false on time-out. Rethrows its failure (Poisoned if one of its tickets was),
  // once; other updates go on.
  bool wait(std::uint64_t number, std::chrono::milliseconds timeout);
  void poke();  // a ticket may have become ready: called by the observers of the clocks
  // The oldest failure that no wait() has thrown yet, or null: for whoever ends a phase without waiting for each
  // number. Of more than a few thousand such failures the first and the newest are kept.
  std::exception_ptr take_failure();
  std::size_t threads() const;
  void shutdown() noexcept;  // the update that runs ends well, others are poisoned; joins the threads

 private:
  struct State;
  std::shared_ptr<State> state_;  // shared with the dispatcher, on which the last owner of the queue may die
};

}  // namespace roundpipe
