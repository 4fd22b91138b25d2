// job_*: stages streamed to a device.
#include <set>
#include <string>
#include <utility>

#include "core/errors.h"
#include "ops/checks.h"
#include "ops/guard.h"
#include "ops/job.h"
#include "ops/pool.h"
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
                      std::vector<Tensor> loads, std::vector<Tensor> stores, std::vector<std::int64_t> pooled,
                      std::int64_t pool_handle) {
  EngineUse use(engine, "engine");
  DeviceRoom& room = use->room(device);
  std::shared_ptr<GradientPool> pool;
  if (pool_handle != 0) {
    const auto found = HandleRegistry::global().get<Pool>(pool_handle, "pool");
    found->require_engine(use.share(), "pool");
    pool = found->body;
  }
  std::vector<bool> in_pool(units.size());
  for (std::size_t i = 0; i < pooled.size(); ++i) {
    if (pool == nullptr) refuse("pool", "a pool for the units of 'pooled'", "0");
    in_pool[require_index(at("pooled", i).c_str(), pooled[i], units.size())] = true;
  }
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
    if (in_pool[i]) {
      if (next.gradient_store != nullptr) {
        refuse(at("stores", i), "an empty tensor for a unit of 'pooled'", describe(stores[i]));
      }
      if (unit->unit().gradient_bytes == 0) refuse(at("pooled", i), "a unit with gradients", "a frozen one");
      next.gradient_pool = pool;
    }
    next.gradients = next.gradient_store != nullptr || in_pool[i];
    if (next.gradient_load != nullptr && !next.gradients) {
      refuse(at("loads", i), "an empty tensor where the store is empty", describe(loads[i]));
    }
    auto held = std::make_shared<HeldUse>();
    held->body = unit->body;
    if (next.gradient_load != nullptr) held->images.push_back(detached(loads[i]));
    if (next.gradient_store != nullptr) {
      held->images.push_back(detached(stores[i]));
      written.push_back(held->images.back());
    }
    next.unit = std::shared_ptr<WeightUnit>(held, &held->body->unit);
    job->gradients.push_back(next.gradients);
    job->pooled.push_back(in_pool[i]);
    job->image_bytes.push_back(unit->unit().gradient_bytes);
    uses.push_back(std::move(next));
  }
  job->device = static_cast<std::size_t>(device);
  job->downloads = std::make_shared<Downloads>(std::move(written));
  job->number = room.streamer->enqueue(std::move(uses));
  return HandleRegistry::global().add(std::move(job));
}

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
  const std::size_t unit = open.gradient_unit(index);
  if (open.job->pooled[unit]) {
    refuse("index", "a unit with an image; job_gradients_update takes one whose gradients go to a pool",
           "unit " + std::to_string(index));
  }
  open.hand_over(unit, {});
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
