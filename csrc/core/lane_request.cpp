#include "core/lane_request.h"

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/read_ahead.h"
#include "core/saturating_deadline.h"

namespace roundpipe {

LaneRequest::LaneRequest(Device& device, TransferRequest request, HappensBefore* checker)
    : device_(device), checker_(checker), request_(std::move(request)) {
  std::erase_if(request_.segments, [](const CopySegment& segment) { return segment.bytes == 0; });
  for (const CopySegment& segment : request_.segments) {
    RP_REQUIRE(request_.locate || (segment.dst != nullptr && segment.src != nullptr),
               "transfer: a segment of " + std::to_string(segment.bytes) +
                   " bytes has a null address; every non-empty segment needs a source and a target");
    bytes_ += segment.bytes;
    if (segment.memory == HostMemory::kFile || segment.memory == HostMemory::kFileOnce) unadvised_ += segment.bytes;
  }
  // The submitter's past happens before whatever the issuer does for it: the lane's lock gives that order, the token
  // tells the checker.
  if (checker_ != nullptr) checker_->release(&started_, checker_->this_thread());
}

LaneRequest::~LaneRequest() {
  if (checker_ == nullptr) return;
  checker_->forget_token(&started_);
  checker_->forget_token(&complete_);
}

bool LaneRequest::wait_for(std::chrono::milliseconds timeout, bool for_completion) {
  std::unique_lock lock(mutex_);
  const auto arrived = [&] { return for_completion ? complete_.load() : issued_ || failure_ != nullptr; };
  if (!changed_.wait_until(lock, saturating_deadline(timeout), arrived)) return false;
  if (failure_) std::rethrow_exception(failure_);
  return true;
}

bool LaneRequest::wait_issued(std::chrono::milliseconds timeout) { return wait_for(timeout, false); }

bool LaneRequest::wait_settled(std::chrono::milliseconds timeout) { return wait_for(timeout, true); }

bool LaneRequest::wait_complete(std::chrono::milliseconds timeout) {
  if (!wait_for(timeout, true)) return false;
  if (checker_ != nullptr) checker_->acquire(&complete_, checker_->this_thread());
  return true;
}

void LaneRequest::order_after(Stream& stream) { order_after(device_, stream); }

void LaneRequest::order_after(Device& device, Stream& stream) {
  std::shared_ptr<Event> last;
  {
    std::lock_guard lock(mutex_);
    if (!issued_ && failure_) std::rethrow_exception(failure_);
    RP_REQUIRE(issued_,
               "Handover::order_after: the last copy is not issued yet, so there is no event to wait for; "
               "call wait_issued() until it returns true");
    last = last_;
  }
  device.wait(stream, *last);
}

void LaneRequest::on_issued(std::function<void()> callback) {
  {
    std::lock_guard lock(mutex_);
    if (!issued_ && !failure_) {
      on_issued_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

Readiness LaneRequest::ask_ready() {
  if (checker_ != nullptr) checker_->acquire(&started_, checker_->this_thread());
  return request_.ready ? request_.ready() : Readiness::kReady;
}

void LaneRequest::start(Stream& stream) {
  started_ = true;
  if (request_.locate) request_.locate(request_.segments);
  if (request_.before) request_.before(stream);
}

bool LaneRequest::next_piece(std::size_t room, std::size_t chunk, CopySegment* piece) {
  if (exhausted()) return false;
  const CopySegment& segment = request_.segments[segment_];
  const std::size_t bytes = std::min(segment.bytes - offset_, chunk);
  if (bytes > room) return false;
  *piece = {static_cast<char*>(segment.dst) + offset_, static_cast<const char*>(segment.src) + offset_, bytes,
            segment.memory};
  offset_ += bytes;
  if (offset_ == segment.bytes) {
    ++segment_;
    offset_ = 0;
  }
  return true;
}

std::size_t LaneRequest::advise(std::size_t most, ReadAhead& read_ahead) {
  std::size_t ahead = 0;
  // What was copied needs no advice any more.
  if (advised_segment_ < segment_ || (advised_segment_ == segment_ && advised_offset_ < offset_)) {
    advised_segment_ = segment_;
    advised_offset_ = offset_;
  }
  std::size_t left = 0;
  for (std::size_t i = segment_; i < request_.segments.size(); ++i) {
    const CopySegment& segment = request_.segments[i];
    if (segment.memory != HostMemory::kFile && segment.memory != HostMemory::kFileOnce) continue;
    const std::size_t begin = i == segment_ ? offset_ : 0;
    const std::size_t known = i < advised_segment_    ? segment.bytes
                              : i == advised_segment_ ? std::max(begin, advised_offset_)
                                                      : begin;
    const std::size_t wanted = std::min(segment.bytes, begin + (most - std::min(most, ahead)));
    if (wanted > known) {
      read_ahead.add(static_cast<const char*>(segment.src) + known, wanted - known);
      advised_segment_ = i;
      advised_offset_ = wanted;
    }
    ahead += std::max(wanted, known) - begin;
    left += segment.bytes - std::max(wanted, known);
  }
  unadvised_.store(left, std::memory_order_relaxed);
  return ahead;
}

void LaneRequest::mark_issued(std::shared_ptr<Event> last) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    issued_ = true;
    last_ = std::move(last);
    callbacks.swap(on_issued_);
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) callback();
}

void LaneRequest::fail(std::exception_ptr failure) {
  std::vector<std::function<void()>> callbacks;
  {
    std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
    callbacks.swap(on_issued_);
  }
  changed_.notify_all();
  for (const auto& callback : callbacks) callback();
}

bool LaneRequest::failed() const {
  std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

void LaneRequest::finish() {
  std::exception_ptr failure;
  {
    std::lock_guard lock(mutex_);
    failure = failure_;
  }
  if (request_.finished) {
    try {
      request_.finished(failure);
    } catch (...) {  // a consumer's mistake must not end the lane; whoever waits for this request learns of it
      fail(std::current_exception());
    }
  }
  // Everything the request holds goes now, not with the last consumer: sources, records, jobs.
  request_.finished = nullptr;
  request_.locate = nullptr;
  request_.before = nullptr;
  request_.ready = nullptr;
  request_.keep_alive.reset();
  request_.segments = {};
  if (checker_ != nullptr) checker_->release(&complete_, checker_->this_thread());
  {
    std::lock_guard lock(mutex_);
    complete_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

}  // namespace roundpipe
