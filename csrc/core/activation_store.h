// What crosses a boundary between stages and what recompute needs: records of tensors' bytes in pinned host memory,
// copied down while compute goes on and up again one microbatch ahead, on any device.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/backend.h"
#include "core/host_arena.h"
#include "core/transfer_engine.h"

namespace roundpipe {

struct DeviceBytes {
  void* data;
  std::size_t bytes;
};

// One group of tensors stashed together. Shared by the store, pending copies and host views; its blocks go back to the
// arena when the last of these lets go.
class Record {
 public:
  virtual ~Record() = default;
  virtual std::size_t size() const = 0;  // number of tensors
  virtual std::size_t bytes(std::size_t index) const = 0;
  virtual void* host(std::size_t index) const = 0;  // valid to read once wait_host returned true
  // True once all bytes are on the host, false on time-out; rethrows the copy's failure.
  virtual bool wait_host(std::chrono::milliseconds timeout) = 0;
};

class ActivationStore {
 public:
  // Back-pressure: stash blocks while more than `max_outstanding_bytes` of its device's downloads have not completed
  // (their device sources are held until then).
  ActivationStore(std::shared_ptr<HostArena> arena, HappensBefore* checker,
                  std::size_t max_outstanding_bytes = std::size_t{1} << 30);
  ~ActivationStore();

  // Copies `sources` down after what `compute` has so far. `keep_alive` (the tensors) is dropped once the host has seen
  // the copy complete. Does not wait.
  std::shared_ptr<Record> stash(Device& device, TransferEngine& engine, Stream& compute,
                                const std::vector<DeviceBytes>& sources, Traffic traffic,
                                std::shared_ptr<void> keep_alive);
  // Lets `compute` continue only after the record's download has read its sources: for a source about to be
  // overwritten. Returns false on time-out (the copy is not issued yet).
  bool order_after_read(Record& record, Stream& compute, std::chrono::milliseconds timeout);
  // A record from host memory, copied now on the calling thread.
  std::shared_ptr<Record> from_host(const std::vector<DeviceBytes>& sources);

  // Starts the copy up into `targets` (device memory that `compute` owns from here on, so the copy comes after what
  // `compute` has so far and after the record's own download). `keep_alive` holds the targets.
  std::shared_ptr<Handover> fetch(Device& device, TransferEngine& engine, Stream& compute,
                                  std::shared_ptr<Record> record, const std::vector<DeviceBytes>& targets,
                                  Traffic traffic, std::shared_ptr<void> keep_alive);
  // The same from host memory that is no record: `keep_alive` holds it too, and nobody writes it until the copy is
  // complete.
  std::shared_ptr<Handover> upload(Device& device, TransferEngine& engine, Stream& compute, const void* source,
                                   DeviceBytes target, Traffic traffic, std::shared_ptr<void> keep_alive);
  // Host wait until issued, then `compute` continues after the copy, and is declared to read the targets. False on
  // time-out.
  bool fetch_wait(Device& device, Handover& handover, Stream& compute, const std::vector<DeviceBytes>& targets,
                  std::chrono::milliseconds timeout);

  std::size_t live_bytes() const;  // in records that still exist
  std::size_t peak_bytes() const;
  std::size_t live_records() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace roundpipe
