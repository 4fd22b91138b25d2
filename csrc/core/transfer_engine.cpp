#include "core/transfer_engine.h"

#include <unistd.h>

#include <array>
#include <limits>
#include <mutex>
#include <utility>

#include "core/copy_lane.h"
#include "core/errors.h"
#include "core/saturating_deadline.h"

namespace roundpipe {
namespace {

constexpr std::size_t kFreeEvents = 256;

std::size_t lane_index(Direction direction, Lane lane) {
  return 2 * static_cast<std::size_t>(direction) + static_cast<std::size_t>(lane);
}

}  // namespace

struct TransferEngine::State {
  State(Device& device, const TransferOptions& options)
      : checker(options.checker),
        // The checker takes an event's clock from all that was ever released into it: each recording its own event.
        events(EventPool::make(device, options.checker != nullptr ? 0 : kFreeEvents)) {
    constexpr std::size_t kWhole = std::numeric_limits<std::size_t>::max();
    RP_REQUIRE(
        options.chunk_bytes > 0 && options.bulk_chunks_in_flight > 0 && options.activation_copies_in_flight > 0,
        "TransferOptions: chunk_bytes, bulk_chunks_in_flight and activation_copies_in_flight must be at least 1");
    const auto open = [&](const char* name, Direction direction, Lane lane) {
      const bool bulk = lane == Lane::kBulk;
      lanes[lane_index(direction, lane)] = std::make_unique<CopyLane>(
          device, events, counters,
          LaneOptions{name, direction, bulk ? options.chunk_bytes : kWhole,
                      bulk ? options.bulk_chunks_in_flight : options.activation_copies_in_flight, options.checker,
                      bulk && direction == Direction::kHostToDevice ? options.arena : nullptr, options.fill_threads});
    };
    open("upAct", Direction::kHostToDevice, Lane::kActivations);
    open("upBlk", Direction::kHostToDevice, Lane::kBulk);
    open("dnAct", Direction::kDeviceToHost, Lane::kActivations);
    open("dnBlk", Direction::kDeviceToHost, Lane::kBulk);
  }

  void poke() {
    for (const auto& lane : lanes) lane->poke();
  }

  HappensBefore* const checker;
  const std::shared_ptr<EventPool> events;
  TransferCounters counters;
  std::array<std::unique_ptr<CopyLane>, 4> lanes;  // last: their threads use everything above
};

// What pokers hold. They may outlive the engine, and must not keep it, or its device, alive.
struct TransferEngine::Bell {
  std::mutex mutex;  // held while poking, so that the engine cannot end in the middle of it
  State* state;
};

TransferEngine::TransferEngine(Device& device, const TransferOptions& options)
    : owner_(getpid()), state_(std::make_unique<State>(device, options)), bell_(std::make_shared<Bell>()) {
  bell_->state = state_.get();
}

TransferEngine::~TransferEngine() {
  if (getpid() != owner_) {
    static_cast<void>(state_.release());
    return;
  }
  shutdown();
  std::lock_guard lock(bell_->mutex);
  bell_->state = nullptr;
}

std::shared_ptr<Handover> TransferEngine::submit(TransferRequest request, std::size_t block_while_over_bytes) {
  const auto lane = lane_index(request.direction, request.lane);
  return state_->lanes.at(lane)->submit(std::move(request), block_while_over_bytes);
}

std::shared_ptr<Event> TransferEngine::take_event() { return state_->events->take(); }

HappensBefore* TransferEngine::checker() const noexcept { return state_->checker; }

std::function<void()> TransferEngine::poker() const {
  return [bell = bell_] {
    std::lock_guard lock(bell->mutex);
    if (bell->state != nullptr) bell->state->poke();
  };
}

void TransferEngine::poke() { state_->poke(); }

bool TransferEngine::drain(std::chrono::milliseconds timeout) {
  const auto deadline = saturating_deadline(timeout);
  for (const auto& lane : state_->lanes) {
    if (!lane->drain(left_until(deadline))) return false;
  }
  return true;
}

void TransferEngine::shutdown() noexcept {
  if (getpid() != owner_) return;
  for (const auto& lane : state_->lanes) lane->shutdown();
}

std::uint64_t TransferEngine::bytes(Direction direction, Traffic traffic) const {
  return state_->counters.bytes.at(static_cast<std::size_t>(direction))
      .at(static_cast<std::size_t>(traffic))
      .load(std::memory_order_relaxed);
}

std::uint64_t TransferEngine::copies(Direction direction) const {
  return state_->counters.copies.at(static_cast<std::size_t>(direction)).load(std::memory_order_relaxed);
}

std::uint64_t TransferEngine::bounced_bytes() const { return state_->counters.bounced.load(std::memory_order_relaxed); }

void TransferEngine::reset_counters() {
  state_->counters.bounced.store(0, std::memory_order_relaxed);
  for (auto& direction : state_->counters.bytes) {
    for (auto& traffic : direction) traffic.store(0, std::memory_order_relaxed);
  }
  for (auto& copies : state_->counters.copies) copies.store(0, std::memory_order_relaxed);
}

}  // namespace roundpipe
