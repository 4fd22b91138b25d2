#include "core/bounce_buffers.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/memory_advice.h"

namespace roundpipe {
namespace {

constexpr std::size_t kGrain = std::size_t{256} << 10;  // what one thread copies at least

}  // namespace

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
