#include "core/host_arena.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_mapping.h"
#include "core/mapping_pool.h"
#include "core/memory_limits.h"
#include "core/pin_limits.h"

namespace roundpipe {
namespace {

constexpr std::size_t kAlignment = 256;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

struct HostArena::State {
  struct Quarantined {
    std::byte* data;
    std::size_t bytes;
    std::function<bool()> safe;
  };

  std::shared_ptr<Backend> backend;
  HostArenaOptions options;
  const pid_t owner = getpid();

  // Serialises the making of mappings, so that two threads do not both pass the memory check for the same free memory
  // nor both map what one shared mapping would serve. Taken before `mutex`, never inside it.
  std::mutex growth;
  // Guards everything below. Never held over a system or driver call, nor over a caller's `safe`.
  std::mutex mutex;
  MappingPool pool;
  std::list<Quarantined> quarantine;
  HostArenaStats stats;        // all but what the pool knows
  std::size_t high_water = 0;  // most in use or in quarantine since the last trim

  bool in_owner() const { return getpid() == owner; }
  bool is_small(std::size_t bytes) const { return bytes <= options.mapping_bytes / 4; }

  // Gives idle mappings back until what the options let an arena keep for reuse remains.
  void shrink_to_kept() {
    std::size_t keep = options.keep_free_bytes;
    if (options.keep_peak) {
      std::lock_guard lock(mutex);
      keep += high_water - std::min(high_water, stats.used_bytes + stats.quarantined_bytes);
    }
    shrink(keep);
  }

  // Gives idle mappings back until at most `keep` bytes of them remain.
  void shrink(std::size_t keep) {
    for (;;) {
      HostMapping gone;  // destroyed after the lock is released: that unregisters and unmaps
      std::lock_guard lock(mutex);
      gone = pool.detach_idle(keep);
      if (gone.base() == nullptr) return;
    }
  }

  void poll_quarantine();
  void check_memory(std::size_t bytes);
  std::byte* take(std::size_t bytes);
  HostMapping make_mapping(std::size_t bytes);
  std::byte* allocate(std::size_t bytes, bool* fresh);
};

void HostArena::State::poll_quarantine() {
  std::list<Quarantined> asked, safe;
  {
    std::lock_guard lock(mutex);
    if (quarantine.empty()) return;
    asked.swap(quarantine);
  }
  // Without the lock: `safe`, and what dies with it, may come back into the arena.
  for (auto block = asked.begin(); block != asked.end();) {
    const auto current = block++;
    bool is_safe = false;
    try {
      is_safe = current->safe();
    } catch (...) {
      // Whoever cannot be asked may still be copying.
    }
    if (is_safe) safe.splice(safe.end(), asked, current);
  }
  {
    std::lock_guard lock(mutex);
    quarantine.splice(quarantine.begin(), asked);
    for (const Quarantined& block : safe) {
      stats.quarantined_bytes -= block.bytes;
      pool.give_back(block.data, block.bytes);
    }
  }
  if (!safe.empty()) shrink_to_kept();
}

void HostArena::State::check_memory(std::size_t bytes) {
  if (memory_check_skipped()) return;
  MemoryLimits limits;
  PinLimits pins;
  const auto fits = [&] {
    limits = read_memory_limits();
    std::size_t room = limits.headroom_bytes();
    if (backend != nullptr) {
      pins = read_pin_limits(limits);
      room = pins.room_bytes(room);
    }
    return room >= bytes;
  };
  if (fits()) return;
  shrink(0);  // what is kept for reuse may be just what is missing
  if (fits()) return;
  std::size_t reserved, used;
  {
    std::lock_guard lock(mutex);
    reserved = pool.reserved_bytes();
    used = stats.used_bytes;
  }
  throw HostOutOfMemory("host memory: asked for " + format_bytes(bytes) + " (" + std::to_string(bytes) +
                            " bytes), but " + limits.describe() + pins.describe() + "; RoundPipe already holds " +
                            format_bytes(reserved) + ", " + format_bytes(used) +
                            " of it in use. Free memory, raise the limit, or train with a smaller model, batch or "
                            "optimizer state. If this machine's memory grows as it is used, set "
                            "ROUNDPIPE_SKIP_MEMORY_CHECK=1",
                        bytes);
}

std::byte* HostArena::State::take(std::size_t bytes) {
  std::lock_guard lock(mutex);
  return is_small(bytes) ? pool.take_pooled(bytes) : pool.take_dedicated(bytes);
}

HostMapping HostArena::State::make_mapping(std::size_t bytes) {
  check_memory(bytes);
  try {
    return HostMapping(backend.get(), bytes, options.huge_pages, options.registration_bytes);
  } catch (const HostOutOfMemory&) {
    std::lock_guard lock(mutex);
    if (!pool.has_idle()) throw;
  }
  shrink(0);
  return HostMapping(backend.get(), bytes, options.huge_pages, options.registration_bytes);
}

std::byte* HostArena::State::allocate(std::size_t bytes, bool* fresh) {
  *fresh = false;
  if (std::byte* data = take(bytes)) return data;
  std::lock_guard growing(growth);
  // Another thread may have grown the arena, or given something back, while this one waited for its turn.
  if (std::byte* data = take(bytes)) return data;
  std::size_t mapping_bytes = bytes;
  if (is_small(bytes)) {
    // Blocks of middling size usually come in equal numbers (one a layer): a mapping that is a multiple of them has no
    // tail to waste.
    mapping_bytes = options.mapping_bytes;
    if (bytes > mapping_bytes / 64) mapping_bytes = mapping_bytes / bytes * bytes;
  }
  HostMapping mapping = make_mapping(round_up(mapping_bytes, page_bytes()));
  *fresh = true;
  std::lock_guard lock(mutex);
  return pool.add(std::move(mapping), is_small(bytes), bytes);
}

std::shared_ptr<HostArena> HostArena::make(std::shared_ptr<Backend> backend, const HostArenaOptions& options) {
  return std::shared_ptr<HostArena>(new HostArena(std::move(backend), options));
}

HostArena::HostArena(std::shared_ptr<Backend> backend, const HostArenaOptions& options)
    : state_(std::make_unique<State>()) {
  state_->backend = std::move(backend);
  state_->options = options;
  state_->options.mapping_bytes = round_up(std::max(options.mapping_bytes, std::size_t{1}), page_bytes());
}

HostArena::~HostArena() {
  if (!state_->in_owner()) {
    static_cast<void>(state_.release());  // Note [Whose memory after a fork]
    return;
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (;;) {
    state_->poll_quarantine();
    if (state_->quarantine.empty() || std::chrono::steady_clock::now() > deadline) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  state_->pool.leak_live();  // memory that a copy may still touch is worth less than a crash
}

HostBlock HostArena::allocate(std::size_t bytes, bool zeroed) {
  State& state = *state_;
  if (!state.in_owner()) {
    throw Error("host memory: allocate() in process " + std::to_string(getpid()) +
                ", but the arena belongs to process " + std::to_string(state.owner) +
                "; a forked child must not use its parent's engine: start workers with \"spawn\", or keep RoundPipe "
                "out of them");
  }
  state.poll_quarantine();
  HostBlock block;
  block.bytes_ = bytes;
  if (bytes == 0) return block;
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw HostOutOfMemory("host memory: asked for " + std::to_string(bytes) + " bytes, more than can be addressed; " +
                              read_memory_limits().describe(),
                          bytes);
  }
  const std::size_t rounded = round_up(bytes, kAlignment);
  bool fresh = false;
  std::byte* data = state.allocate(rounded, &fresh);
  {
    std::lock_guard lock(state.mutex);
    ++state.stats.allocations;
    state.stats.used_bytes += rounded;
    state.stats.peak_used_bytes = std::max(state.stats.peak_used_bytes, state.stats.used_bytes);
    state.high_water = std::max(state.high_water, state.stats.used_bytes + state.stats.quarantined_bytes);
  }
  block.arena_ = shared_from_this();
  block.data_ = data;
  // Its last life's accesses are no business of the new owner.
  if (HappensBefore* checker = state.backend ? state.backend->checker() : nullptr) checker->fresh(data, rounded);
  if (zeroed && !fresh) {
    for_pieces_in_parallel(bytes,
                           [data](std::size_t begin, std::size_t end) { std::memset(data + begin, 0, end - begin); });
  }
  return block;
}

HostArenaStats HostArena::stats() const {
  if (!state_->in_owner()) return state_->stats;  // the lock may be held for ever by a thread that was not forked
  state_->poll_quarantine();
  std::lock_guard lock(state_->mutex);
  HostArenaStats stats = state_->stats;
  stats.reserved_bytes = state_->pool.reserved_bytes();
  stats.registered_bytes = state_->pool.registered_bytes();
  return stats;
}

void HostArena::trim() {
  if (!state_->in_owner()) return;
  state_->poll_quarantine();
  {
    std::lock_guard lock(state_->mutex);
    state_->high_water = state_->stats.used_bytes + state_->stats.quarantined_bytes;
  }
  state_->shrink(0);
}

void HostArena::free(void* data, std::size_t bytes) noexcept {
  if (!state_->in_owner()) return;
  const std::size_t rounded = round_up(bytes, kAlignment);
  {
    std::lock_guard lock(state_->mutex);
    state_->stats.used_bytes -= rounded;
    state_->pool.give_back(static_cast<std::byte*>(data), rounded);
  }
  state_->shrink_to_kept();
}

void HostArena::quarantine(void* data, std::size_t bytes, std::function<bool()> safe) {
  if (!state_->in_owner()) {
    static_cast<void>(new std::function<bool()>(std::move(safe)));  // leaked: it may own events of the parent's driver
    return;
  }
  const std::size_t rounded = round_up(bytes, kAlignment);
  std::lock_guard lock(state_->mutex);
  state_->quarantine.push_back({static_cast<std::byte*>(data), rounded, std::move(safe)});
  state_->stats.used_bytes -= rounded;
  state_->stats.quarantined_bytes += rounded;
}

HostBlock::HostBlock(HostBlock&& other) noexcept
    : arena_(std::move(other.arena_)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

HostBlock& HostBlock::operator=(HostBlock&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  HostBlock old(std::move(other));  // what this block held goes back now, not when `other` dies
  return *this;
}

HostBlock::~HostBlock() {
  if (data_ != nullptr) arena_->free(data_, bytes_);
}

void HostBlock::retire(std::function<bool()> safe) {
  RP_REQUIRE(safe != nullptr,
             "HostBlock::retire: `safe` is empty, expected a function that tells when no copy can touch the block any "
             "more; to free at once destroy the block");
  if (data_ == nullptr) return;
  const std::shared_ptr<HostArena> arena = std::move(arena_);
  arena->quarantine(std::exchange(data_, nullptr), std::exchange(bytes_, 0), std::move(safe));
}

}  // namespace roundpipe
