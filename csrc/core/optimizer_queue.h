// CPU work beside the GPUs: a FIFO of per-unit updates, each started once its ticket is ready and run in slices on a
// thread pool of its own.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/layer_clock.h"
#include "core/weight_unit.h"

namespace roundpipe {

struct HostAccess {  // declared to the checker for the whole update
  Access access;
  const void* range;
  std::size_t bytes;
  const char* what;
};

struct Update {
  std::shared_ptr<WeightUnit> unit;
  std::optional<Ticket> ticket;  // waited for, and completed (or poisoned) afterwards
  std::size_t elements = 0;
  std::size_t grain = std::size_t{1} << 16;                       // smallest slice
  std::function<void(std::size_t begin, std::size_t end)> body;   // called concurrently on disjoint slices
  std::vector<HostAccess> accesses;
};

class OptimizerQueue {
 public:
  // threads == 0: the hardware threads less two (for device workers), at least one; ROUNDPIPE_OPTIMIZER_THREADS.
  OptimizerQueue(std::size_t threads, HappensBefore* checker);
  ~OptimizerQueue();

  std::uint64_t submit(Update update);  // a number that only grows
  // True once this update and all before it have ended; false on time-out. Rethrows the failure of this update (Poisoned
  // if its ticket was); other updates go on.
  bool wait(std::uint64_t number, std::chrono::milliseconds timeout);
  std::size_t threads() const;
  void shutdown() noexcept;  // pending updates are poisoned

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace roundpipe
