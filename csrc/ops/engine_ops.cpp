// engine_*: open, close, wire to torch's memory and streams, look inside.
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_backend.h"
#include "ops/engine.h"
#include "ops/guard.h"

namespace roundpipe::ops {
namespace {

// Longer than any copy takes; a driver that has not answered by then never will, and exit must not wait for it.
constexpr std::chrono::seconds kCloseTimeout{15};
constexpr std::chrono::seconds kQuietTimeout{10};

std::int64_t engine_open(std::string kind, std::vector<std::int64_t> devices, std::int64_t memory_limit_bytes,
                         bool check) {
  if (memory_limit_bytes < 0) refuse("memory_limit_bytes", "0 or more", std::to_string(memory_limit_bytes));
  auto engine = std::make_shared<Engine>(kind, devices, static_cast<std::size_t>(memory_limit_bytes), check);
  return HandleRegistry::global().add(std::move(engine));
}

void engine_close(std::int64_t engine) {
  if (!Engine::close(HandleRegistry::global().take<Engine>(engine, "engine"), kCloseTimeout)) {
    throw Error(
        "the engine did not stop within 15 s: a copy or an update hangs; its threads were left behind, so "
        "restart the process before using these devices again");
  }
}

// What is about to change must not be in use by a job, no copy may be under way that knows the old state, and compute
// launched so far must be complete: copies into the new state do not wait for it.
void require_quiet(EngineChange& engine, DeviceRoom& room) {
  if (room.streamer->open_jobs() != 0) {
    refuse("engine", "no open job on this device", std::to_string(room.streamer->open_jobs()) + " open jobs");
  }
  if (!room.streamer->wait_idle(kQuietTimeout) || !room.transfers->drain(kQuietTimeout)) {
    throw Error("copies of device " + room.device->name() + " did not finish within 10 s; " +
                std::to_string(engine->live_handles.load()) + " handles are live");
  }
  const std::unique_ptr<Event> launched = room.device->make_event();
  room.device->record(*launched, *room.compute);
  room.device->synchronize(*launched);
}

void engine_set_stream(std::int64_t engine, std::int64_t device, std::int64_t stream) {
  EngineChange use(engine, "engine");
  DeviceRoom& room = use->room(device);
  require_quiet(use, room);
  room.compute = room.device->wrap_compute_stream(static_cast<std::uintptr_t>(stream));
}

void engine_set_region(std::int64_t engine, std::int64_t device, Tensor region) {
  EngineChange use(engine, "engine");
  DeviceRoom& room = use->room(device);
  require_bytes(region, "region", room.place);
  require_quiet(use, room);
  Tensor held = detached(region);
  void* base = region.mutable_data_ptr();
  room.streamer->set_region(base, byte_count(region), *room.compute);
  room.region = std::move(held);
  room.region_base = static_cast<char*>(base);
}

std::vector<std::int64_t> engine_bytes(std::int64_t engine, std::int64_t device) {
  EngineUse use(engine, "engine");
  const DeviceRoom& room = use->room(device);
  std::vector<std::int64_t> bytes;
  for (const Direction direction : {Direction::kHostToDevice, Direction::kDeviceToHost}) {
    for (std::size_t kind = 0; kind < kTrafficKinds; ++kind) {
      bytes.push_back(static_cast<std::int64_t>(room.transfers->bytes(direction, static_cast<Traffic>(kind))));
    }
  }
  return bytes;
}

std::int64_t engine_bounced_bytes(std::int64_t engine, std::int64_t device) {
  EngineUse use(engine, "engine");
  return static_cast<std::int64_t>(use->room(device).transfers->bounced_bytes());
}

void engine_reset_bytes(std::int64_t engine) {
  EngineUse use(engine, "engine");
  for (std::size_t i = 0; i < use->device_count(); ++i) use->room_at(i).transfers->reset_counters();
}

void engine_poke(std::int64_t engine) {
  EngineUse use(engine, "engine");
  use->pokes()->poke();
}

bool engine_wait_idle(std::int64_t engine, std::int64_t timeout_ms) {
  EngineUse use(engine, "engine");
  return use->wait_idle(require_timeout(timeout_ms));
}

std::string engine_reports(std::int64_t engine) {
  EngineUse use(engine, "engine");
  std::string lines;
  if (HappensBefore* checker = use->checker()) {
    for (const std::string& report : checker->take_reports()) lines += (lines.empty() ? "" : "\n") + report;
  }
  return lines;
}

void engine_inject(std::int64_t engine, std::string what, std::int64_t a, std::int64_t b) {
  EngineUse use(engine, "engine");
  HostBackend* backend = use->host_backend();
  if (backend == nullptr) refuse("engine", "an engine of simulated devices", "one of GPUs");
  if (what == "delay") {
    if (b < 0 || b > 1'000'000) refuse("b", "0 to 1000000 microseconds", std::to_string(b));
    backend->set_delays(static_cast<std::uint64_t>(a), static_cast<std::uint32_t>(b));
  } else if (what == "fail_copy") {
    backend->fail_copy_after(a);
  } else if (what == "fail_registration") {
    backend->fail_registration_after(a);
  } else if (what == "limit_registrations") {
    backend->limit_registrations(a);
  } else {
    refuse("what", "'delay', 'fail_copy', 'fail_registration' or 'limit_registrations'", "'" + what + "'");
  }
}

std::vector<std::int64_t> engine_live(std::int64_t engine) {
  EngineUse use(engine, "engine");
  const ActivationStore& store = use->store();
  return {static_cast<std::int64_t>(store.live_records()), static_cast<std::int64_t>(store.live_bytes()),
          static_cast<std::int64_t>(store.peak_bytes()), static_cast<std::int64_t>(use->open_jobs()),
          use->live_handles.load()};
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, engine_open);
  ROUNDPIPE_OP(library, engine_close);
  ROUNDPIPE_OP(library, engine_set_stream);
  ROUNDPIPE_OP(library, engine_set_region);
  ROUNDPIPE_OP(library, engine_bytes);
  ROUNDPIPE_OP(library, engine_bounced_bytes);
  ROUNDPIPE_OP(library, engine_reset_bytes);
  ROUNDPIPE_OP(library, engine_poke);
  ROUNDPIPE_OP(library, engine_wait_idle);
  ROUNDPIPE_OP(library, engine_reports);
  ROUNDPIPE_OP(library, engine_inject);
  ROUNDPIPE_OP(library, engine_live);
}
