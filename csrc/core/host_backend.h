// Simulated devices: copy streams are FIFOs with a thread of their own, events are real, a device's memory is separate
// host memory with a limit, and the compute stream is the calling thread. Carries the happens-before checker, seeded
// random delays and failure injection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/backend.h"

namespace roundpipe {

struct HostBackendOptions {
  std::size_t devices = 1;
  std::size_t memory_limit_bytes = 0;  // per device; 0: none
  bool check = false;                  // happens-before checker and 0xFF filling of discarded ranges
  std::uint64_t seed = 0;              // of the random delays
  std::uint32_t max_delay_us = 0;      // each stream operation sleeps 0..max before it runs
  std::int64_t fail_copy_at = -1;      // the n-th copy of this backend (from 0) fails with DriverError
};

class HostBackend : public Backend {
 public:
  explicit HostBackend(const HostBackendOptions& options);
  ~HostBackend() override;

  std::size_t device_count() const override;
  Device& device(std::size_t index) override;
  void register_host(void* base, std::size_t bytes) override;
  void unregister_host(void* base) noexcept override;
  bool page_locked(const void* address) override;
  HappensBefore* checker() noexcept override;

  void set_delays(std::uint64_t seed, std::uint32_t max_delay_us);  // while running
  void fail_copy_after(std::int64_t copies);  // the copy after `copies` more ones fails once; negative: never
  void fail_registration_after(std::int64_t registrations);  // likewise
  // Registers at most so many ranges at a time, as drivers do (near 65,000); negative: any number.
  void limit_registrations(std::int64_t most);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace roundpipe
