#include "ops/job.h"

#include <string>
#include <utility>

#include "ops/checks.h"

namespace roundpipe::ops {

void Downloads::hand_over() {
  std::lock_guard lock(mutex_);
  ++handed_;
}

void Downloads::take_back() {
  std::lock_guard lock(mutex_);
  --handed_;
  finished_all_.notify_all();
}

void Downloads::finish(const std::exception_ptr& failure) {
  std::lock_guard lock(mutex_);
  ++finished_;
  if (failure && !failure_) failure_ = failure;
  finished_all_.notify_all();
}

bool Downloads::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  if (!finished_all_.wait_for(lock, timeout, [&] { return finished_ == handed_; })) return false;
  if (failure_) std::rethrow_exception(failure_);
  return true;
}

OpenJob::OpenJob(std::int64_t handle)
    : job(HandleRegistry::global().get<Job>(handle, "job")), use(job->engine()), room(use->room_at(job->device)) {
  std::lock_guard lock(job->mutex);
  if (job->ended) refuse("job", "an open job", "one that was closed or aborted");
}

std::size_t OpenJob::unit(std::int64_t index) const { return require_index("index", index, job->gradients.size()); }

std::size_t OpenJob::gradient_unit(std::int64_t index) const {
  const std::size_t found = unit(index);
  if (!job->gradients[found]) {
    refuse("index", "a unit that the job was opened with a gradient store for", "unit " + std::to_string(index));
  }
  return found;
}

void OpenJob::hand_over(std::size_t unit, GradientsFinished finished) {
  const std::shared_ptr<Downloads> downloads = job->downloads;
  downloads->hand_over();
  try {
    room.streamer->gradients_done(job->number, unit, *room.compute,
                                  [downloads, finished = std::move(finished)](const std::exception_ptr& failure,
                                                                              std::shared_ptr<std::byte> place) {
                                    if (finished) finished(failure, std::move(place));
                                    downloads->finish(failure);
                                  });
  } catch (...) {
    downloads->take_back();
    throw;
  }
}

}  // namespace roundpipe::ops
