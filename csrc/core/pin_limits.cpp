#include "core/pin_limits.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdint>
#include <fstream>
#include <sstream>

#include "core/proc_files.h"

namespace roundpipe {
namespace {

std::atomic<std::size_t> locked{0};

// WSL1 has no driver and no such wall; its kernel calls itself "-Microsoft", WSL2's "-microsoft-standard-WSL2" or,
// built by the user, anything with "microsoft".
bool is_wsl2(const std::string& root) {
  std::ifstream file(root + "/proc/sys/kernel/osrelease");
  std::string release;
  std::getline(file, release);
  return release.find("microsoft") != std::string::npos || release.find("WSL2") != std::string::npos;
}

// "Max locked memory         8388608              8388608              bytes"
std::size_t memlock_bytes(const std::string& root) {
  std::ifstream file(root + "/proc/self/limits");
  const std::string key = "Max locked memory";
  std::string line;
  while (std::getline(file, line)) {
    if (line.compare(0, key.size(), key) != 0) continue;
    std::istringstream fields(line.substr(key.size()));
    std::string soft;
    fields >> soft;
    if (soft == "unlimited") return SIZE_MAX;
    std::size_t bytes = 0;
    return std::istringstream(soft) >> bytes ? bytes : 0;
  }
  return 0;
}

}  // namespace

std::size_t PinLimits::room_bytes(std::size_t headroom) const noexcept {
  return wall_bytes == 0 ? headroom : std::min(headroom, wall_bytes - std::min(wall_bytes, locked_bytes));
}

std::string PinLimits::describe() const {
  if (wall_bytes == 0) return "";
  return ", WSL2 page-locks at most about " + format_bytes(wall_bytes) + " with " + format_bytes(locked_bytes) +
         " locked";
}

PinLimits read_pin_limits(const MemoryLimits& memory, const std::string& root) {
  return {is_wsl2(root) ? memory.total_bytes / 2 : 0, memlock_bytes(root), locked.load()};
}

void note_locked(std::size_t bytes) noexcept { locked.fetch_add(bytes); }
void note_unlocked(std::size_t bytes) noexcept { locked.fetch_sub(bytes); }

}  // namespace roundpipe
