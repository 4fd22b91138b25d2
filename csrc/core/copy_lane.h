// One lane of a transfer engine: a FIFO of requests, a copy stream and two threads (Note [Lanes]).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "core/bounce_buffers.h"
#include "core/event_pool.h"
#include "core/lane_request.h"
#include "core/read_ahead.h"
#include "core/transfer_engine.h"

namespace roundpipe {

// What was issued, counted over all lanes of an engine.
struct TransferCounters {
  std::array<std::array<std::atomic<std::uint64_t>, kTrafficKinds>, 2> bytes{};  // by direction
  std::array<std::atomic<std::uint64_t>, 2> copies{};
  std::atomic<std::uint64_t> bounced{0};
};

struct LaneOptions {
  const char* name;  // static storage, at most 5 characters: part of the threads' names
  Direction direction;
  std::size_t chunk_bytes;  // the size of the pieces into which large segments are cut
  std::size_t chunks_in_flight;
  HappensBefore* checker;
  std::shared_ptr<HostArena> arena;  // for bounce buffers; null: this lane takes pinned memory only
  std::size_t fill_threads;
};

class CopyLane {
 public:
  CopyLane(Device& device, std::shared_ptr<EventPool> events, TransferCounters& counters, const LaneOptions& options);
  ~CopyLane();
  CopyLane(const CopyLane&) = delete;
  CopyLane& operator=(const CopyLane&) = delete;

  std::shared_ptr<Handover> submit(TransferRequest request, std::size_t block_while_over_bytes);
  void poke();
  bool drain(std::chrono::milliseconds timeout);
  void shutdown() noexcept;

 private:
  struct Chunk {
    std::shared_ptr<Event> event;  // null: nothing could be recorded, so there is nothing to wait for
    std::shared_ptr<LaneRequest> request;
    bool last;
    std::size_t bytes;
    std::uint64_t issued_ns;  // 0: not tracing
    bool bounced = false;     // it has a bounce buffer
  };
  enum class Progress : std::uint8_t { kBlocked, kMore, kEnded };

  void issue_loop();
  Progress advance(const std::shared_ptr<LaneRequest>& request);
  bool issue_chunk(LaneRequest& request, Chunk* chunk);  // true: it was the last
  void end_failed(const std::shared_ptr<LaneRequest>& request, std::exception_ptr failure);
  void push(Chunk chunk);
  void look_ahead();

  void reap_loop();
  void reap(const Chunk& chunk);

  Device& device_;
  const std::shared_ptr<EventPool> events_;
  TransferCounters& counters_;
  const LaneOptions options_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<BounceBuffers> bounce_;  // null: none
  std::unique_ptr<ReadAhead> read_ahead_;        // issuer only; null until a request reads files
  std::size_t read_ahead_bytes_ = 0;             // with it

  std::mutex mutex_;  // guards everything below; never held while a callback or the device is called
  std::condition_variable issuer_wakes_;
  std::condition_variable reaper_wakes_;
  std::condition_variable request_ended_;           // for back-pressure and drain
  std::deque<std::shared_ptr<LaneRequest>> queue_;  // not wholly issued
  std::deque<Chunk> in_flight_;
  // Counts pokes, and requests to look ahead at. The issuer notes it before it asks `ready` and sleeps only while it is
  // unchanged, so that a poke between the question and the sleep is not lost.
  std::uint64_t generation_ = 0;
  bool head_blocked_ = false;  // the head said "not yet" when the generation was blocked_at_
  std::uint64_t blocked_at_ = 0;
  std::size_t unfinished_requests_ = 0;
  std::size_t unfinished_bytes_ = 0;
  bool reads_files_ = false;  // some request did: then it is worth looking ahead
  bool stopping_ = false;
  bool issuer_ended_ = false;  // nothing will be pushed to in_flight_ any more

  std::uint64_t reaped_ns_ = 0;  // reaper only: when the previous chunk was seen complete
  std::mutex join_mutex_;        // shutdown may be called by several threads; each returns after the join
  std::thread issuer_;
  std::thread reaper_;
};

}  // namespace roundpipe
