#include "ops/data_plane.h"

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdlib>
#include <future>
#include <string>
#include <thread>

#include "core/errors.h"
#include "core/host_arena.h"
#include "core/host_backend.h"
#include "cuda/cuda_backend.h"
#include "ops/arenas.h"
#include "ops/process.h"

namespace roundpipe::ops {
namespace {

bool checking() {
  const char* value = std::getenv("ROUNDPIPE_CHECK");
  return value != nullptr && std::string(value) == "1";
}

// Only the CUDA builds of torch have this function, so it is looked up instead of linked. torch has loaded its library
// by the time a CUDA tensor can exist.
std::uintptr_t current_stream(std::int32_t device) {
  using GetStream = AOTITorchError (*)(std::int32_t, void**);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return reinterpret_cast<GetStream>(library == nullptr ? nullptr
                                                          : dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (get == nullptr || get(device, &stream) != 0) {
    throw Error("this torch does not tell its current CUDA stream; it is a CPU build, or its libtorch_cuda.so is gone");
  }
  return reinterpret_cast<std::uintptr_t>(stream);
}

}  // namespace

struct OnDevice::Guard {
  explicit Guard(std::int32_t index) : guard(index) {}
  torch::stable::accelerator::DeviceGuard guard;
};

OnDevice::OnDevice(const Place& place) {
  if (place.type != DeviceType::CPU) guard_ = std::make_unique<Guard>(place.index);
}
OnDevice::~OnDevice() = default;

DataRoom::DataRoom(const Place& where) : place(where) {
  if (place.type == DeviceType::CPU) {
    HostBackendOptions options;
    options.check = checking();
    auto simulated = std::make_shared<HostBackend>(options);
    host_backend = simulated.get();
    backend = std::move(simulated);
  } else {
    backend = make_cuda_backend({place.index});
  }
  device = &backend->device(0);
  HostArenaOptions cyclic;  // filled and emptied in turn
  cyclic.keep_peak = true;
  auto arena = HostArena::make(backend, cyclic);
  Arenas::global().count(arena);
  store = std::make_unique<ActivationStore>(std::move(arena), backend->checker());
  TransferOptions options;
  options.checker = backend->checker();
  transfers = std::make_unique<TransferEngine>(*device, options);
}

std::unique_ptr<Stream> DataRoom::compute() const {
  return device->wrap_compute_stream(place.type == DeviceType::CPU ? 0 : current_stream(place.index));
}

DataPlane& DataPlane::global() { return PerProcess<DataPlane>::get(); }

std::shared_ptr<DataRoom> DataPlane::room(const Place& place) {
  std::lock_guard lock(mutex_);
  if (closed_) throw Error("the process is ending: no copy can be started or waited for any more");
  std::shared_ptr<DataRoom>& room = rooms_[{place.type, place.type == DeviceType::CPU ? 0 : place.index}];
  if (!room) room = std::make_shared<DataRoom>(place);
  return room;
}

std::vector<std::shared_ptr<DataRoom>> DataPlane::rooms() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<DataRoom>> rooms;
  for (const auto& [key, room] : rooms_) {
    if (room) rooms.push_back(room);
  }
  return rooms;
}

bool DataPlane::close(std::chrono::milliseconds timeout) {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  auto rooms = this->rooms();
  if (rooms.empty()) return true;
  // On a thread of its own, which is left behind when a copy hangs.
  auto ended = std::make_shared<std::promise<void>>();
  auto future = ended->get_future();
  std::thread([rooms = std::move(rooms), ended] {
    for (const auto& room : rooms) {
      room->device->attach_thread();
      room->transfers->shutdown();
    }
    ended->set_value();
  }).detach();
  return future.wait_for(timeout) == std::future_status::ready;
}

}  // namespace roundpipe::ops
