#include "core/event_pool.h"

#include <utility>

namespace roundpipe {

std::shared_ptr<EventPool> EventPool::make(Device& device, std::size_t keep) {
  return std::shared_ptr<EventPool>(new EventPool(device, keep));
}

EventPool::EventPool(Device& device, std::size_t keep) : device_(device), keep_(keep) {
  free_.reserve(keep);  // so that giving back cannot throw
}

std::shared_ptr<Event> EventPool::take() {
  std::unique_ptr<Event> event;
  {
    std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!event) event = device_.make_event();  // outside the lock: a driver call
  return {event.release(), [pool = shared_from_this()](Event* used) { pool->give_back(std::unique_ptr<Event>(used)); }};
}

void EventPool::give_back(std::unique_ptr<Event> event) noexcept {
  std::lock_guard lock(mutex_);
  if (free_.size() < keep_) free_.push_back(std::move(event));
}

}  // namespace roundpipe
