#include "core/trace.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <mutex>

#include "core/errors.h"

namespace roundpipe {
namespace {

struct Ring {
  std::mutex mutex;  // guards everything below; taken only while tracing is on
  std::vector<Span> spans;
  std::size_t capacity = 0;  // 0: stopped
  std::size_t oldest = 0;    // once full: where the next span goes
  std::vector<TrackName> tracks;
};

// Leaked on purpose: threads of the engine may still add spans while statics are destroyed.
Ring& ring() {
  static Ring& ring = *new Ring;
  return ring;
}

constexpr std::uint32_t kNoTrack = ~std::uint32_t{0};

// A number a thread, in order of first use: small, stable, and readable in a timeline. The ring's mutex is held.
std::uint32_t track_of_this_thread(Ring& ring) {
  thread_local std::uint32_t track = kNoTrack;
  if (track == kNoTrack) {
    std::array<char, 64> name{};
    pthread_getname_np(pthread_self(), name.data(), name.size());
    ring.tracks.push_back({static_cast<std::uint32_t>(ring.tracks.size()), gettid(), name.data()});
    track = ring.tracks.back().track;
  }
  return track;
}

}  // namespace

Trace& Trace::global() {
  static Trace& trace = *new Trace;  // leaked as the ring is
  return trace;
}

std::uint64_t Trace::now_ns() noexcept {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
          .count());
}

void Trace::start(std::size_t capacity) {
  RP_REQUIRE(capacity != 0, "Trace::start: capacity is 0, expected the number of spans to keep");
  Ring& to = ring();
  std::lock_guard lock(to.mutex);
  to.spans.clear();
  to.spans.reserve(std::min(capacity, std::size_t{1} << 16));  // a huge capacity costs memory only as it fills
  to.capacity = capacity;
  to.oldest = 0;
  on_.store(true, std::memory_order_relaxed);
}

std::vector<Span> Trace::stop() {
  Ring& from = ring();
  std::lock_guard lock(from.mutex);
  on_.store(false, std::memory_order_relaxed);
  std::rotate(from.spans.begin(), from.spans.begin() + static_cast<std::ptrdiff_t>(from.oldest), from.spans.end());
  from.capacity = 0;
  from.oldest = 0;
  std::vector<Span> spans;
  spans.swap(from.spans);
  return spans;
}

std::vector<TrackName> Trace::tracks() {
  std::lock_guard lock(ring().mutex);
  return ring().tracks;
}

void Trace::add(SpanKind kind, const char* name, std::uint64_t begin_ns, std::uint64_t end_ns, std::uint64_t argument) {
  Ring& to = ring();
  std::lock_guard lock(to.mutex);
  // A span that began before stop() may end after it, or even after the next start(); only the latter is kept.
  if (to.capacity == 0) return;
  const Span span{kind, name, track_of_this_thread(to), begin_ns, end_ns, argument};
  if (to.spans.size() < to.capacity) {
    to.spans.push_back(span);
  } else {
    to.spans[to.oldest] = span;
    to.oldest = (to.oldest + 1) % to.capacity;
  }
}

}  // namespace roundpipe
