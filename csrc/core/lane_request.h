// One request on its way through a lane: what the lane's two threads and the consumers share about it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/transfer_engine.h"

namespace roundpipe {

class ReadAhead;

class LaneRequest final : public Handover {
 public:
  LaneRequest(Device& device, TransferRequest request, HappensBefore* checker);
  ~LaneRequest() override;

  bool wait_issued(std::chrono::milliseconds timeout) override;
  void order_after(Stream& stream) override;
  void order_after(Device& device, Stream& stream) override;
  bool wait_complete(std::chrono::milliseconds timeout) override;
  bool wait_settled(std::chrono::milliseconds timeout) override;
  void on_issued(std::function<void()> callback) override;
  bool complete() const noexcept override { return complete_.load(std::memory_order_acquire); }

  // -- issuer's thread only, until the last chunk is issued
  bool started() const noexcept { return started_; }
  Readiness ask_ready();       // throws the reason if the request can say why it is poisoned
  void start(Stream& stream);  // what must come before the first copy
  // The next piece, at most `room` bytes; false when nothing fits, or nothing is left. A segment of more than `chunk`
  // bytes is cut into pieces of that size, others stay whole.
  bool next_piece(std::size_t room, std::size_t chunk, CopySegment* piece);
  bool exhausted() const noexcept { return segment_ == request_.segments.size(); }
  void mark_issued(std::shared_ptr<Event> last);
  // Bytes mapped from files of which the kernel was not told yet that they will be read.
  std::size_t unadvised() const noexcept { return unadvised_.load(std::memory_order_relaxed); }
  // Has it told so up to `most` bytes beyond what was copied; gives how many bytes of the request lie ahead now.
  std::size_t advise(std::size_t most, ReadAhead& read_ahead);

  // -- reaper's thread only, after the last chunk: runs `finished`, drops `keep_alive`, wakes who waits for completion
  void finish();

  // -- either of the lane's threads
  void fail(std::exception_ptr failure);  // the first failure is kept
  bool failed() const;

  Direction direction() const noexcept { return request_.direction; }
  Traffic traffic() const noexcept { return request_.traffic; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  bool wait_for(std::chrono::milliseconds timeout, bool for_completion);

  Device& device_;
  HappensBefore* const checker_;
  TransferRequest request_;  // handed from the issuer to the reaper through the lane's lock
  std::size_t bytes_ = 0;
  std::size_t segment_ = 0;  // the next piece starts here
  std::size_t offset_ = 0;
  bool started_ = false;
  std::atomic<std::size_t> unadvised_{0};  // atomic: submitters and the issuer look at it
  std::size_t advised_segment_ = 0;        // the kernel knows of everything before this place
  std::size_t advised_offset_ = 0;

  mutable std::mutex mutex_;  // guards what the lane tells consumers: everything below
  std::condition_variable changed_;
  bool issued_ = false;
  std::atomic<bool> complete_{false};  // written under the lock; atomic because complete() is asked by quarantines
  std::exception_ptr failure_;
  std::shared_ptr<Event> last_;  // recorded after the last copy; null until issued
  std::vector<std::function<void()>> on_issued_;
};

}  // namespace roundpipe
