#include "core/host_claim.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/memory_limits.h"
#include "core/pin_limits.h"

namespace roundpipe {
namespace {

// Looking for what is locked already and locking, or unlocking, are one step: two claims may want the same page.
// Leaked: a claim may die at exit.
std::mutex& registering() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

struct Living {
  std::mutex mutex;  // guards the set
  std::set<const HostClaim*> claims;
};

Living& living() {
  static auto* all = new Living;
  return *all;
}

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
void* pointer(std::uintptr_t at) { return reinterpret_cast<void*>(at); }

}  // namespace

HostClaim::HostClaim(std::shared_ptr<Backend> backend, std::vector<HostRange> ranges, const HostClaimOptions& options,
                     std::shared_ptr<void> owners)
    : owner_(getpid()),
      backend_(std::move(backend)),
      options_(options),
      owners_(std::move(owners)),
      ranges_(std::move(ranges)),
      map_(MemoryMap::read()) {
  const std::size_t page = page_bytes();
  RP_REQUIRE(options_.registration_bytes != 0 && options_.registration_bytes % page == 0,
             "HostClaim: registration_bytes is " + std::to_string(options_.registration_bytes) +
                 ", expected a positive multiple of the page size " + std::to_string(page));
  std::erase_if(ranges_, [](const HostRange& range) { return range.bytes == 0; });
  std::lock_guard lock(registering());
  const Ranges others = claimed_by_others();
  for (const HostRange& range : ranges_) {
    const Address begin = address(range.base), end = begin + range.bytes;
    // What another claim has locked may be unlocked before we are gone.
    const auto other = at_or_after(others, begin);
    if (other != others.end() && other->first < end) continue;
    if (backend_->page_locked(range.base) && backend_->page_locked(pointer(end - 1))) add(pinned_, begin, end);
  }
  if (options_.pin) {
    Ranges wanted = page_ranges();
    subtract(wanted, others);
    choose(wanted);
    check_memory(wanted);
    register_all(wanted);
  }
  try {
    count();
    const MemoryLimits limits = read_memory_limits();
    const std::size_t room =
        limits.cgroup_limit_bytes == 0 ? limits.total_bytes : std::min(limits.cgroup_limit_bytes, limits.total_bytes);
    once_ = stats_.file_bytes > room / 2;
    begin_new_life();
    Living& all = living();
    std::lock_guard added(all.mutex);
    all.claims.insert(this);
  } catch (...) {
    unregister_all();
    throw;
  }
}

HostClaim::~HostClaim() {
  if (getpid() != owner_) return;
  std::lock_guard lock(registering());
  {
    Living& all = living();
    std::lock_guard removed(all.mutex);
    all.claims.erase(this);
  }
  unregister_all();
  begin_new_life();
}

// The memory comes from an allocator that the checker does not know, and goes back to it: whoever had it before, or
// gets it next, has nothing to do with us.
void HostClaim::begin_new_life() noexcept {
  HappensBefore* checker = backend_->checker();
  if (checker == nullptr) return;
  for (const HostRange& range : ranges_) checker->fresh(range.base, range.bytes);
}

HostClaim::Ranges HostClaim::claimed_by_others() const {
  Living& all = living();
  std::lock_guard lock(all.mutex);
  Ranges found;
  for (const HostClaim* claim : all.claims) {
    if (claim->backend_ != backend_) continue;
    for (const auto& [begin, end] : claim->registered_) add(found, begin, end);
  }
  return found;
}

std::size_t HostClaim::registrations_of_others() const {
  Living& all = living();
  std::lock_guard lock(all.mutex);
  std::size_t count = 0;
  for (const HostClaim* claim : all.claims) {
    if (claim->backend_ == backend_) count += claim->registered_.size();
  }
  return count;
}

// Whole pages of what is to be locked. A page at either end that is locked already stays out.
HostClaim::Ranges HostClaim::page_ranges() const {
  const std::size_t page = page_bytes();
  Ranges merged;
  for (const HostRange& range : ranges_) {
    const Address begin = address(range.base), end = begin + range.bytes;
    const auto pinned = at_or_after(pinned_, begin);
    if (pinned != pinned_.end() && pinned->first <= begin && end <= pinned->second) continue;
    Address first = begin / page * page;
    Address last = (end + page - 1) / page * page;
    while (first < last && backend_->page_locked(pointer(std::max(first, begin)))) first += page;
    while (first < last && backend_->page_locked(pointer(std::min(last, end) - 1))) last -= page;
    if (first < last) add(merged, first, last);
  }
  return merged;
}

void HostClaim::choose(Ranges& ranges) const {
  std::erase_if(ranges, [this](const auto& range) { return range.second - range.first < options_.least_bytes; });
  const std::size_t most =
      options_.most_registrations - std::min(options_.most_registrations, registrations_of_others());
  if (ranges.size() <= most) return;
  auto kept = largest_first(ranges);
  kept.resize(most);
  ranges = Ranges(kept.begin(), kept.end());
}

void HostClaim::check_memory(const Ranges& ranges) const {
  std::size_t copied = 0;
  for (const auto& [begin, end] : ranges) copied += map_.file_bytes(pointer(begin), end - begin);
  if (copied != 0) {
    require_host_memory(copied,
                        "to page-lock weights that are mapped from files, which copies them into memory; "
                        "pin_model=\"off\" streams them from where they are",
                        /*to_lock=*/false);
  }
  if (memory_check_skipped()) return;
  // The memory is there already; but how much of it may be locked can be less.
  std::size_t locked = 0;
  for (const auto& [begin, end] : ranges) locked += end - begin;
  const MemoryLimits limits = read_memory_limits();
  const PinLimits pins = read_pin_limits(limits);
  if (pins.room_bytes(SIZE_MAX) >= locked) return;
  throw HostOutOfMemory("host memory: asked to page-lock " + format_bytes(locked) + " (" + std::to_string(locked) +
                            " bytes) of weights where they are, but " + limits.describe() + pins.describe() +
                            ". pin_model=\"off\" locks next to nothing; ROUNDPIPE_SKIP_MEMORY_CHECK=1 tries it",
                        locked);
}

void HostClaim::register_all(const Ranges& ranges) {
  try {
    for (const auto& [begin, end] : largest_first(ranges)) {
      for (Address at = begin; at < end;) {
        const std::size_t bytes = std::min<std::size_t>(options_.registration_bytes, end - at);
        backend_->register_host(pointer(at), bytes);
        registered_.emplace(at, at + bytes);
        note_locked(bytes);
        at += bytes;
      }
    }
  } catch (const InvalidArgument&) {
    unregister_all();
    throw;
  } catch (const Error&) {
    if (registered_.size() + registrations_of_others() >= options_.many_registrations)
      return;  // Note [Registration in place]
    unregister_all();
    throw;
  } catch (...) {
    unregister_all();
    throw;
  }
}

void HostClaim::unregister_all() noexcept {
  for (const auto& [begin, end] : registered_) {
    backend_->unregister_host(pointer(begin));
    note_unlocked(end - begin);
  }
  registered_.clear();
}

void HostClaim::count() {
  for (const auto& [begin, end] : registered_) stats_.registered_bytes += end - begin;
  stats_.registrations = registered_.size();
  Ranges bytes;
  for (const HostRange& range : ranges_) add(bytes, address(range.base), address(range.base) + range.bytes);
  for (const auto& [begin, end] : bytes) {
    for (const HostPiece& piece : pieces(pointer(begin), end - begin)) {
      if (piece.memory != HostMemory::kPinned) {
        stats_.pageable_bytes += piece.bytes;
        if (piece.memory != HostMemory::kPageable) stats_.file_bytes += piece.bytes;
      } else if (at_or_after(registered_, address(piece.base)) == registered_.end() ||
                 at_or_after(registered_, address(piece.base))->first > address(piece.base)) {
        stats_.pinned_bytes += piece.bytes;
      }
    }
  }
}

std::vector<HostPiece> HostClaim::pieces(void* base, std::size_t bytes) const {
  std::vector<HostPiece> found;
  Address at = address(base);
  const Address end = at + bytes;
  while (at < end) {
    Address stop = end;
    bool pinned = false;
    for (const Ranges* ranges : {&registered_, &pinned_}) {
      const auto it = at_or_after(*ranges, at);
      if (it == ranges->end()) continue;
      if (it->first <= at) {
        stop = std::min(end, it->second);
        pinned = true;
        break;
      }
      stop = std::min(stop, it->first);
    }
    HostMemory memory = HostMemory::kPinned;
    if (!pinned) {
      std::size_t run = 0;
      const bool file = map_.is_file(pointer(at), stop - at, &run);
      memory = !file ? HostMemory::kPageable : once_ ? HostMemory::kFileOnce : HostMemory::kFile;
      stop = at + run;
    }
    found.push_back({pointer(at), stop - at, memory});
    at = stop;
  }
  return found;
}

std::size_t HostClaim::live() {
  Living& all = living();
  std::lock_guard lock(all.mutex);
  return all.claims.size();
}

HostClaimStats HostClaim::total() {
  Living& all = living();
  std::lock_guard lock(all.mutex);
  HostClaimStats sum;
  for (const HostClaim* claim : all.claims) {
    sum.registered_bytes += claim->stats_.registered_bytes;
    sum.pinned_bytes += claim->stats_.pinned_bytes;
    sum.pageable_bytes += claim->stats_.pageable_bytes;
    sum.file_bytes += claim->stats_.file_bytes;
    sum.registrations += claim->stats_.registrations;
  }
  return sum;
}

}  // namespace roundpipe
