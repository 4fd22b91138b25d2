#include "core/gradient_pool.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"

namespace roundpipe {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr int kNaN = 0xff;

}  // namespace

std::shared_ptr<GradientPool> GradientPool::make(void* base, std::size_t bytes, std::shared_ptr<void> memory,
                                                 std::function<void()> poke, HappensBefore* checker) {
  RP_REQUIRE(base != nullptr || bytes == 0,
             "GradientPool: its memory is null but has " + std::to_string(bytes) + " bytes");
  return std::shared_ptr<GradientPool>(new GradientPool(base, bytes, std::move(memory), std::move(poke), checker));
}

GradientPool::GradientPool(void* base, std::size_t bytes, std::shared_ptr<void> memory, std::function<void()> poke,
                           HappensBefore* checker)
    : base_(static_cast<std::byte*>(base)),
      bytes_(bytes),
      memory_(std::move(memory)),
      poke_(std::move(poke)),
      checker_(checker) {
  stats_.bytes = bytes;
}

GradientPool::~GradientPool() {
  if (checker_ == nullptr) return;
  checker_->forget_token(this);
  checker_->fresh(base_, bytes_);
}

std::shared_ptr<std::byte> GradientPool::try_take(std::size_t bytes) {
  RP_REQUIRE(bytes != 0 && bytes <= bytes_, "GradientPool: gradients of " + std::to_string(bytes) +
                                                " bytes never fit into its " + std::to_string(bytes_) +
                                                "; make it as large as the largest unit's");
  std::size_t begin = 0;
  {
    std::lock_guard lock(mutex_);
    // The lowest gap: what lies low tends to be given back first, so large gaps stay at the end.
    for (const auto& [first, end] : places_) {
      if (first - begin >= bytes) break;
      begin = (end + kAlignment - 1) / kAlignment * kAlignment;
    }
    if (begin > bytes_ || bytes_ - begin < bytes) {
      ++stats_.refused;
      return nullptr;
    }
    places_.emplace(begin, begin + bytes);
    ++stats_.taken;
    stats_.used_bytes += bytes;
    stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.used_bytes);
  }
  if (checker_ != nullptr) checker_->acquire(this, checker_->this_thread());
  return {base_ + begin, [self = shared_from_this(), begin](std::byte*) { self->give_back(begin); }};
}

void GradientPool::give_back(std::size_t begin) noexcept {
  std::size_t bytes = 0;
  {
    std::lock_guard lock(mutex_);
    bytes = places_.at(begin) - begin;
  }
  if (checker_ != nullptr) {
    const HappensBefore::Actor self = checker_->this_thread();
    checker_->access(self, Access::kWrite, base_ + begin, bytes, "a place of gradients is given back");
    std::memset(base_ + begin, kNaN, bytes);
    checker_->release(this, self);
  }
  {
    std::lock_guard lock(mutex_);
    places_.erase(begin);
    stats_.used_bytes -= bytes;
  }
  if (poke_) poke_();
}

GradientPoolStats GradientPool::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace roundpipe
