#include "core/memory_limits.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>

#include "core/cgroup_memory.h"
#include "core/errors.h"
#include "core/pin_limits.h"
#include "core/proc_files.h"

namespace roundpipe {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

}  // namespace

std::size_t MemoryLimits::headroom_bytes() const noexcept {
  std::size_t headroom = total_bytes == 0 ? kUnlimited : available_bytes;
  if (cgroup_limit_bytes != 0) {
    headroom = std::min(headroom, cgroup_limit_bytes - std::min(cgroup_limit_bytes, cgroup_used_bytes));
  }
  return headroom;
}

std::string MemoryLimits::describe() const {
  std::string text = total_bytes == 0
                         ? std::string("MemAvailable unknown")
                         : "MemAvailable " + format_bytes(available_bytes) + " of " + format_bytes(total_bytes);
  if (cgroup_limit_bytes == 0) return text + ", no cgroup limit";
  return text + ", cgroup limit " + format_bytes(cgroup_limit_bytes) + " with " + format_bytes(cgroup_used_bytes) +
         " used";
}

MemoryLimits read_memory_limits(const std::string& root) {
  MemoryLimits limits;
  const std::string meminfo = root + "/proc/meminfo";
  const auto total = read_keyed(meminfo, "MemTotal:");
  const auto available = read_keyed(meminfo, "MemAvailable:");
  if (total && available) {
    limits.total_bytes = *total << 10;
    limits.available_bytes = *available << 10;
  }
  if (const std::optional<GroupMemory> group = tightest_group(root)) {
    limits.cgroup_limit_bytes = group->limit_bytes;
    limits.cgroup_used_bytes = group->used_bytes;
  }
  return limits;
}

bool memory_check_skipped() noexcept {
  const char* value = std::getenv("ROUNDPIPE_SKIP_MEMORY_CHECK");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

void require_host_memory(std::size_t bytes, const std::string& purpose, bool to_lock) {
  if (memory_check_skipped()) return;
  const MemoryLimits limits = read_memory_limits();
  std::size_t room = limits.headroom_bytes();
  std::string facts = limits.describe();
  if (to_lock) {
    const PinLimits pins = read_pin_limits(limits);
    room = pins.room_bytes(room);
    facts += pins.describe();
  }
  if (room >= bytes) return;
  throw HostOutOfMemory("host memory: asked for " + format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes) " +
                            purpose + ", but " + facts +
                            ". If this machine's memory grows as it is used, set ROUNDPIPE_SKIP_MEMORY_CHECK=1",
                        bytes);
}

std::size_t page_bytes() noexcept {
  static const std::size_t bytes = [] {
    const long page = sysconf(_SC_PAGESIZE);
    return page > 0 ? static_cast<std::size_t>(page) : std::size_t{4096};
  }();
  return bytes;
}

std::string format_bytes(std::size_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  char text[48];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return text;
}

}  // namespace roundpipe
