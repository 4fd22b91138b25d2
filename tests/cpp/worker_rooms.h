// What each simulated device of a random program has: a streamer over a region of its own, and a worker.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/host_backend.h"
#include "core/stage_streamer.h"
#include "core/transfer_engine.h"
#include "interleavings_actor.h"

namespace roundpipe {

struct WorkerRoom {
  Device* device;
  std::unique_ptr<TransferEngine> engine;
  std::unique_ptr<StageStreamer> streamer;
  std::unique_ptr<Stream> compute;
  std::vector<std::uint64_t> region;
  std::unique_ptr<Actor> worker;
};

using WorkerRooms = std::vector<std::unique_ptr<WorkerRoom>>;

// Small chunks, so that a unit has several, and regions that hold few units.
inline WorkerRooms make_worker_rooms(HostBackend& backend, std::size_t devices, std::size_t region_bytes) {
  WorkerRooms rooms;
  for (std::size_t d = 0; d < devices; ++d) {
    auto room = std::make_unique<WorkerRoom>();
    room->device = &backend.device(d);
    TransferOptions options{.chunk_bytes = 300, .bulk_chunks_in_flight = 2};
    options.checker = backend.checker();
    room->engine = std::make_unique<TransferEngine>(*room->device, options);
    room->streamer = std::make_unique<StageStreamer>(*room->device, *room->engine);
    room->compute = room->device->wrap_compute_stream(0);
    room->region.resize(region_bytes / sizeof(std::uint64_t));
    room->streamer->set_region(room->region.data(), region_bytes);
    room->worker = std::make_unique<Actor>();
    rooms.push_back(std::move(room));
  }
  return rooms;
}

inline bool wait_idle(const WorkerRooms& rooms, std::chrono::milliseconds timeout) {
  bool idle = true;
  for (const auto& room : rooms) idle &= room->worker->wait_idle(timeout);
  for (const auto& room : rooms) idle &= room->streamer->wait_idle(timeout);
  return idle;
}

}  // namespace roundpipe
