// The streams and events of simulated devices.
//
// Note [Lifetime of streams and events]
//   Events, streams and the backend may be destroyed in any order and with work pending. What they share is held by
//   shared pointers: the HostRuntime by everyone, an EventRecord by its event, by the operation that completes it and
//   by every operation that waits for it. A copy stream finishes its queue before it is gone, so no record stays
//   incomplete.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>

#include "core/backend.h"
#include "core/happens_before.h"
#include "core/host_backend.h"

namespace roundpipe {

// What all devices, streams and events of one HostBackend have in common.
class HostRuntime {
 public:
  struct Delays {
    std::uint64_t seed;
    std::uint32_t max_us;
    std::uint64_t generation;  // grows at each set_delays; streams then start their sequence anew
  };

  explicit HostRuntime(const HostBackendOptions& options);

  HappensBefore* checker() const noexcept { return checker_.get(); }
  Delays delays() const;
  void set_delays(std::uint64_t seed, std::uint32_t max_us);
  void fail_copy_after(std::int64_t copies);
  bool count_copy();  // true: this one is to fail
  std::uint64_t next_stream_number();

 private:
  const std::unique_ptr<HappensBefore> checker_;
  mutable std::mutex mutex_;  // guards everything below, set by tests while streams run
  Delays delays_;
  std::int64_t copies_ = 0;
  std::int64_t failing_copy_;  // the value of copies_ at which one fails; negative: none
  std::uint64_t streams_ = 0;
};

// DriverError::code of an injected failure: CUDA_ERROR_UNKNOWN, as a broken device would give.
inline constexpr int kInjectedFailure = 999;

// A failed operation of a stream. Every later record of the stream carries it until one of them has reported it.
struct StreamFailure {
  std::string message;
  std::atomic<bool> reported{false};  // exactly one synchronize or query throws
};

// One recording of an event. The checker's token for it is its address.
class EventRecord {
 public:
  explicit EventRecord(std::shared_ptr<HostRuntime> runtime) : runtime_(std::move(runtime)) {}
  ~EventRecord();
  EventRecord(const EventRecord&) = delete;
  EventRecord& operator=(const EventRecord&) = delete;

  void complete(HappensBefore::Actor by, std::shared_ptr<StreamFailure> failure);
  bool completed() const;
  void wait() const;
  void acquire(HappensBefore::Actor into) const;  // after completion
  void throw_failure_once() const;                // after completion
  const HostRuntime* runtime() const noexcept { return runtime_.get(); }

 private:
  const std::shared_ptr<HostRuntime> runtime_;
  mutable std::mutex mutex_;  // guards completed_ and failure_, and makes what came before visible to whoever waits
  mutable std::condition_variable completed_changed_;
  bool completed_ = false;
  std::shared_ptr<StreamFailure> failure_;
};

class HostEvent : public Event {
 public:
  void set(std::shared_ptr<EventRecord> record);
  std::shared_ptr<EventRecord> current() const;  // null: never recorded

 private:
  mutable std::mutex mutex_;  // an event may be recorded by one thread while another looks at its previous recording
  std::shared_ptr<EventRecord> record_;
};

class HostStream : public Stream {
 public:
  HostStream(std::shared_ptr<HostRuntime> runtime, HappensBefore::Actor actor);

  // Runs `operation` in stream order, after what the calling thread has done so far.
  virtual void run(std::function<void()> operation) = 0;

  HappensBefore::Actor actor() const noexcept { return actor_; }
  const HostRuntime* runtime() const noexcept { return runtime_.get(); }

  // For operations, while they run:
  void declare(Access access, const void* range, std::size_t bytes, const char* what);
  void fail(std::string message);
  std::shared_ptr<StreamFailure> failure() const;  // null: none, or reported already

 protected:
  void delay();
  const std::shared_ptr<HostRuntime> runtime_;

 private:
  const HappensBefore::Actor actor_;
  const std::uint64_t number_;
  mutable std::mutex mutex_;  // guards everything below: several threads may call on one compute stream
  std::mt19937_64 random_;
  std::uint64_t delay_generation_ = 0;
  std::shared_ptr<StreamFailure> failure_;
};

// `name` ("host:0/weights") appears in the checker's reports.
std::unique_ptr<HostStream> make_host_copy_stream(std::shared_ptr<HostRuntime> runtime, std::string name);
// Operations run on the calling thread, as `actor`.
std::unique_ptr<HostStream> make_host_compute_stream(std::shared_ptr<HostRuntime> runtime, HappensBefore::Actor actor);

}  // namespace roundpipe
