// A backend that passes every call on to another one, counts calls by kind, and makes the n-th of one kind throw, as a
// driver would.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/backend.h"
#include "core/errors.h"

namespace roundpipe {

enum class DriverCall : std::uint8_t {
  kRegister,
  kAttachThread,
  kMakeStream,
  kWrapStream,
  kMakeEvent,
  kRecord,
  kWait,
  kQuery,
  kSynchronize,
  kCopy,
  kZero,
  kDiscard,
  kLease,
};
inline constexpr std::array kDriverCalls = {"register_host",
                                            "attach_thread",
                                            "make_copy_stream",
                                            "wrap_compute_stream",
                                            "make_event",
                                            "record",
                                            "wait",
                                            "query",
                                            "synchronize",
                                            "copy",
                                            "zero",
                                            "discard",
                                            "lease"};

class FailingBackend final : public Backend {
 public:
  explicit FailingBackend(std::shared_ptr<Backend> inner) : inner_(std::move(inner)), device_(*this) {}

  void fail(DriverCall kind, std::int64_t nth) {
    std::lock_guard lock(mutex_);
    kind_ = kind;
    left_ = nth;
  }
  // Whether the call that was to fail has been made; nothing fails any more.
  bool disarm() {
    std::lock_guard lock(mutex_);
    const bool reached = left_ < 0;
    left_ = kNever;
    return reached;
  }
  std::size_t held() const {  // registrations and leases
    std::lock_guard lock(mutex_);
    return held_.size();
  }

  std::size_t device_count() const override { return 1; }
  Device& device(std::size_t) override { return device_; }
  void register_host(void* base, std::size_t bytes) override {
    step(DriverCall::kRegister);
    inner_->register_host(base, bytes);
    hold(base);
  }
  void unregister_host(void* base) noexcept override {
    inner_->unregister_host(base);
    release(base);
  }
  bool page_locked(const void* address) override { return inner_->page_locked(address); }
  HappensBefore* checker() noexcept override { return inner_->checker(); }

 private:
  static constexpr std::int64_t kNever = std::int64_t{1} << 40;

  class FailingDevice final : public Device {
   public:
    explicit FailingDevice(FailingBackend& owner) : owner_(owner) {}
    std::string name() const override { return inner().name(); }
    void attach_thread() override {
      owner_.step(DriverCall::kAttachThread);
      inner().attach_thread();
    }
    std::unique_ptr<Stream> make_copy_stream(const char* label) override {
      owner_.step(DriverCall::kMakeStream);
      return inner().make_copy_stream(label);
    }
    std::unique_ptr<Stream> wrap_compute_stream(std::uintptr_t native) override {
      owner_.step(DriverCall::kWrapStream);
      return inner().wrap_compute_stream(native);
    }
    std::unique_ptr<Event> make_event() override {
      owner_.step(DriverCall::kMakeEvent);
      return inner().make_event();
    }
    void record(Event& event, Stream& stream) override {
      owner_.step(DriverCall::kRecord);
      inner().record(event, stream);
    }
    void wait(Stream& stream, const Event& event) override {
      owner_.step(DriverCall::kWait);
      inner().wait(stream, event);
    }
    bool query(const Event& event) override {
      owner_.step(DriverCall::kQuery);
      return inner().query(event);
    }
    void synchronize(const Event& event) override {
      inner().synchronize(event);  // even when it then fails: nothing may be touched later
      owner_.step(DriverCall::kSynchronize);
    }
    void copy(Stream& stream, Direction direction, void* dst, const void* src, std::size_t bytes) override {
      owner_.step(DriverCall::kCopy);
      inner().copy(stream, direction, dst, src, bytes);
    }
    void zero(Stream& stream, void* dst, std::size_t bytes) override {
      owner_.step(DriverCall::kZero);
      inner().zero(stream, dst, bytes);
    }
    void discard(Stream& stream, void* range, std::size_t bytes) override {
      owner_.step(DriverCall::kDiscard);
      inner().discard(stream, range, bytes);
    }
    void lease(void* base, std::size_t bytes) override {
      owner_.step(DriverCall::kLease);
      inner().lease(base, bytes);
      owner_.hold(base);
    }
    void end_lease(void* base) noexcept override {
      inner().end_lease(base);
      owner_.release(base);
    }
    std::size_t memory_limit_bytes() const override { return inner().memory_limit_bytes(); }
    bool compute_is_calling_thread() const noexcept override { return inner().compute_is_calling_thread(); }
    void declare(Stream& stream, Access access, const void* range, std::size_t bytes, const char* what) override {
      inner().declare(stream, access, range, bytes, what);
    }

   private:
    Device& inner() const { return owner_.inner_->device(0); }
    FailingBackend& owner_;
  };

  void step(DriverCall kind) {
    std::lock_guard lock(mutex_);
    if (kind != kind_ || left_ == kNever) return;
    if (left_-- == 0) {
      throw DriverError(std::string("injected failure of ") + kDriverCalls[static_cast<std::size_t>(kind)], 999);
    }
  }
  void hold(void* base) {
    std::lock_guard lock(mutex_);
    held_.insert(base);
  }
  void release(void* base) noexcept {
    std::lock_guard lock(mutex_);
    held_.erase(base);
  }

  const std::shared_ptr<Backend> inner_;
  FailingDevice device_;
  mutable std::mutex mutex_;  // guards everything below
  DriverCall kind_ = DriverCall::kRegister;
  std::int64_t left_ = kNever;
  std::set<void*> held_;
};

}  // namespace roundpipe
