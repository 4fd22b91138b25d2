// The rooms behind the operators that are legal inside torch.compile: one a device, made when a tensor of that device
// first comes by, apart from every engine. So a compiled function needs no engine, and no copy of its own waits behind
// a training step's weights. Tensors on the CPU go through a simulated device.
//
// Note [Data plane]
//   Every operator is a function of its arguments: the result of a wait is memory that nobody else has, and nothing an
//   operator was given is written. A ticket is the handle of one copy under way; the tensor that carries it ends the
//   handle when it dies, so a ticket nobody waits for costs nothing for long. The first wait takes the copy's result. A
//   later one on the same ticket, or one on a ticket whose tensor was cloned and died, finds the handle ended and
//   copies again from the argument it has anyway. That argument is also what keeps a compiler from reusing the memory
//   of the source between start and wait; after the wait it may, so a wait returns only once the host has seen the copy
//   complete.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/activation_store.h"
#include "core/backend.h"
#include "core/transfer_engine.h"
#include "ops/checks.h"
#include "ops/stable_abi.h"

namespace roundpipe {
class HostBackend;
}

namespace roundpipe::ops {

struct DataRoom {
  explicit DataRoom(const Place& place);
  // The stream on which torch launches this device's compute for the calling thread.
  std::unique_ptr<Stream> compute() const;

  const Place place;
  std::shared_ptr<Backend> backend;  // declared first, destroyed last: all memory belongs to it
  HostBackend* host_backend = nullptr;
  Device* device = nullptr;
  std::unique_ptr<ActivationStore> store;
  std::unique_ptr<TransferEngine> transfers;
};

// Makes `place`'s device current for torch and the driver while an operator works there; nothing to do on the CPU.
class OnDevice {
 public:
  explicit OnDevice(const Place& place);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
};

class DataPlane {
 public:
  static DataPlane& global();

  std::shared_ptr<DataRoom> room(const Place& place);  // throws Error after close()
  std::vector<std::shared_ptr<DataRoom>> rooms();
  // Fails what is under way and ends all threads; false when they did not end in time.
  bool close(std::chrono::milliseconds timeout);

 private:
  std::mutex mutex_;  // guards everything below
  std::map<std::pair<DeviceType, std::int32_t>, std::shared_ptr<DataRoom>> rooms_;
  bool closed_ = false;
};

}  // namespace roundpipe::ops
