// Moves bytes between the host and one device. Four lanes ({up, down} x {activations, bulk}), each a FIFO with a stream
// and threads of its own, so that an activation never queues behind a gigabyte of weights.
//
// Note [Lanes]
//   The bulk lanes copy in chunks with a bounded number in flight: that bound is all the delay an activation can suffer
//   from sharing the link. On the activation lanes a request is one chunk. Within a lane requests start strictly in the
//   order of submission; the head waits until its `ready` says so. A hand-over is (issued, event): an event may be
//   waited on only after it was recorded, so a consumer first waits on the host until the last chunk was issued, then
//   lets its stream wait for the event.
//   A lane has two threads. The *issuer* asks, orders and issues; it sleeps on a condition variable. The *reaper*
//   blocks in the device until the oldest chunk is complete and runs completions. One thread could not do both: blocked
//   in the device it would not see new work, and the host could not run ahead of a busy device; polling would cost a
//   core.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"

namespace roundpipe {

class HostArena;

enum class Lane : std::uint8_t { kActivations, kBulk };
enum class Traffic : std::uint8_t { kWeights, kGradients, kActivations, kBuffers, kInputs };
inline constexpr std::size_t kTrafficKinds = 5;

struct CopySegment {
  void* dst;
  const void* src;
  std::size_t bytes;
  HostMemory memory = HostMemory::kPinned;  // of a source on the host, on the bulk lane up; elsewhere it must be pinned
};

enum class Readiness : std::uint8_t { kNotYet, kReady, kPoisoned };

// One submitted request, as its consumers see it.
class Handover {
 public:
  virtual ~Handover() = default;
  // True once the last copy is issued (or the request failed); false on time-out. Rethrows the request's failure.
  virtual bool wait_issued(std::chrono::milliseconds timeout) = 0;
  // `stream` continues after the last copy. Requires issued.
  virtual void order_after(Stream& stream) = 0;
  virtual void order_after(Device& device, Stream& stream) = 0;  // a stream of another device of the same backend
  // True once the host has seen the last copy complete; false on time-out. Rethrows the request's failure.
  virtual bool wait_complete(std::chrono::milliseconds timeout) = 0;
  // As wait_complete, but tells the checker nothing: for consumers whose order must come from the event alone.
  virtual bool wait_settled(std::chrono::milliseconds timeout) = 0;
  // Calls `callback` once, when the request is issued or has failed: on the lane's thread, or at once.
  virtual void on_issued(std::function<void()> callback) = 0;
  virtual bool complete()
      const noexcept = 0;  // finished, well or not: no copy of this request can touch memory any more
};

struct TransferRequest {
  Direction direction = Direction::kHostToDevice;
  Lane lane = Lane::kBulk;
  Traffic traffic = Traffic::kWeights;
  std::vector<CopySegment> segments;  // zero bytes in total is legal: completes like any other
  std::function<Readiness()> ready;   // asked on the lane's thread, must not block; a throw poisons with
                                      // that reason; empty: ready
  // Once, when ready, before `before`: fills in addresses that nobody knew at submission. Empty: all are known.
  std::function<void(std::vector<CopySegment>&)> locate;
  std::function<void(Stream&)> before;               // once, just before the first copy: stream waits, zero fills
  std::function<void(std::exception_ptr)> finished;  // once, on the lane's thread; null: the host saw it complete. Must
                                                     // not wait for this lane, nor end the engine
  std::shared_ptr<void> keep_alive;                  // dropped after `finished`
};

struct TransferOptions {
  std::size_t chunk_bytes = std::size_t{16} << 20;
  std::size_t bulk_chunks_in_flight = 3;
  std::size_t activation_copies_in_flight = 8;
  HappensBefore* checker = nullptr;            // of the device's backend; outlives the engine and all hand-overs
  std::shared_ptr<HostArena> arena = nullptr;  // of the bounce buffers for pageable sources; null: such a request fails
  std::size_t fill_threads = 1;                // that fill bounce buffers, the lane's own included
};

class TransferEngine {
 public:
  explicit TransferEngine(Device& device, const TransferOptions& options = {});
  // As shutdown(). In a forked child, which has none of the threads, it leaks everything instead of waiting for them.
  ~TransferEngine();

  // `block_while_over_bytes`: back-pressure; blocks while more bytes than this are queued or in flight on that lane
  // (0: never). Throws Error after shutdown.
  std::shared_ptr<Handover> submit(TransferRequest request, std::size_t block_while_over_bytes = 0);

  // A pooled event of this device; it goes back when the pointer is dropped. Must not be recorded by two users.
  std::shared_ptr<Event> take_event();
  HappensBefore* checker() const noexcept;

  std::function<void()> poker() const;            // poke() that is harmless once the engine is gone
  void poke();                                    // something that a `ready` may depend on has changed
  bool drain(std::chrono::milliseconds timeout);  // all submitted requests have finished
  void shutdown() noexcept;                       // unfinished requests fail with Poisoned; joins the threads

  std::uint64_t bytes(Direction direction, Traffic traffic) const;  // issued since construction or the last reset
  std::uint64_t copies(Direction direction) const;
  std::uint64_t bounced_bytes() const;  // of these, through bounce buffers
  void reset_counters();

 private:
  struct State;
  struct Bell;
  const int owner_;  // the process that has the threads
  std::unique_ptr<State> state_;
  std::shared_ptr<Bell> bell_;
};

}  // namespace roundpipe
