// A ring of timed spans (job, copy, wait, update). Costs one relaxed load when off.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace roundpipe {

enum class SpanKind : std::uint8_t { kJob, kCopy, kWait, kUpdate };

struct Span {
  SpanKind kind;
  const char* name;                // static storage
  std::uint32_t track;             // thread number in order of first use
  std::uint64_t begin_ns, end_ns;  // steady clock
  std::uint64_t argument;          // bytes, unit or job
};

struct TrackName {
  std::uint32_t track;
  int thread;        // as gettid() gives it
  std::string name;  // as the thread was called when it added its first span
};

class Trace {
 public:
  static Trace& global();
  void start(std::size_t capacity);  // drops what was recorded
  std::vector<Span> stop();          // oldest first; at most `capacity`, the newest kept
  std::vector<TrackName> tracks();   // of every thread that has ever added a span
  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  void add(SpanKind kind, const char* name, std::uint64_t begin_ns, std::uint64_t end_ns, std::uint64_t argument);
  static std::uint64_t now_ns() noexcept;

 private:
  std::atomic<bool> on_{false};
};

class ScopedSpan {
 public:
  ScopedSpan(SpanKind kind, const char* name, std::uint64_t argument = 0) noexcept
      : kind_(kind), name_(name), argument_(argument), begin_(Trace::global().on() ? Trace::now_ns() : 0) {}
  ~ScopedSpan() {
    if (begin_ != 0) Trace::global().add(kind_, name_, begin_, Trace::now_ns(), argument_);
  }
  ScopedSpan(const ScopedSpan&) = delete;
  ScopedSpan& operator=(const ScopedSpan&) = delete;

 private:
  SpanKind kind_;
  const char* name_;
  std::uint64_t argument_;
  std::uint64_t begin_;
};

}  // namespace roundpipe
