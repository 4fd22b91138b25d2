// Events of one device, reused: making one costs a driver call, and every chunk of every copy needs one.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/backend.h"

namespace roundpipe {

class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  // At most `keep` free events are kept; 0 makes every event a fresh one. `device` outlives every event.
  static std::shared_ptr<EventPool> make(Device& device, std::size_t keep);

  // Goes back to the pool when the last owner drops it. Streams told to wait for an earlier recording still do: a wait
  // refers to what was recorded when it was enqueued.
  std::shared_ptr<Event> take();

 private:
  EventPool(Device& device, std::size_t keep);
  void give_back(std::unique_ptr<Event> event) noexcept;

  Device& device_;
  const std::size_t keep_;
  std::mutex mutex_;  // guards free_; any thread takes and gives back
  std::vector<std::unique_ptr<Event>> free_;
};

}  // namespace roundpipe
