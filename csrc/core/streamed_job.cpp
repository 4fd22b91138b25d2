#include "core/streamed_job.h"

#include <unistd.h>

#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"

namespace roundpipe {
namespace {

Readiness ticket_readiness(WeightUnit& unit, const Ticket& ticket, const std::string& what) {
  switch (unit.clock.state(ticket)) {
    case TicketState::kWaiting:
      return Readiness::kNotYet;
    case TicketState::kReady:
      return Readiness::kReady;
    case TicketState::kPoisoned:
      break;
  }
  throw Poisoned(what + " of unit " + std::to_string(unit.id) +
                 " cannot go on: an operation on this unit that comes before it has failed");
}

void finish_ticket(WeightUnit& unit, const Ticket& ticket, bool poisoned) {
  poisoned ? unit.clock.poison(ticket) : unit.clock.complete(ticket);
}

}  // namespace

StageStreamer::State::State(Device& device_, TransferEngine& engine_)
    : owner(getpid()),
      device(device_),
      engine(engine_),
      poke(engine_.poker()),
      checker(engine_.checker()),
      discards(checker != nullptr ? device_.make_copy_stream("discard") : nullptr) {}

void StageStreamer::State::refuse_dead(const StreamedJob& job, const StreamedUnit& unit) {
  if (unit.failure) std::rethrow_exception(unit.failure);
  if (job.aborted || closing) {
    throw Poisoned("job " + std::to_string(job.id) + " on " + device.name() +
                   (job.aborted ? " was aborted" : ": its streamer has ended"));
  }
}

std::shared_ptr<StreamedJob> StageStreamer::State::find_job(std::uint64_t id, std::size_t index, const char* call) {
  std::lock_guard lock(mutex);
  const auto it = jobs.find(id);
  const std::string what = std::string(call) + ": job " + std::to_string(id) + " on " + device.name();
  if (it == jobs.end() && id != 0 && id <= last_aborted) throw Poisoned(what + " was aborted, or closed before");
  RP_REQUIRE(it != jobs.end(), what + " is not open: it was closed, or never enqueued here");
  RP_REQUIRE(index < it->second->units.size(), what + " has " + std::to_string(it->second->units.size()) +
                                                   " units, but index " + std::to_string(index) + " was asked");
  return it->second;
}

void StageStreamer::State::declare_use(const StreamedJob& job, const StreamedUnit& unit, Access access,
                                       Stream& compute) {
  if (checker == nullptr || !unit.waited) return;
  if (access == Access::kRead) {
    device.declare(compute, access, job.base + unit.weights.tenancy->extent.begin, unit.use.unit->weight_bytes,
                   "compute reads weights");
  } else {
    device.declare(compute, access, job.base + unit.gradients.tenancy->extent.begin, unit.use.unit->gradient_bytes,
                   "compute writes gradients");
  }
}

Readiness StageStreamer::State::upload_ready(const StreamedJob& job, const StreamedUnit& unit,
                                             const RegionExtents::Claim& claim, const Ticket* ticket,
                                             const char* what) {
  bool place_free = true;
  {
    std::lock_guard lock(mutex);
    refuse_dead(job, unit);
    for (const auto& earlier : claim.conflicts) place_free &= earlier->released;
  }
  // Asked even when the place is taken: a poisoned ticket ends the wait at once.
  if (ticket != nullptr) {
    const Readiness readiness = ticket_readiness(*unit.use.unit, *ticket, what);
    if (readiness != Readiness::kReady) return readiness;
  }
  return place_free ? Readiness::kReady : Readiness::kNotYet;
}

// All uploads run on one stream. So once it has waited for an earlier use of some bytes, every later upload comes after
// that use too, and nobody needs to know of it any more.
void StageStreamer::State::supersede(RegionExtents::Claim& claim, Stream& upload) {
  std::vector<std::shared_ptr<Tenancy>> open;
  {
    std::lock_guard lock(mutex);
    for (const auto& earlier : claim.conflicts) {
      if (!earlier->superseded) open.push_back(earlier);
    }
  }
  for (const auto& earlier : open) {
    if (checker != nullptr) checker->acquire(earlier.get(), checker->this_thread());
    if (earlier->last_use) device.wait(upload, *earlier->last_use);
  }
  std::lock_guard lock(mutex);
  for (const auto& earlier : open) {
    earlier->superseded = true;
    earlier->last_use = nullptr;
  }
  claim.conflicts.clear();
}

void StageStreamer::State::transfer_ended() {
  {
    std::lock_guard lock(mutex);
    --pending;
  }
  idle.notify_all();
  poke();
}

void StageStreamer::State::uploaded(StreamedUnit& unit, const Ticket* ticket, const std::exception_ptr& failure) {
  if (failure) {
    std::lock_guard lock(mutex);
    if (!unit.failure) unit.failure = failure;
  }
  if (ticket != nullptr) finish_ticket(*unit.use.unit, *ticket, failure != nullptr);
  transfer_ended();
}

TransferRequest StageStreamer::State::weights_upload(const std::shared_ptr<StreamedJob>& job, std::size_t index) {
  StreamedUnit& unit = job->units[index];
  TransferRequest request;
  request.direction = Direction::kHostToDevice;
  request.lane = Lane::kBulk;
  request.traffic = Traffic::kWeights;
  char* place = job->base + unit.weights.tenancy->extent.begin;
  for (const HostSegment& segment : unit.use.unit->weights) {
    request.segments.push_back({place + segment.offset, segment.host, segment.bytes, segment.memory});
  }
  request.ready = [self = shared_from_this(), job, &unit] {
    return self->upload_ready(*job, unit, unit.weights, &unit.upload, "the upload");
  };
  request.before = [self = shared_from_this(), job, &unit](Stream& upload) { self->supersede(unit.weights, upload); };
  request.finished = [self = shared_from_this(), job, &unit](const std::exception_ptr& failure) {
    self->uploaded(unit, &unit.upload, failure);
  };
  return request;
}

TransferRequest StageStreamer::State::gradients_upload(const std::shared_ptr<StreamedJob>& job, std::size_t index) {
  StreamedUnit& unit = job->units[index];
  char* place = job->base + unit.gradients.tenancy->extent.begin;
  const std::size_t image_bytes = unit.use.unit->gradient_bytes;
  const Ticket* ticket = unit.use.gradient_load != nullptr ? &unit.load : nullptr;
  TransferRequest request;
  request.direction = Direction::kHostToDevice;
  request.lane = Lane::kBulk;
  request.traffic = Traffic::kGradients;
  if (ticket != nullptr) request.segments.push_back({place, unit.use.gradient_load, image_bytes});
  request.ready = [self = shared_from_this(), job, &unit, ticket] {
    return self->upload_ready(*job, unit, unit.gradients, ticket, "the gradient load");
  };
  request.before = [self = shared_from_this(), job, &unit, ticket, place, image_bytes](Stream& upload) {
    self->supersede(unit.gradients, upload);
    if (ticket == nullptr) self->device.zero(upload, place, image_bytes);
  };
  request.finished = [self = shared_from_this(), job, &unit, ticket](const std::exception_ptr& failure) {
    self->uploaded(unit, ticket, failure);
  };
  return request;
}

TransferRequest StageStreamer::State::gradients_download(const std::shared_ptr<StreamedJob>& job, std::size_t index,
                                                         std::shared_ptr<Event> computed, GradientsFinished finished) {
  StreamedUnit& unit = job->units[index];
  const std::size_t image_bytes = unit.use.unit->gradient_bytes;
  TransferRequest request;
  request.direction = Direction::kDeviceToHost;
  request.lane = Lane::kBulk;
  request.traffic = Traffic::kGradients;
  request.segments.push_back({unit.use.gradient_store, job->base + unit.gradients.tenancy->extent.begin, image_bytes});
  request.ready = [self = shared_from_this(), job, &unit, image_bytes] {
    {
      std::lock_guard lock(self->mutex);
      self->refuse_dead(*job, unit);
    }
    const Readiness readiness = ticket_readiness(*unit.use.unit, unit.write, "the gradient write");
    if (readiness != Readiness::kReady || unit.use.gradient_pool == nullptr) return readiness;
    // Last, and not before: who holds a place must not wait for anything (Note [Places of gradients]).
    unit.gradient_place = unit.use.gradient_pool->try_take(image_bytes);
    return unit.gradient_place == nullptr ? Readiness::kNotYet : Readiness::kReady;
  };
  if (unit.use.gradient_pool != nullptr) {
    request.locate = [job, &unit](std::vector<CopySegment>& segments) {
      for (CopySegment& segment : segments) segment.dst = unit.gradient_place.get();
    };
  }
  request.before = [self = shared_from_this(), computed](Stream& download) { self->device.wait(download, *computed); };
  request.finished = [self = shared_from_this(), job, &unit, computed,
                      finished = std::move(finished)](const std::exception_ptr& failure) {
    std::shared_ptr<std::byte> place = std::move(unit.gradient_place);
    if (failure) place = nullptr;
    finish_ticket(*unit.use.unit, unit.write, failure != nullptr);
    // The host saw the download complete, or it never began; compute's own accesses are ordered by its event.
    self->give_back(*job, *unit.gradients.tenancy, computed, true);
    try {
      if (finished) finished(failure, std::move(place));
    } catch (...) {
      self->transfer_ended();
      throw;
    }
    self->transfer_ended();
  };
  return request;
}

void StageStreamer::State::give_back(const StreamedJob& job, Tenancy& tenancy, std::shared_ptr<Event> last_use,
                                     bool discard) noexcept {
  if (discards && discard && last_use) {
    try {
      const std::shared_ptr<Event> discarded = engine.take_event();
      device.wait(*discards, *last_use);
      device.discard(*discards, job.base + tenancy.extent.begin, tenancy.extent.bytes());
      device.record(*discarded, *discards);
      last_use = discarded;
    } catch (...) {  // only a help in finding mistakes: the place is as good without it
    }
  }
  if (checker != nullptr) checker->release(&tenancy, checker->this_thread());
  std::lock_guard lock(mutex);
  tenancy.last_use = std::move(last_use);
  tenancy.released = true;
}

std::shared_ptr<Event> StageStreamer::State::record(Stream& compute) {
  std::shared_ptr<Event> event = engine.take_event();
  device.record(*event, compute);
  return event;
}

void StageStreamer::State::settle_discards() noexcept {
  if (!discards) return;
  try {
    const std::unique_ptr<Event> event = device.make_event();  // the engine may be gone
    device.record(*event, *discards);
    device.synchronize(*event);
  } catch (...) {
  }
}

}  // namespace roundpipe
