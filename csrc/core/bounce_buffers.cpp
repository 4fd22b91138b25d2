#include "core/bounce_buffers.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/memory_limits.h"

namespace roundpipe {
namespace {

constexpr std::size_t kGrain = std::size_t{256} << 10;  // what one thread copies at least
constexpr std::size_t kMostAhead = std::size_t{1} << 30;
constexpr std::size_t kLeastAhead = std::size_t{32} << 20;
#ifdef MADV_COLD
constexpr int kCold = MADV_COLD;
#else
constexpr int kCold = 20;  // Linux 5.4; an older kernel answers EINVAL
#endif
#ifdef MADV_POPULATE_READ
constexpr int kPopulateRead = MADV_POPULATE_READ;
#else
constexpr int kPopulateRead = 22;  // Linux 5.14; an older kernel answers EINVAL
#endif

void advise(const void* base, std::size_t bytes, int advice, bool whole_pages_only) noexcept {
  const auto page = static_cast<std::uintptr_t>(page_bytes());
  std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(base), end = begin + bytes;
  // What lies beside the range may be needed sooner than the range itself.
  begin = whole_pages_only ? (begin + page - 1) / page * page : begin / page * page;
  if (whole_pages_only) end = end / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

void advise_read_ahead(const void* base, std::size_t bytes) noexcept { advise(base, bytes, MADV_WILLNEED, false); }

// Not MADV_DONTNEED, which would throw away what was written to a private mapping: cold pages only go first.
void advise_drop_behind(const void* base, std::size_t bytes) noexcept { advise(base, bytes, kCold, true); }

// One call waits for the pages and maps them all; the copy alone would fault in a few of them at a time.
void advise_read_now(const void* base, std::size_t bytes) noexcept { advise(base, bytes, kPopulateRead, false); }

std::size_t read_ahead_bytes() {
  const MemoryLimits limits = read_memory_limits();
  std::size_t room = limits.total_bytes == 0 ? kMostAhead * 8 : limits.total_bytes;
  if (limits.cgroup_limit_bytes != 0) room = std::min(room, limits.cgroup_limit_bytes);
  return std::clamp(room / 8, kLeastAhead, kMostAhead);
}

BounceBuffers::BounceBuffers(std::shared_ptr<HostArena> arena, std::size_t buffer_bytes, std::size_t count,
                             std::size_t threads, HappensBefore* checker)
    : arena_(std::move(arena)),
      buffer_bytes_(buffer_bytes),
      count_(count),
      threads_(std::max<std::size_t>(threads, 1)),
      checker_(checker) {
  RP_REQUIRE(arena_ != nullptr && buffer_bytes_ != 0 && count_ != 0,
             "BounceBuffers: an arena, buffer_bytes and count of at least 1 are needed");
}

BounceBuffers::~BounceBuffers() {
  if (checker_ != nullptr) checker_->forget_token(&begun_);
}

void BounceBuffers::begin_chunk() { begun_ = false; }

const void* BounceBuffers::fill(const CopySegment& piece) {
  if (buffers_.empty()) {
    std::vector<HostBlock> made;
    for (std::size_t i = 0; i < count_; ++i) made.push_back(arena_->allocate(buffer_bytes_, /*zeroed=*/false));
    pool_ = std::make_unique<SlicePool>(threads_, checker_, "rp-fill");
    buffers_ = std::move(made);
  }
  if (!begun_) {
    begun_ = true;
    current_ = (current_ + 1) % count_;
    filled_ = 0;
    if (checker_ != nullptr) checker_->acquire(&begun_, checker_->this_thread());
  }
  RP_REQUIRE(piece.bytes <= buffer_bytes_ - filled_, "BounceBuffers: a piece of " + std::to_string(piece.bytes) +
                                                         " bytes does not fit behind " + std::to_string(filled_) +
                                                         " of " + std::to_string(buffer_bytes_));
  char* target = static_cast<char*>(buffers_[current_].data()) + filled_;
  const char* source = static_cast<const char*>(piece.src);
  const bool from_file = piece.memory == HostMemory::kFile || piece.memory == HostMemory::kFileOnce;
  pool_->run(piece.bytes, kGrain, [&](std::size_t begin, std::size_t end) {
    if (checker_ != nullptr) {
      const auto self = checker_->this_thread();
      checker_->access(self, Access::kRead, source + begin, end - begin, "fill of a bounce buffer reads weights");
      checker_->access(self, Access::kWrite, target + begin, end - begin, "fill of a bounce buffer");
    }
    if (from_file) advise_read_now(source + begin, end - begin);
    std::memcpy(target + begin, source + begin, end - begin);
  });
  filled_ += piece.bytes;
  if (piece.memory == HostMemory::kFileOnce) advise_drop_behind(piece.src, piece.bytes);
  return target;
}

void BounceBuffers::chunk_complete() {
  if (checker_ != nullptr) checker_->release(&begun_, checker_->this_thread());
}

std::size_t BounceBuffers::bytes() const noexcept { return buffers_.size() * buffer_bytes_; }

}  // namespace roundpipe
