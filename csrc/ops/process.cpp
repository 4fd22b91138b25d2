#include "ops/process.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace roundpipe::ops {
namespace {

std::atomic<std::uint32_t> generation{0};

// Filled at first uses, read by the single thread of a new child.
std::array<std::atomic<void (*)()>, 8> renewals{};
std::atomic<std::size_t> renewal_count{0};

void child() {
  generation.fetch_add(1, std::memory_order_relaxed);
  for (auto& renew : renewals) {
    if (auto* call = renew.load()) call();
  }
}

const int installed = pthread_atfork(nullptr, nullptr, &child);

}  // namespace

std::uint32_t process_generation() noexcept { return generation.load(std::memory_order_relaxed); }

void on_fork(void (*renew)()) {
  (void)installed;
  renewals.at(renewal_count.fetch_add(1)).store(renew);
}

}  // namespace roundpipe::ops
