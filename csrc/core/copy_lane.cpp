#include "core/copy_lane.h"

#include <pthread.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/errors.h"
#include "core/saturating_deadline.h"
#include "core/trace.h"

namespace roundpipe {
namespace {

void name_thread(std::thread& thread, const char* lane, const char* role, const std::string& device) {
  const std::string name = std::string("rp") + lane + role + " " + device;
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
}

}  // namespace

CopyLane::CopyLane(Device& device, std::shared_ptr<EventPool> events, TransferCounters& counters,
                   const LaneOptions& options)
    : device_(device),
      events_(std::move(events)),
      counters_(counters),
      options_(options),
      stream_(device.make_copy_stream(options.name)),
      // As many as chunks in flight: before one more is issued, the oldest has been seen complete.
      bounce_(options.arena == nullptr
                  ? nullptr
                  : std::make_unique<BounceBuffers>(options.arena, options.chunk_bytes, options.chunks_in_flight,
                                                    options.fill_threads, options.checker)) {
  issuer_ = std::thread([this] { issue_loop(); });
  try {
    reaper_ = std::thread([this] { reap_loop(); });
  } catch (...) {
    shutdown();
    throw;
  }
  name_thread(issuer_, options_.name, "i", device_.name());
  name_thread(reaper_, options_.name, "r", device_.name());
}

CopyLane::~CopyLane() { shutdown(); }

std::shared_ptr<Handover> CopyLane::submit(TransferRequest request, std::size_t block_while_over_bytes) {
  auto submitted = std::make_shared<LaneRequest>(device_, std::move(request), options_.checker);
  {
    std::unique_lock lock(mutex_);
    request_ended_.wait(
        lock, [&] { return stopping_ || block_while_over_bytes == 0 || unfinished_bytes_ <= block_while_over_bytes; });
    if (stopping_) {
      throw Error("transfer engine of " + device_.name() + ": submit after shutdown; open a new engine");
    }
    ++unfinished_requests_;
    unfinished_bytes_ += submitted->bytes();
    if (submitted->unadvised() != 0) {
      reads_files_ = true;
      ++generation_;  // the issuer shall look ahead at it although the head still waits
    }
    queue_.push_back(submitted);
  }
  issuer_wakes_.notify_one();
  return submitted;
}

void CopyLane::poke() {
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    ++generation_;
    wake = head_blocked_;
  }
  if (wake) issuer_wakes_.notify_one();
}

bool CopyLane::drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return request_ended_.wait_until(lock, saturating_deadline(timeout), [&] { return unfinished_requests_ == 0; });
}

void CopyLane::shutdown() noexcept {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  issuer_wakes_.notify_all();
  request_ended_.notify_all();
  std::lock_guard lock(join_mutex_);
  if (issuer_.joinable()) issuer_.join();
  if (reaper_.joinable()) reaper_.join();
}

// -- issuer

void CopyLane::issue_loop() {
  std::exception_ptr unusable;
  try {
    device_.attach_thread();
  } catch (...) {
    unusable = std::current_exception();
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    issuer_wakes_.wait(lock, [&] {
      return stopping_ || (!queue_.empty() && in_flight_.size() < options_.chunks_in_flight &&
                           !(head_blocked_ && generation_ == blocked_at_));
    });
    if (stopping_) break;
    const std::shared_ptr<LaneRequest> head = queue_.front();
    const std::uint64_t asked_at = generation_;
    // Set before the question: a poke that comes during it must wake the sleep that may follow.
    head_blocked_ = false;
    const bool reads_files = reads_files_;
    lock.unlock();
    if (reads_files) look_ahead();
    Progress progress = Progress::kEnded;
    if (unusable) {
      end_failed(head, unusable);
    } else {
      progress = advance(head);
    }
    lock.lock();
    if (progress == Progress::kEnded) queue_.pop_front();
    if (progress == Progress::kBlocked) {
      head_blocked_ = true;
      blocked_at_ = asked_at;
    }
  }
  while (!queue_.empty()) {
    const std::shared_ptr<LaneRequest> head = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    end_failed(head, std::make_exception_ptr(Poisoned("transfer engine of " + device_.name() +
                                                      " was shut down before this copy was complete")));
    lock.lock();
  }
  issuer_ended_ = true;
  lock.unlock();
  reaper_wakes_.notify_one();
}

// Also while the head waits for its place: then the disk has the most to win. Walks the requests in the order in which
// they will be copied, so nothing has to be taken back when one of them fails.
void CopyLane::look_ahead() {
  if (!read_ahead_) {
    read_ahead_bytes_ = read_ahead_bytes();
    read_ahead_ = std::make_unique<ReadAhead>(read_ahead_bytes_);
  }
  std::vector<std::shared_ptr<LaneRequest>> next;
  {
    std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& request : queue_) {
      if (bytes >= read_ahead_bytes_) break;
      bytes += request->bytes();
      if (request->unadvised() != 0) next.push_back(request);
    }
  }
  std::size_t ahead = 0;
  for (const auto& request : next) {
    if (ahead >= read_ahead_bytes_) break;
    ahead += request->advise(read_ahead_bytes_ - ahead, *read_ahead_);
  }
}

CopyLane::Progress CopyLane::advance(const std::shared_ptr<LaneRequest>& request) {
  try {
    if (!request->started()) {
      switch (request->ask_ready()) {
        case Readiness::kNotYet:
          return Progress::kBlocked;
        case Readiness::kPoisoned:
          throw Poisoned("a copy on " + device_.name() + " depends on something that has failed");
        case Readiness::kReady:
          break;
      }
      request->start(*stream_);
    }
    // An earlier chunk of this request has failed meanwhile, so the rest is of no use to anybody.
    if (request->failed()) {
      end_failed(request, nullptr);
      return Progress::kEnded;
    }
    Chunk chunk{nullptr, request, false, 0, 0};
    const bool last = issue_chunk(*request, &chunk);
    if (last) request->mark_issued(chunk.event);  // before the reaper can finish it
    push(std::move(chunk));
    return last ? Progress::kEnded : Progress::kMore;
  } catch (...) {
    end_failed(request, std::current_exception());
    return Progress::kEnded;
  }
}

bool CopyLane::issue_chunk(LaneRequest& request, Chunk* chunk) {
  const auto direction = static_cast<std::size_t>(request.direction());
  const auto traffic = static_cast<std::size_t>(request.traffic());
  if (Trace::global().on()) chunk->issued_ns = Trace::now_ns();
  chunk->event = events_->take();
  CopySegment piece{};
  if (bounce_) bounce_->begin_chunk();
  // Small tensors share a chunk; a piece that would not fit starts the next one.
  while (request.next_piece(options_.chunk_bytes - chunk->bytes, options_.chunk_bytes, &piece)) {
    const void* source = piece.src;
    if (piece.memory != HostMemory::kPinned) {
      if (!bounce_)
        throw Error("transfer on " + device_.name() + ": this lane has no bounce buffers for pageable memory");
      source = bounce_->fill(piece);
      chunk->bounced = true;
      counters_.bounced.fetch_add(piece.bytes, std::memory_order_relaxed);
    }
    device_.copy(*stream_, request.direction(), piece.dst, source, piece.bytes);
    counters_.bytes[direction][traffic].fetch_add(piece.bytes, std::memory_order_relaxed);
    counters_.copies[direction].fetch_add(1, std::memory_order_relaxed);
    chunk->bytes += piece.bytes;
  }
  device_.record(*chunk->event, *stream_);
  chunk->last = request.exhausted();
  return chunk->last;
}

// What `before` and the copies of a broken chunk have already enqueued must be over before the request counts as
// finished. If the device cannot even record an event, nothing more can be known about it.
void CopyLane::end_failed(const std::shared_ptr<LaneRequest>& request, std::exception_ptr failure) {
  std::shared_ptr<Event> event;
  if (request->started()) {
    try {
      event = events_->take();
      device_.record(*event, *stream_);
    } catch (...) {
      event = nullptr;
    }
  }
  if (failure) request->fail(std::move(failure));
  push({std::move(event), request, true, 0, 0});
}

void CopyLane::push(Chunk chunk) {
  {
    std::lock_guard lock(mutex_);
    in_flight_.push_back(std::move(chunk));
  }
  reaper_wakes_.notify_one();
}

// -- reaper

void CopyLane::reap_loop() {
  try {
    device_.attach_thread();
  } catch (...) {  // the issuer meets the same failure and reports it with every request
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    reaper_wakes_.wait(lock, [&] { return !in_flight_.empty() || issuer_ended_; });
    if (in_flight_.empty()) return;
    Chunk chunk = in_flight_.front();  // stays counted as in flight until it is seen complete
    lock.unlock();
    reap(chunk);
    if (chunk.bounced) bounce_->chunk_complete();
    lock.lock();
    in_flight_.pop_front();
    lock.unlock();
    issuer_wakes_.notify_one();
    if (chunk.last) {
      chunk.request->finish();
      lock.lock();
      --unfinished_requests_;
      unfinished_bytes_ -= chunk.request->bytes();
      lock.unlock();
      request_ended_.notify_all();
    }
    chunk = {};  // neither the event nor the request is held while sleeping
    lock.lock();
  }
}

void CopyLane::reap(const Chunk& chunk) {
  if (!chunk.event) return;
  try {
    device_.synchronize(*chunk.event);
  } catch (...) {
    chunk.request->fail(std::current_exception());
  }
  if (chunk.issued_ns == 0 || !Trace::global().on()) return;
  // A chunk starts when the one before it is over, however early it was issued.
  const std::uint64_t now = Trace::now_ns();
  Trace::global().add(SpanKind::kCopy, options_.name, std::max(chunk.issued_ns, reaped_ns_), now, chunk.bytes);
  reaped_ns_ = now;
}

}  // namespace roundpipe
