// A device that passes every call on to another one. It counts what is in flight, logs copies in the order of their
// issue, and can make any single call throw, as a broken driver would.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/errors.h"

namespace roundpipe {

class ProbeDevice final : public Device {
 public:
  struct CopyCall {
    const Stream* stream;
    const void* dst;
    std::size_t bytes;
  };

  explicit ProbeDevice(Device& inner) : inner_(inner) {}

  void fail_after(std::int64_t calls) { fail_in_.store(calls); }  // negative: never
  std::int64_t left_until_failure() const { return fail_in_.load(); }

  std::vector<CopyCall> copies() const {
    std::lock_guard lock(mutex_);
    return copies_;
  }
  // The most events of one stream that were recorded and not yet seen complete by `synchronize`.
  std::size_t most_in_flight() const {
    std::lock_guard lock(mutex_);
    return most_in_flight_;
  }

  std::string name() const override { return inner_.name(); }
  void attach_thread() override { inner_.attach_thread(); }
  std::unique_ptr<Stream> make_copy_stream(const char* label) override { return inner_.make_copy_stream(label); }
  std::unique_ptr<Stream> wrap_compute_stream(std::uintptr_t native) override {
    return inner_.wrap_compute_stream(native);
  }
  std::unique_ptr<Event> make_event() override {
    step("make_event");
    return inner_.make_event();
  }
  void record(Event& event, Stream& stream) override {
    step("record");
    inner_.record(event, stream);
    std::lock_guard lock(mutex_);
    recorded_on_[&event] = &stream;
    most_in_flight_ = std::max(most_in_flight_, ++in_flight_[&stream]);
  }
  void wait(Stream& stream, const Event& event) override {
    step("wait");
    inner_.wait(stream, event);
  }
  bool query(const Event& event) override { return inner_.query(event); }
  void synchronize(const Event& event) override {
    inner_.synchronize(event);  // even when it then fails: nothing may be touched later
    {
      std::lock_guard lock(mutex_);
      --in_flight_[recorded_on_.at(&event)];
    }
    step("synchronize");
  }
  void copy(Stream& stream, Direction direction, void* dst, const void* src, std::size_t bytes) override {
    step("copy");
    {
      std::lock_guard lock(mutex_);
      copies_.push_back({&stream, dst, bytes});
    }
    inner_.copy(stream, direction, dst, src, bytes);
  }
  void zero(Stream& stream, void* dst, std::size_t bytes) override {
    step("zero");
    inner_.zero(stream, dst, bytes);
  }
  void discard(Stream& stream, void* range, std::size_t bytes) override { inner_.discard(stream, range, bytes); }
  void lease(void* base, std::size_t bytes) override { inner_.lease(base, bytes); }
  void end_lease(void* base) noexcept override { inner_.end_lease(base); }
  std::size_t memory_limit_bytes() const override { return inner_.memory_limit_bytes(); }
  bool compute_is_calling_thread() const noexcept override { return inner_.compute_is_calling_thread(); }
  void declare(Stream& stream, Access access, const void* range, std::size_t bytes, const char* what) override {
    inner_.declare(stream, access, range, bytes, what);
  }

 private:
  void step(const char* call) {
    if (fail_in_.fetch_sub(1) == 0) throw DriverError(std::string("injected failure of ") + call, 999);
  }

  Device& inner_;
  std::atomic<std::int64_t> fail_in_{-1};
  mutable std::mutex mutex_;  // guards everything below
  std::vector<CopyCall> copies_;
  std::map<const Event*, const Stream*> recorded_on_;
  std::map<const Stream*, std::size_t> in_flight_;
  std::size_t most_in_flight_ = 0;
};

}  // namespace roundpipe
