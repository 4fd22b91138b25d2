#include "core/read_ahead.h"

#include <pthread.h>

#include <algorithm>
#include <system_error>

#include "core/memory_advice.h"
#include "core/memory_limits.h"

namespace roundpipe {
namespace {

constexpr std::size_t kStep = std::size_t{4} << 20;  // told at a time, after which a stop is seen
constexpr std::size_t kMostAhead = std::size_t{1} << 30;
constexpr std::size_t kLeastAhead = std::size_t{32} << 20;

}  // namespace

ReadAhead::~ReadAhead() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wakes_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void ReadAhead::add(const void* base, std::size_t bytes) {
  {
    std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      try {
        thread_ = std::thread([this] { tell_loop(); });
      } catch (const std::system_error&) {
        return;  // without advice reading is slower, not wrong
      }
      pthread_setname_np(thread_.native_handle(), "rp-readahead");
    }
    const auto* at = static_cast<const char*>(base);
    for (std::size_t done = 0; done < bytes; done += kStep) {
      queue_.push_back({at + done, std::min(kStep, bytes - done)});
    }
    queued_bytes_ += bytes;
    while (queued_bytes_ > most_bytes_ && queue_.size() > 1) {
      queued_bytes_ -= queue_.front().bytes;
      queue_.pop_front();
    }
  }
  wakes_.notify_one();
}

void ReadAhead::tell_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wakes_.wait(lock, [&] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const Range next = queue_.front();
    queue_.pop_front();
    queued_bytes_ -= next.bytes;
    lock.unlock();
    advise_read_ahead(next.base, next.bytes);
    lock.lock();
  }
}

std::size_t read_ahead_bytes() {
  const MemoryLimits limits = read_memory_limits();
  std::size_t room = limits.total_bytes == 0 ? kMostAhead * 8 : limits.total_bytes;
  if (limits.cgroup_limit_bytes != 0) room = std::min(room, limits.cgroup_limit_bytes);
  return std::clamp(room / 8, kLeastAhead, kMostAhead);
}

}  // namespace roundpipe
