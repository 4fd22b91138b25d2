// One open engine: a backend, its host arena, and for each device the rooms that stream to it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "core/activation_store.h"
#include "core/backend.h"
#include "core/host_arena.h"
#include "core/optimizer_queue.h"
#include "core/stage_streamer.h"
#include "core/transfer_engine.h"
#include "ops/checks.h"
#include "ops/handles.h"
#include "ops/stable_abi.h"

namespace roundpipe {
class HostBackend;
}

namespace roundpipe::ops {

// Wakes every lane and the optimizer queue of one engine when a clock advances. A clock outlives the engine, and its
// observer runs on lanes' threads, so it holds this instead of the engine: no lane may ever be the one to destroy its
// engine.
class Pokes {
 public:
  void set(std::vector<TransferEngine*> engines, OptimizerQueue* queue);
  void poke();

 private:
  std::shared_mutex mutex_;  // guards the rest: emptied before these go
  std::vector<TransferEngine*> engines_;
  OptimizerQueue* queue_ = nullptr;
};

struct DeviceRoom {
  Device* device = nullptr;
  Place place;  // of this device's tensors
  char* region_base = nullptr;
  std::optional<Tensor> region;  // outlives the rooms below, which lease it
  std::unique_ptr<Stream> compute;
  std::unique_ptr<TransferEngine> transfers;
  std::unique_ptr<StageStreamer> streamer;
};

class Engine {
 public:
  static constexpr HandleKind kHandleKind = HandleKind::kEngine;

  // kind "host": simulated devices, `devices` must be 0..n-1. kind "cuda": driver ordinals.
  Engine(const std::string& kind, const std::vector<std::int64_t>& devices, std::size_t memory_limit_bytes, bool check);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Runs on a thread of its own and returns false when that does not end in time; it then goes on by itself.
  static bool close(std::shared_ptr<Engine> engine, std::chrono::milliseconds timeout);

  // Everything below requires an EngineUse, except what a Job, Record, ... may ask of a closed engine.
  DeviceRoom& room(std::int64_t device);  // attached to the calling thread; InvalidArgument when out of range
  DeviceRoom& room_at(std::size_t device) { return *rooms_[device]; }
  std::size_t device_count() const { return rooms_.size(); }
  ActivationStore& store() { return *store_; }
  OptimizerQueue& queue() { return *queue_; }
  // For what runs on a lane's thread: no lane may be the one to destroy its engine.
  const std::shared_ptr<OptimizerQueue>& share_queue() const { return queue_; }
  HappensBefore* checker() const { return backend_->checker(); }
  HostBackend* host_backend() const { return host_backend_; }  // null: real devices
  bool wait_idle(std::chrono::milliseconds timeout);
  std::size_t open_jobs() const;

  const std::shared_ptr<Backend>& backend() const { return backend_; }
  const std::shared_ptr<Pokes>& pokes() const { return pokes_; }
  bool closed() const { return closing_.load(); }

  std::atomic<std::int64_t> live_handles{0};  // units, tickets, jobs, ... of this engine: a leak shows as growth

 private:
  friend class EngineUse;
  friend class EngineChange;
  void tear_down();

  // Declared first, destroyed last: the memory of every block belongs to it.
  std::shared_ptr<Backend> backend_;
  HostBackend* host_backend_ = nullptr;
  std::shared_ptr<HostArena> arena_;
  std::shared_ptr<Pokes> pokes_ = std::make_shared<Pokes>();
  std::unique_ptr<ActivationStore> store_;
  std::vector<std::unique_ptr<DeviceRoom>> rooms_;
  std::shared_ptr<OptimizerQueue> queue_;

  // Held shared by every operator that is inside the rooms, exclusively while they change or go.
  std::shared_mutex use_;
  std::atomic<bool> closing_{false};  // set before close() asks for use_, so that no new operator gets in its way
};

// An operator's stay inside an engine.
class EngineUse {
 public:
  explicit EngineUse(std::shared_ptr<Engine> engine);  // InvalidArgument when it is closed
  EngineUse(std::int64_t handle, const char* argument);
  Engine* operator->() const { return engine_.get(); }
  const std::shared_ptr<Engine>& share() const { return engine_; }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_lock<std::shared_mutex> lock_;
};

// The same, alone.
class EngineChange {
 public:
  EngineChange(std::int64_t handle, const char* argument);
  Engine* operator->() const { return engine_.get(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::unique_lock<std::shared_mutex> lock_;
};

// Base of what handles other than an engine's stand for.
class OfEngine {
 public:
  explicit OfEngine(std::shared_ptr<Engine> engine) : engine_(std::move(engine)) { ++engine_->live_handles; }
  ~OfEngine() { --engine_->live_handles; }
  OfEngine(const OfEngine&) = delete;
  OfEngine& operator=(const OfEngine&) = delete;
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  void require_engine(const std::shared_ptr<Engine>& engine, const std::string& argument) const;

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace roundpipe::ops
