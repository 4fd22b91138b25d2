// How units and jobs leave a StageStreamer: places given back, gradients handed to their download, jobs ended.
#include <algorithm>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/saturating_deadline.h"
#include "core/stage_streamer.h"
#include "core/streamed_job.h"

namespace roundpipe {

void StageStreamer::weights_done(std::uint64_t job_id, std::size_t index, Stream& compute) {
  State& state = *state_;
  const auto job = state.find_job(job_id, index, "weights_done");
  StreamedUnit& unit = job->units[index];
  bool discard = false;
  {
    std::lock_guard lock(state.mutex);
    if (std::exchange(unit.weights_given_back, true)) return;
    discard = unit.waited;
    state.declare_use(*job, unit, Access::kRead, compute);
  }
  std::shared_ptr<Event> last_use;
  try {
    last_use = state.record(compute);
  } catch (...) {  // the place stays taken until close or abort, which deal with a broken device
    std::lock_guard lock(state.mutex);
    unit.weights_given_back = false;
    throw;
  }
  state.give_back(*job, *unit.weights.tenancy, std::move(last_use), discard);
  state.poke();
}

void StageStreamer::gradients_done(std::uint64_t job_id, std::size_t index, Stream& compute,
                                   GradientsFinished finished) {
  State& state = *state_;
  const auto job = state.find_job(job_id, index, "gradients_done");
  StreamedUnit& unit = job->units[index];
  const std::string what = "gradients_done: unit " + std::to_string(index) + " of job " + std::to_string(job_id);
  RP_REQUIRE(unit.use.gradients, what + " has no gradients in this job");
  {
    std::lock_guard lock(state.mutex);
    state.refuse_dead(*job, unit);
    RP_REQUIRE(unit.waited, what + " was never waited for, so compute may not have written to its place");
    RP_REQUIRE(!std::exchange(unit.gradients_given_back, true), what + " was handed over before");
    ++state.pending;
    state.declare_use(*job, unit, Access::kWrite, compute);
  }
  std::shared_ptr<Event> computed;
  try {
    computed = state.record(compute);
    state.engine.submit(state.gradients_download(job, index, computed, std::move(finished)));
  } catch (...) {
    unit.use.unit->clock.poison(unit.write);
    state.give_back(*job, *unit.gradients.tenancy, std::move(computed), false);
    state.transfer_ended();
    throw;
  }
}

void StageStreamer::State::end_job(std::uint64_t job_id, Stream& compute, bool abort) {
  std::shared_ptr<StreamedJob> job;
  std::vector<StreamedUnit*> weights, gradients;  // whose release falls to us
  {
    std::lock_guard lock(mutex);
    const auto it = jobs.find(job_id);
    RP_REQUIRE(it != jobs.end() || (job_id != 0 && job_id < next_job), std::string(abort ? "abort" : "close") +
                                                                           ": job " + std::to_string(job_id) +
                                                                           " was never enqueued on " + device.name());
    if (it == jobs.end()) return;
    job = it->second;
    jobs.erase(it);
    job->aborted = abort;
    if (abort) last_aborted = std::max(last_aborted, job_id);
    for (StreamedUnit& unit : job->units) {
      if (!std::exchange(unit.weights_given_back, true)) {
        weights.push_back(&unit);
        declare_use(*job, unit, Access::kRead, compute);
      }
      if (unit.use.gradients && !std::exchange(unit.gradients_given_back, true)) {
        gradients.push_back(&unit);
        declare_use(*job, unit, Access::kWrite, compute);
      }
    }
  }
  std::exception_ptr failure;
  std::shared_ptr<Event> last_use;
  try {
    if (!weights.empty() || !gradients.empty()) last_use = record(compute);
  } catch (...) {  // a broken device: nothing that still runs there matters, but tickets and places must not stay open
    failure = std::current_exception();
  }
  // What compute was never ordered after may still be written by an upload under way, so it is not discarded; a later
  // upload of the same place comes after it by the order of their stream.
  for (StreamedUnit* unit : weights) give_back(*job, *unit->weights.tenancy, last_use, unit->waited);
  for (StreamedUnit* unit : gradients) {
    unit->use.unit->clock.poison(unit->write);
    give_back(*job, *unit->gradients.tenancy, last_use, unit->waited);
  }
  idle.notify_all();
  poke();
  if (failure && !abort) std::rethrow_exception(failure);
}

void StageStreamer::close(std::uint64_t job, Stream& compute) { state_->end_job(job, compute, false); }

void StageStreamer::abort(std::uint64_t job, Stream& compute) { state_->end_job(job, compute, true); }

std::size_t StageStreamer::open_jobs() const {
  std::lock_guard lock(state_->mutex);
  return state_->jobs.size();
}

bool StageStreamer::wait_idle(std::chrono::milliseconds timeout) {
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  return state.idle.wait_until(lock, saturating_deadline(timeout),
                               [&] { return state.jobs.empty() && state.pending == 0; });
}

}  // namespace roundpipe
