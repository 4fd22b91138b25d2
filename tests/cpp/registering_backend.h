// A backend that only registers host memory: it checks what it is asked for, and fails on demand.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "core/backend.h"
#include "core/errors.h"
#include "core/happens_before.h"
#include "core/memory_limits.h"

namespace roundpipe {

class RegisteringBackend : public Backend {
 public:
  std::size_t device_count() const override { return 0; }
  Device& device(std::size_t index) override {
    throw InvalidArgument("RegisteringBackend has no device " + std::to_string(index));
  }
  void register_host(void* base, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(base) % page_bytes(), 0U);
    EXPECT_EQ(bytes % page_bytes(), 0U);
    EXPECT_GT(bytes, 0U);
    last_base = base;
    if (calls_++ == fail_at) throw DriverError("injected", 999);
    const auto next = ranges.lower_bound(base);
    EXPECT_TRUE(next == ranges.end() || static_cast<char*>(base) + bytes <= next->first);
    EXPECT_TRUE(next == ranges.begin() || static_cast<char*>(std::prev(next)->first) + std::prev(next)->second <= base);
    EXPECT_TRUE(ranges.emplace(base, bytes).second);
    registered += bytes;
    largest = std::max(largest, bytes);
  }
  void unregister_host(void* base) noexcept override {
    std::lock_guard lock(mutex_);
    const auto range = ranges.find(base);
    ASSERT_NE(range, ranges.end());
    registered -= range->second;
    ranges.erase(range);
  }
  bool page_locked(const void* address) override {
    std::lock_guard lock(mutex_);
    const auto after = ranges.upper_bound(const_cast<void*>(address));
    if (after == ranges.begin()) return false;
    const auto& [base, bytes] = *std::prev(after);
    return static_cast<std::size_t>(static_cast<const char*>(address) - static_cast<const char*>(base)) < bytes;
  }
  HappensBefore* checker() noexcept override { return checker_.get(); }
  void check() { checker_ = std::make_unique<HappensBefore>(); }

  int fail_at = -1;
  std::map<void*, std::size_t> ranges;
  std::size_t registered = 0;
  std::size_t largest = 0;
  void* last_base = nullptr;  // of the last call, failed or not

 private:
  std::mutex mutex_;  // the arena may register from several threads
  int calls_ = 0;
  std::unique_ptr<HappensBefore> checker_;
};

}  // namespace roundpipe
