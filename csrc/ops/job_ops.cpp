// job_*: stages streamed to a device.
#include <set>
#include <string>
#include <utility>

#include "core/errors.h"
#include "ops/checks.h"
#include "ops/guard.h"
#include "ops/job.h"
#include "ops/unit.h"

namespace roundpipe::ops {
namespace {

// What one use of a unit must keep alive until its last copy: the streamer holds the unit exactly that long, so what it
// gets is a pointer to the unit that owns the gradient images too.
struct HeldUse {
  std::shared_ptr<UnitBody> body;
  std::vector<Tensor> images;
};

void* gradient_image(const Tensor& image, const std::string& argument, const WeightUnit& unit) {
  require_bytes(image, argument, Place{});
  const std::size_t bytes = byte_count(image);
  if (bytes == 0) return nullptr;
  if (bytes != unit.gradient_bytes) {
    refuse(argument, std::to_string(unit.gradient_bytes) + " bytes (the unit's gradient image) or an empty tensor",
           std::to_string(bytes) + " bytes");
  }
  return image.mutable_data_ptr();
}

std::int64_t job_open(std::int64_t engine, std::int64_t device, std::vector<std::int64_t> units,
                      std::vector<Tensor> loads, std::vector<Tensor> stores) {
  EngineUse use(engine, "engine");
  DeviceRoom& room = use->room(device);
  require_same_length("loads", loads.size(), "units", units.size());
  require_same_length("stores", stores.size(), "units", units.size());
  std::vector<UnitUse> uses;
  std::vector<Tensor> written;
  std::set<const UnitBody*> seen;
  auto job = std::make_shared<Job>(use.share());
  for (std::size_t i = 0; i < units.size(); ++i) {
    const std::string name = at("units", i);
    const auto unit = HandleRegistry::global().get<Unit>(units[i], name.c_str());
    unit->require_engine(use.share(), name);
    if (!seen.insert(unit->body.get()).second) refuse(name, "each unit once in a job", "a unit named before");
    UnitUse next;
    next.gradient_load = gradient_image(loads[i], at("loads", i), unit->unit());
    next.gradient_store = gradient_image(stores[i], at("stores", i), unit->unit());
    next.gradients = next.gradient_store != nullptr;
    if (next.gradient_load != nullptr && !next.gradients) {
      refuse(at("loads", i), "an empty tensor where the store is empty", describe(loads[i]));
    }
    auto held = std::make_shared<HeldUse>();
    held->body = unit->body;
    if (next.gradient_load != nullptr) held->images.push_back(detached(loads[i]));
    if (next.gradients) held->images.push_back(detached(stores[i]));
    if (next.gradients) written.push_back(held->images.back());
    next.unit = std::shared_ptr<WeightUnit>(held, &held->body->unit);
    job->gradients.push_back(next.gradients);
    uses.push_back(std::move(next));
  }
  job->device = static_cast<std::size_t>(device);
  job->downloads = std::make_shared<Downloads>(std::move(written));
  job->number = room.streamer->enqueue(std::move(uses));
  return HandleRegistry::global().add(std::move(job));
}

// A job that an operator works on: its engine is open and, unless stated, the job too.
struct OpenJob {
  explicit OpenJob(std::int64_t handle)
      : job(HandleRegistry::global().get<Job>(handle, "job")), use(job->engine()), room(use->room_at(job->device)) {
    std::lock_guard lock(job->mutex);
    if (job->ended) refuse("job", "an open job", "one that was closed or aborted");
  }
  std::size_t unit(std::int64_t index) const { return require_index("index", index, job->gradients.size()); }

  std::shared_ptr<Job> job;
  EngineUse use;
  DeviceRoom& room;
};

std::vector<std::int64_t> job_wait_unit(std::int64_t job, std::int64_t index, std::int64_t timeout_ms) {
  OpenJob open(job);
  UnitPlace place;
  const WaitResult result = open.room.streamer->wait_unit(open.job->number, open.unit(index), *open.room.compute,
                                                          require_timeout(timeout_ms), &place);
  if (result == WaitResult::kTimedOut) return {0, -1, -1};
  const auto offset = [&](void* address) -> std::int64_t {
    return address == nullptr ? -1 : static_cast<char*>(address) - open.room.region_base;
  };
  return {1, offset(place.weights), offset(place.gradients)};
}

void job_weights_done(std::int64_t job, std::int64_t index) {
  OpenJob open(job);
  open.room.streamer->weights_done(open.job->number, open.unit(index), *open.room.compute);
}

void job_gradients_done(std::int64_t job, std::int64_t index) {
  OpenJob open(job);
  const std::size_t unit = open.unit(index);
  if (!open.job->gradients[unit]) {
    refuse("index", "a unit that the job was opened with a gradient store for", "unit " + std::to_string(index));
  }
  const std::shared_ptr<Downloads> downloads = open.job->downloads;
  downloads->hand_over();
  try {
    open.room.streamer->gradients_done(open.job->number, unit, *open.room.compute,
                                       [downloads](const std::exception_ptr& failure) { downloads->finish(failure); });
  } catch (...) {
    downloads->take_back();
    throw;
  }
}

void job_close(std::int64_t job) {
  OpenJob open(job);
  std::lock_guard lock(open.job->mutex);
  if (open.job->ended) refuse("job", "an open job", "one that was closed or aborted");
  open.room.streamer->close(open.job->number, *open.room.compute);
  open.job->ended = true;
}

void job_abort(std::int64_t job) {
  const auto object = HandleRegistry::global().get<Job>(job, "job");
  if (object->engine()->closed()) return;  // closing aborts every job
  EngineUse use(object->engine());
  DeviceRoom& room = use->room_at(object->device);
  std::lock_guard lock(object->mutex);
  object->ended = true;
  room.streamer->abort(object->number, *room.compute);
}

bool job_wait_gradients(std::int64_t job, std::int64_t timeout_ms) {
  const auto object = HandleRegistry::global().get<Job>(job, "job");
  return object->downloads->wait(require_timeout(timeout_ms));
}

void job_forget(std::int64_t job) {
  const auto object = HandleRegistry::global().get<Job>(job, "job");
  {
    std::lock_guard lock(object->mutex);
    if (!object->ended) refuse("job", "a job that was closed or aborted", "an open one; close or abort it first");
  }
  HandleRegistry::global().take<Job>(job, "job");
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, job_open);
  ROUNDPIPE_OP(library, job_wait_unit);
  ROUNDPIPE_OP(library, job_weights_done);
  ROUNDPIPE_OP(library, job_gradients_done);
  ROUNDPIPE_OP(library, job_close);
  ROUNDPIPE_OP(library, job_abort);
  ROUNDPIPE_OP(library, job_wait_gradients);
  ROUNDPIPE_OP(library, job_forget);
}
