#include "ops/job.h"

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

}  // namespace roundpipe::ops
