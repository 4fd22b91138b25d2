// A record in one block of the arena, and a copy up from it.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "core/activation_store.h"

namespace roundpipe {

// Live records of one store. Held by the records: they may outlive it.
class RecordAccounting {
 public:
  void add(std::size_t bytes) noexcept;
  void remove(std::size_t bytes) noexcept;
  std::size_t records() const noexcept { return records_.load(); }
  std::size_t bytes() const noexcept { return bytes_.load(); }
  std::size_t peak() const noexcept { return peak_.load(); }

 private:
  std::atomic<std::size_t> records_{0}, bytes_{0}, peak_{0};
};

// One block for all tensors of a record. Every copy that touches the block holds the record, so the block goes back to
// the arena only when no copy can read or write it any more.
class StoredRecord final : public Record {
 public:
  StoredRecord(HostArena& arena, std::shared_ptr<RecordAccounting> accounting, HappensBefore* checker,
               const std::vector<DeviceBytes>& sources);
  ~StoredRecord() override;

  std::size_t size() const override { return places_.size(); }
  std::size_t bytes(std::size_t index) const override { return place(index).bytes; }
  void* host(std::size_t index) const override { return static_cast<char*>(block_.data()) + place(index).offset; }
  bool wait_host(std::chrono::milliseconds timeout) override;

  // Set once, before the record is shared; null: the bytes were copied by the maker's thread.
  void set_download(std::shared_ptr<Handover> down) { down_ = std::move(down); }
  Handover* download() const noexcept { return down_.get(); }

  // For host records: who made the bytes gives the checker their clock, who reads them takes it.
  void made_by_this_thread();

 private:
  struct Place {
    std::size_t offset, bytes;
  };
  const Place& place(std::size_t index) const;

  const std::shared_ptr<RecordAccounting> accounting_;
  HappensBefore* const checker_;
  std::vector<Place> places_;
  HostBlock block_;
  std::shared_ptr<Handover> down_;
};

// A copy up is only as good as the record's own copy down, which may fail after it was issued.
class FetchHandover final : public Handover {
 public:
  FetchHandover(std::shared_ptr<Handover> up, std::shared_ptr<Record> record, Handover& down)
      : up_(std::move(up)), record_(std::move(record)), down_(down) {}

  bool wait_issued(std::chrono::milliseconds timeout) override { return up_->wait_issued(timeout); }
  void order_after(Stream& stream) override { up_->order_after(stream); }
  void order_after(Device& device, Stream& stream) override { up_->order_after(device, stream); }
  bool wait_complete(std::chrono::milliseconds timeout) override;
  bool wait_settled(std::chrono::milliseconds timeout) override;
  void on_issued(std::function<void()> callback) override { up_->on_issued(std::move(callback)); }
  bool complete() const noexcept override { return up_->complete(); }

 private:
  const std::shared_ptr<Handover> up_;
  const std::shared_ptr<Record> record_;  // keeps down_
  Handover& down_;
};

}  // namespace roundpipe
