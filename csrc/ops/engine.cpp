#include "ops/engine.h"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "core/host_backend.h"
#include "cuda/cuda_backend.h"
#include "ops/arenas.h"
#include "ops/error_record.h"
#include "ops/job.h"

namespace roundpipe::ops {
namespace {

using Clock = std::chrono::steady_clock;

std::chrono::milliseconds left_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  return std::max(left, std::chrono::milliseconds(0));
}

std::unique_ptr<HostBackend> make_host_backend(const std::vector<std::int64_t>& devices, std::size_t limit,
                                               bool check) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] != static_cast<std::int64_t>(i)) {
      refuse(at("devices", i), "simulated devices to be numbered 0, 1, 2, ...", std::to_string(devices[i]));
    }
  }
  HostBackendOptions options;
  options.devices = devices.size();
  options.memory_limit_bytes = limit;
  options.check = check;
  return std::make_unique<HostBackend>(options);
}

std::unique_ptr<Backend> make_real_backend(const std::vector<std::int64_t>& devices, std::size_t limit, bool check) {
  if (limit != 0) {
    refuse("memory_limit_bytes", "0 for kind 'cuda', whose memory torch.cuda.set_per_process_memory_fraction caps",
           std::to_string(limit));
  }
  if (check) refuse("check", "False for kind 'cuda': only simulated devices carry the checker", "True");
  std::vector<int> ordinals;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] < 0 || devices[i] > 1023) {
      refuse(at("devices", i), "a driver ordinal from 0 to 1023", std::to_string(devices[i]));
    }
    ordinals.push_back(static_cast<int>(devices[i]));
  }
  return make_cuda_backend(ordinals);
}

// Sources of copies down are device memory that nobody can use. However slow the copies are, they must not become a
// good part of a device: on a busy link, or into memory that must be locked first, a gigabyte was waiting there. So
// much keeps the link busy for a millisecond, and the host one job ahead.
std::size_t max_outstanding(std::size_t memory_limit_bytes) {
  constexpr std::size_t kMost = std::size_t{64} << 20;
  return memory_limit_bytes == 0 ? kMost : std::clamp<std::size_t>(memory_limit_bytes / 64, 1, kMost);
}

// On an H200 with 16 cores 12 threads keep 0.94 of the link busy out of the page cache, 8 threads 0.79. Several devices
// share the cores, and the callers want some too.
std::size_t fill_threads(std::size_t devices) {
  constexpr std::size_t kMost = 12;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency() * 3 / (4 * devices), 1, kMost);
}

}  // namespace

void Pokes::set(std::vector<TransferEngine*> engines, OptimizerQueue* queue) {
  std::unique_lock lock(mutex_);
  engines_ = std::move(engines);
  queue_ = queue;
}

void Pokes::poke() {
  std::shared_lock lock(mutex_);
  for (TransferEngine* engine : engines_) engine->poke();
  if (queue_ != nullptr) queue_->poke();
}

Engine::Engine(const std::string& kind, const std::vector<std::int64_t>& devices, std::size_t memory_limit_bytes,
               bool check) {
  if (devices.empty()) refuse("devices", "at least one device", "an empty list");
  const bool simulated = kind == "host";
  if (simulated) {
    auto backend = make_host_backend(devices, memory_limit_bytes, check);
    host_backend_ = backend.get();
    backend_ = std::move(backend);
  } else if (kind == "cuda") {
    backend_ = make_real_backend(devices, memory_limit_bytes, check);
  } else {
    refuse("kind", "'cuda' or 'host'", "'" + kind + "'");
  }
  arena_ = HostArena::make(backend_);
  // Activations fill their memory and empty it once an iteration.
  HostArenaOptions cyclic;
  cyclic.keep_peak = true;
  store_ = std::make_unique<ActivationStore>(HostArena::make(backend_, cyclic), backend_->checker(),
                                             max_outstanding(memory_limit_bytes));
  std::vector<TransferEngine*> transfers;
  for (std::size_t i = 0; i < devices.size(); ++i) {
    auto room = std::make_unique<DeviceRoom>();
    room->device = &backend_->device(i);
    room->place = simulated ? Place{} : Place{DeviceType::CUDA, static_cast<std::int32_t>(devices[i])};
    room->compute = room->device->wrap_compute_stream(0);
    TransferOptions options;
    options.checker = backend_->checker();
    options.arena = arena_;
    options.fill_threads = fill_threads(devices.size());
    room->transfers = std::make_unique<TransferEngine>(*room->device, options);
    room->streamer = std::make_unique<StageStreamer>(*room->device, *room->transfers);
    transfers.push_back(room->transfers.get());
    rooms_.push_back(std::move(room));
  }
  queue_ = std::make_shared<OptimizerQueue>(0, backend_->checker());
  pokes_->set(std::move(transfers), queue_.get());
  Arenas::global().add(arena_);
}

Engine::~Engine() {
  if (!closing_) tear_down();
}

void Engine::tear_down() {
  closing_ = true;
  Arenas::global().retire(arena_);
  for (const auto& job : HandleRegistry::global().all<Job>()) {
    if (job->engine().get() != this) continue;
    std::lock_guard lock(job->mutex);
    if (std::exchange(job->ended, true)) continue;
    DeviceRoom& room = *rooms_[job->device];
    room.streamer->abort(job->number, *room.compute);
  }
  // Ends every wait that an operator is still inside, so that the exclusive lock below is soon free.
  queue_->shutdown();
  for (auto& room : rooms_) room->transfers->shutdown();
  std::unique_lock lock(use_);
  pokes_->set({}, nullptr);
  queue_.reset();
  for (auto& room : rooms_) {
    room->streamer.reset();
    room->transfers.reset();
    room->compute.reset();
    room->region.reset();
  }
  rooms_.clear();
  store_.reset();
}

bool Engine::close(std::shared_ptr<Engine> engine, std::chrono::milliseconds timeout) {
  // Set here, not on the thread, so that no operator that starts after this call gets in.
  if (engine->closing_.exchange(true)) return true;
  auto ended = std::make_shared<std::promise<void>>();
  auto future = ended->get_future();
  std::thread([engine = std::move(engine), ended]() mutable {
    try {
      engine->tear_down();
      engine.reset();
      ended->set_value();
    } catch (...) {
      ended->set_exception(std::current_exception());
    }
  }).detach();
  if (future.wait_for(timeout) != std::future_status::ready) return false;
  future.get();
  return true;
}

DeviceRoom& Engine::room(std::int64_t device) {
  DeviceRoom& room = *rooms_[require_index("device", device, rooms_.size())];
  return room;
}

bool Engine::wait_idle(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  for (auto& room : rooms_) {
    if (!room->streamer->wait_idle(left_until(deadline))) return false;
    if (!room->transfers->drain(left_until(deadline))) return false;
  }
  return true;
}

std::size_t Engine::open_jobs() const {
  std::size_t jobs = 0;
  for (const auto& room : rooms_) jobs += room->streamer->open_jobs();
  return jobs;
}

namespace {

[[noreturn]] void refuse_closed() {
  throw InvalidArgument(std::string("roundpipe::") + current_op() +
                        ": the engine that this belongs to is closed; open a new one with engine_open");
}

}  // namespace

EngineUse::EngineUse(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), lock_(engine_->use_) {
  if (engine_->closed()) refuse_closed();
}

EngineUse::EngineUse(std::int64_t handle, const char* argument)
    : EngineUse(HandleRegistry::global().get<Engine>(handle, argument)) {}

EngineChange::EngineChange(std::int64_t handle, const char* argument)
    : engine_(HandleRegistry::global().get<Engine>(handle, argument)), lock_(engine_->use_) {
  if (engine_->closed()) refuse_closed();
}

void OfEngine::require_engine(const std::shared_ptr<Engine>& engine, const std::string& argument) const {
  if (engine_ != engine) refuse(argument, "something of the engine of this call", "something of another engine");
}

}  // namespace roundpipe::ops
