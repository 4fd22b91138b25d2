#include "core/stored_record.h"

#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/saturating_deadline.h"

namespace roundpipe {
namespace {

constexpr std::size_t kAlignment = 256;

}  // namespace

void RecordAccounting::add(std::size_t bytes) noexcept {
  records_.fetch_add(1);
  const std::size_t live = bytes_.fetch_add(bytes) + bytes;
  std::size_t peak = peak_.load();
  while (live > peak && !peak_.compare_exchange_weak(peak, live)) {
  }
}

void RecordAccounting::remove(std::size_t bytes) noexcept {
  bytes_.fetch_sub(bytes);
  records_.fetch_sub(1);
}

StoredRecord::StoredRecord(HostArena& arena, std::shared_ptr<RecordAccounting> accounting, HappensBefore* checker,
                           const std::vector<DeviceBytes>& sources)
    : accounting_(std::move(accounting)), checker_(checker) {
  std::size_t total = 0;
  for (const DeviceBytes& source : sources) {
    places_.push_back({total, source.bytes});
    total += (source.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  block_ = arena.allocate(total, /*zeroed=*/false);
  if (checker_ != nullptr) checker_->fresh(block_.data(), block_.bytes());
  accounting_->add(block_.bytes());
}

StoredRecord::~StoredRecord() {
  accounting_->remove(block_.bytes());
  if (checker_ != nullptr) checker_->forget_token(this);
}

bool StoredRecord::wait_host(std::chrono::milliseconds timeout) {
  if (down_) return down_->wait_complete(timeout);
  if (checker_ != nullptr) checker_->acquire(this, checker_->this_thread());
  return true;
}

void StoredRecord::made_by_this_thread() {
  if (checker_ == nullptr) return;
  checker_->access(checker_->this_thread(), Access::kWrite, block_.data(), block_.bytes(), "record from host memory");
  checker_->release(this, checker_->this_thread());
}

const StoredRecord::Place& StoredRecord::place(std::size_t index) const {
  RP_REQUIRE(index < places_.size(),
             "record: tensor " + std::to_string(index) + " asked, it has " + std::to_string(places_.size()));
  return places_[index];
}

bool FetchHandover::wait_complete(std::chrono::milliseconds timeout) {
  const auto deadline = saturating_deadline(timeout);
  return down_.wait_settled(timeout) && up_->wait_complete(left_until(deadline));
}

bool FetchHandover::wait_settled(std::chrono::milliseconds timeout) {
  const auto deadline = saturating_deadline(timeout);
  return down_.wait_settled(timeout) && up_->wait_settled(left_until(deadline));
}

}  // namespace roundpipe
