// One GPU's primary context: the one that the framework uses too, so that memory, streams and events are common.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver_api.h"

namespace roundpipe::cuda {

// Held by everything that lives in the context, so that streams and events may outlive their backend.
class Context {
 public:
  explicit Context(int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  ContextHandle handle() const noexcept { return handle_; }
  const std::string& name() const noexcept { return name_; }  // "cuda:0"

  // Creating and destroying an event costs more than recording it, so idle ones are kept. An event may come back while
  // work before its last record is pending: whoever waits for that record has captured it already.
  EventHandle take_event();
  void give_back_event(EventHandle event) noexcept;

 private:
  const std::string name_;
  ContextHandle handle_ = nullptr;
  std::mutex mutex_;  // guards idle_events_; never held during a driver call
  std::vector<EventHandle> idle_events_;
};

// Makes a context current for one scope. The framework takes the thread's current context for the current device, so a
// call made here on behalf of another GPU must not leave that GPU current behind it.
class ScopedContext {
 public:
  explicit ScopedContext(const Context& context);
  ~ScopedContext();
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

 private:
  ContextHandle previous_ = nullptr;
  bool changed_ = false;
};

// For destructors: runs `release` with the context current, and does nothing when the driver is shut down, the context
// is lost or the process is a forked child. There is nobody left to tell, and the driver frees what it owned.
template <class Release>
void release_quietly(const Context& context, Release&& release) noexcept {
  try {
    const ScopedContext scope(context);
    release();
  } catch (...) {
  }
}

}  // namespace roundpipe::cuda
