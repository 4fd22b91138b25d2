// How much memory this process may still take: the machine's, and its control group's (versions 1 and 2).
#pragma once

#include <cstddef>
#include <string>

namespace roundpipe {

struct MemoryLimits {
  std::size_t total_bytes = 0;      // MemTotal
  std::size_t available_bytes = 0;  // MemAvailable; 0 with total_bytes 0: unknown
  // Of the enclosing control group with the least room left (cgroup_memory). Limit 0: no group has a limit.
  std::size_t cgroup_limit_bytes = 0;
  std::size_t cgroup_used_bytes = 0;  // less the page cache that the kernel can drop

  // What can still be taken before the kernel's OOM killer would decide; SIZE_MAX when nothing is known.
  std::size_t headroom_bytes() const noexcept;
  std::string describe() const;  // "MemAvailable 1.50 GiB of 2.00 GiB, cgroup 0.10 of 1.00 GiB used"
};

// Reads /proc and /sys anew. Never throws for what it cannot read: a fact that is missing does not limit. `root` is the
// directory that holds proc and sys ("" for the real ones).
MemoryLimits read_memory_limits(const std::string& root = "");

// ROUNDPIPE_SKIP_MEMORY_CHECK=1: for machines whose memory grows as it is used.
bool memory_check_skipped() noexcept;
// Throws HostOutOfMemory when fewer than `bytes` are left. `purpose` says for what, and what would need less.
// `to_lock`: they are new memory that will be page-locked, so that its wall counts too (pin_limits).
void require_host_memory(std::size_t bytes, const std::string& purpose, bool to_lock);

std::size_t page_bytes() noexcept;
std::string format_bytes(std::size_t bytes);  // "512 B", "1.50 GiB"

}  // namespace roundpipe
