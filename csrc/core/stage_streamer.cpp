#include "core/stage_streamer.h"

#include <unistd.h>

#include <set>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/saturating_deadline.h"
#include "core/streamed_job.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;

// Every request fails at once when a streamer ends, so this is only met when a driver no longer answers.
constexpr milliseconds kLongestEnd{10'000};

std::vector<RegionExtents::Sizes> sizes_of(const std::vector<UnitUse>& units) {
  std::vector<RegionExtents::Sizes> sizes;
  sizes.reserve(units.size());
  for (const UnitUse& use : units) {
    RP_REQUIRE(use.unit != nullptr, "stage streamer: a job's unit is null");
    sizes.push_back({use.unit->weight_bytes, use.gradients ? use.unit->gradient_bytes : 0});
  }
  return sizes;
}

void check_units(const std::vector<UnitUse>& units) {
  std::set<const WeightUnit*> seen;
  for (const UnitUse& use : units) {
    const std::string unit = "stage streamer: unit " + std::to_string(use.unit->id);
    RP_REQUIRE(seen.insert(use.unit.get()).second,
               unit + " is listed twice in one job; layers that share it use one entry");
    RP_REQUIRE(!use.gradients || use.unit->gradient_bytes != 0,
               unit + " has no gradients (gradient_bytes is 0), but the job asks for them");
    RP_REQUIRE(!use.gradients || (use.gradient_store != nullptr) != (use.gradient_pool != nullptr),
               unit +
                   ": gradients are asked without a host image to write them to (gradient_store is null), or with "
                   "both an image and a pool");
    RP_REQUIRE(!use.gradients || use.gradient_pool == nullptr || use.unit->gradient_bytes <= use.gradient_pool->bytes(),
               unit + ": its " + std::to_string(use.unit->gradient_bytes) +
                   " bytes of gradients are more than their pool has; make the pool larger");
    for (const HostSegment& segment : use.unit->weights) {
      RP_REQUIRE(segment.offset <= use.unit->weight_bytes && segment.bytes <= use.unit->weight_bytes - segment.offset,
                 unit + ": a segment of " + std::to_string(segment.bytes) + " bytes at offset " +
                     std::to_string(segment.offset) + " exceeds its packed image of " +
                     std::to_string(use.unit->weight_bytes) + " bytes");
    }
  }
}

void poison_write(StreamedUnit& unit) { unit.use.unit->clock.poison(unit.write); }

}  // namespace

StageStreamer::StageStreamer(Device& device, TransferEngine& engine)
    : state_(std::make_shared<State>(device, engine)) {}

StageStreamer::~StageStreamer() {
  State& state = *state_;
  if (getpid() != state.owner) {
    static_cast<void>(new std::shared_ptr<State>(state_));
    return;
  }
  std::vector<StreamedUnit*> never_written;
  std::unique_lock lock(state.mutex);
  state.closing = true;
  const auto open = std::exchange(state.jobs, {});
  for (const auto& [id, job] : open) {
    for (StreamedUnit& unit : job->units) {
      if (unit.use.gradients && !std::exchange(unit.gradients_given_back, true)) never_written.push_back(&unit);
    }
  }
  lock.unlock();
  for (StreamedUnit* unit : never_written) poison_write(*unit);
  state.poke();
  lock.lock();
  state.idle.wait_until(lock, saturating_deadline(kLongestEnd), [&] { return state.pending == 0; });
  lock.unlock();
  state.settle_discards();
  if (state.base != nullptr) state.device.end_lease(state.base);
}

std::size_t StageStreamer::job_bytes(const std::vector<UnitUse>& units) {
  return RegionExtents::job_bytes(sizes_of(units));
}

void StageStreamer::set_region(void* base, std::size_t bytes) {
  State& state = *state_;
  std::lock_guard order(state.enqueue_mutex);
  std::lock_guard lock(state.mutex);
  RP_REQUIRE(state.jobs.empty() && state.pending == 0,
             "set_region on " + state.device.name() + ": " + std::to_string(state.jobs.size()) + " jobs are open and " +
                 std::to_string(state.pending) + " transfers are under way; close the jobs and wait_idle() first");
  RP_REQUIRE(base != nullptr || bytes == 0, "set_region on " + state.device.name() + ": the region is null but has " +
                                                std::to_string(bytes) + " bytes");
  state.settle_discards();
  // The old lease ends first: both together may exceed the device's limit.
  if (state.base != nullptr) state.device.end_lease(state.base);
  state.base = nullptr;
  state.bytes = 0;
  state.extents = RegionExtents(0, nullptr);
  if (base == nullptr) return;
  state.device.lease(base, bytes);
  state.base = static_cast<char*>(base);
  state.bytes = bytes;
  state.extents = RegionExtents(bytes, state.checker);
}

void StageStreamer::set_region(void* base, std::size_t bytes, Stream& compute) {
  const std::shared_ptr<Event> launched = state_->record(compute);
  state_->device.synchronize(*launched);
  set_region(base, bytes);
}

std::size_t StageStreamer::region_bytes() const {
  std::lock_guard lock(state_->mutex);
  return state_->bytes;
}

std::uint64_t StageStreamer::enqueue(std::vector<UnitUse> units) {
  State& state = *state_;
  const std::vector<RegionExtents::Sizes> sizes = sizes_of(units);
  check_units(units);
  auto job = std::make_shared<StreamedJob>();
  std::lock_guard order(state.enqueue_mutex);
  {
    std::lock_guard lock(state.mutex);
    const std::size_t asked = RegionExtents::job_bytes(sizes);
    if (asked > state.extents.usable_bytes()) {
      throw DeviceOutOfMemory(state.device.name() + ": a job of " + std::to_string(asked) +
                                  " bytes does not fit into the region of " + std::to_string(state.bytes) +
                                  " bytes; plan smaller stages or set a larger region",
                              asked);
    }
    job->base = state.base;
    job->units.resize(units.size());
    const std::vector<RegionExtents::Placed> places = state.extents.place(sizes);
    for (std::size_t i = 0; i < units.size(); ++i) {
      job->units[i].weights = state.extents.claim(places[i].weights);
      if (units[i].gradients) job->units[i].gradients = state.extents.claim(places[i].gradients);
    }
    job->id = state.next_job++;
  }
  // From here on every ticket is finished by someone: by its request once submitted, by the worker or the job's end for
  // writes, or below.
  for (std::size_t i = 0; i < units.size(); ++i) {
    StreamedUnit& unit = job->units[i];
    unit.use = std::move(units[i]);
    LayerClock& clock = unit.use.unit->clock;
    unit.upload = clock.issue(TicketKind::kUpload);
    if (unit.use.gradients && unit.use.gradient_load != nullptr) unit.load = clock.issue(TicketKind::kGradientLoad);
    if (unit.use.gradients) unit.write = clock.issue(TicketKind::kGradientWrite);
  }
  const auto submit = [&](TransferRequest request) {
    {
      std::lock_guard lock(state.mutex);
      ++state.pending;
    }
    try {
      return state.engine.submit(std::move(request));
    } catch (...) {
      std::lock_guard lock(state.mutex);
      --state.pending;
      throw;
    }
  };
  try {
    for (std::size_t i = 0; i < job->units.size(); ++i) {
      StreamedUnit& unit = job->units[i];
      unit.weights_up = submit(state.weights_upload(job, i));
      if (unit.use.gradients) unit.gradients_up = submit(state.gradients_upload(job, i));
    }
  } catch (...) {
    {
      std::lock_guard lock(state.mutex);
      job->aborted = true;
    }
    for (StreamedUnit& unit : job->units) {
      LayerClock& clock = unit.use.unit->clock;
      if (!unit.weights_up) clock.poison(unit.upload);
      if (unit.use.gradients && unit.use.gradient_load != nullptr && !unit.gradients_up) clock.poison(unit.load);
      if (unit.use.gradients) poison_write(unit);
      state.give_back(*job, *unit.weights.tenancy, nullptr, false);
      if (unit.use.gradients) state.give_back(*job, *unit.gradients.tenancy, nullptr, false);
    }
    state.poke();
    throw;
  }
  std::lock_guard lock(state.mutex);
  state.jobs.emplace(job->id, job);
  return job->id;
}

WaitResult StageStreamer::wait_unit(std::uint64_t job_id, std::size_t index, Stream& compute, milliseconds timeout,
                                    UnitPlace* place) {
  State& state = *state_;
  const auto job = state.find_job(job_id, index, "wait_unit");
  StreamedUnit& unit = job->units[index];
  const auto deadline = saturating_deadline(timeout);
  Handover* const uploads[] = {unit.weights_up.get(), unit.gradients_up.get()};
  for (Handover* upload : uploads) {
    if (upload == nullptr) continue;
    if (!upload->wait_issued(left_until(deadline))) return WaitResult::kTimedOut;
    if (state.device.compute_is_calling_thread() && !upload->wait_settled(left_until(deadline))) {
      return WaitResult::kTimedOut;
    }
  }
  for (Handover* upload : uploads) {
    if (upload != nullptr) upload->order_after(compute);
  }
  place->weights = job->base + unit.weights.tenancy->extent.begin;
  place->gradients = unit.use.gradients ? job->base + unit.gradients.tenancy->extent.begin : nullptr;
  // One step with the flag: an abort by another thread either keeps us from the place or comes after this use.
  std::lock_guard lock(state.mutex);
  state.refuse_dead(*job, unit);
  unit.waited = true;
  state.declare_use(*job, unit, Access::kRead, compute);
  if (unit.use.gradients) state.declare_use(*job, unit, Access::kWrite, compute);
  return WaitResult::kDone;
}

}  // namespace roundpipe
