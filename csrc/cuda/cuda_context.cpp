#include "cuda/cuda_context.h"

namespace roundpipe::cuda {

// The reference to the primary context is never given back: the framework holds its own for the whole process, and a
// release at exit could be the last one and destroy the context beneath objects that are destroyed later.
Context::Context(int ordinal) : name_("cuda:" + std::to_string(ordinal)) {
  const DriverApi& driver = driver_api();
  DeviceOrdinal device = 0;
  check("cuDeviceGet", driver.device_get(&device, ordinal),
        name_ + " was asked for, " + std::to_string(driver_device_count()) + " GPUs are visible");
  check("cuDevicePrimaryCtxRetain", driver.primary_context_retain(&handle_, device), name_);
}

Context::~Context() {
  if (idle_events_.empty()) return;
  release_quietly(*this, [&] {
    for (EventHandle event : idle_events_) driver_api().event_destroy(event);
  });
}

EventHandle Context::take_event() {
  {
    std::lock_guard lock(mutex_);
    if (!idle_events_.empty()) {
      EventHandle event = idle_events_.back();
      idle_events_.pop_back();
      return event;
    }
  }
  const ScopedContext scope(*this);
  EventHandle event = nullptr;
  // Timing would cost time at each record; blocking makes a synchronising thread sleep instead of spinning on a core
  // that the optimizer needs.
  check("cuEventCreate", driver_api().event_create(&event, kEventDisableTiming | kEventBlockingSync), name_);
  return event;
}

void Context::give_back_event(EventHandle event) noexcept {
  try {
    std::lock_guard lock(mutex_);
    idle_events_.push_back(event);
  } catch (...) {
    release_quietly(*this, [&] { driver_api().event_destroy(event); });
  }
}

ScopedContext::ScopedContext(const Context& context) {
  const DriverApi& driver = driver_api();
  check("cuCtxGetCurrent", driver.context_get_current(&previous_), context.name());
  if (previous_ == context.handle()) return;
  check("cuCtxSetCurrent", driver.context_set_current(context.handle()), context.name());
  changed_ = true;
}

ScopedContext::~ScopedContext() {
  if (changed_) driver_api().context_set_current(previous_);
}

}  // namespace roundpipe::cuda
