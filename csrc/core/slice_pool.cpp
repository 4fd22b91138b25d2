#include "core/slice_pool.h"

#include <pthread.h>

#include <algorithm>
#include <string>

#include "core/errors.h"
#include "core/happens_before.h"

namespace roundpipe {
namespace {

// Several slices a thread, so that one thread that is held up does not hold up the whole loop.
constexpr std::size_t kSlicesPerThread = 4;

}  // namespace

SlicePool::SlicePool(std::size_t threads, HappensBefore* checker, const char* name) : checker_(checker), name_(name) {
  RP_REQUIRE(threads != 0, "SlicePool: threads is 0, expected at least 1");
  try {
    for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work_loop(i); });
  } catch (const std::system_error&) {
    // Fewer threads than asked for are slower, not wrong.
  }
}

SlicePool::~SlicePool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  call_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  if (checker_ != nullptr) checker_->forget_token(this);
}

void SlicePool::run_slices(Work& work) {
  for (;;) {
    const std::size_t begin = work.next.fetch_add(work.slice, std::memory_order_relaxed);
    if (begin >= work.elements) return;
    try {
      (*work.body)(begin, std::min(work.elements, begin + work.slice));
    } catch (...) {
      work.next.store(work.elements, std::memory_order_relaxed);
      std::lock_guard lock(work.failed);
      if (!work.failure) work.failure = std::current_exception();
    }
  }
}

void SlicePool::run(std::size_t elements, std::size_t grain, const Body& body) {
  if (elements == 0) return;
  grain = std::max<std::size_t>(grain, 1);
  const std::size_t wanted = (elements - 1) / (threads() * kSlicesPerThread) + 1;
  const std::size_t slice = (std::max(wanted, grain) - 1) / grain * grain + grain;
  Work work{&body, elements, slice, {}, {}, {}};
  if (slice >= elements || workers_.empty()) {
    run_slices(work);
  } else {
    if (checker_ != nullptr) checker_->release(this, checker_->this_thread());
    {
      std::lock_guard lock(mutex_);
      work_ = &work;
      ++generation_;
    }
    call_.notify_all();
    run_slices(work);
    {
      std::unique_lock lock(mutex_);
      work_ = nullptr;  // who has not come yet is not needed any more
      left_.wait(lock, [this] { return active_ == 0; });
    }
    if (checker_ != nullptr) checker_->acquire(this, checker_->this_thread());
  }
  if (work.failure) std::rethrow_exception(work.failure);
}

void SlicePool::work_loop(std::size_t index) {
  pthread_setname_np(pthread_self(), (std::string(name_) + "-" + std::to_string(index)).substr(0, 15).c_str());
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    call_.wait(lock, [&] { return stop_ || (work_ != nullptr && generation_ != seen); });
    if (stop_) return;
    seen = generation_;
    Work& work = *work_;
    ++active_;
    lock.unlock();
    // What the body declares on this thread comes after what run()'s caller did, and before what it does next.
    if (checker_ != nullptr) checker_->acquire(this, checker_->this_thread());
    run_slices(work);
    if (checker_ != nullptr) checker_->release(this, checker_->this_thread());
    lock.lock();
    if (--active_ == 0) left_.notify_all();
  }
}

}  // namespace roundpipe
