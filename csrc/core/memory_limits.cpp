#include "core/memory_limits.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string_view>
#include <vector>

#include "core/errors.h"

namespace roundpipe {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  if (file >> number) return number;
  return std::nullopt;  // absent, or "max"
}

// The value of `key` in a file of "key value" lines (memory.stat, meminfo).
std::optional<std::size_t> read_keyed(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string name;
    std::size_t number = 0;
    if (fields >> name >> number && name == key) return number;
  }
  return std::nullopt;
}

// mountinfo writes space, tab, newline and backslash as three octal digits after a backslash.
std::string unescape(const std::string& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && text.find_first_not_of("01234567", i + 1) >= i + 4) {
      out += static_cast<char>(std::stoi(text.substr(i + 1, 3), nullptr, 8));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool has_item(const std::string& comma_list, std::string_view item) {
  std::istringstream items(comma_list);
  std::string one;
  while (std::getline(items, one, ',')) {
    if (one == item) return true;
  }
  return false;
}

struct Mount {
  std::string root;   // the part of the hierarchy that is visible here
  std::string point;  // where
};

// Where the memory controller's hierarchy is mounted: version 2, or version 1's own mount.
std::optional<Mount> find_mount(const std::string& root, bool version2) {
  std::ifstream file(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
    std::string skip, mount_root, point, type, source, options;
    before >> skip >> skip >> skip >> mount_root >> point;
    after >> type >> source >> options;
    if (version2 ? type == "cgroup2" : (type == "cgroup" && has_item(options, "memory"))) {
      return Mount{unescape(mount_root), unescape(point)};
    }
  }
  return std::nullopt;
}

// This process's group in a hierarchy: "0::/path" for version 2, "n:...,memory,...:/path" for version 1.
std::optional<std::string> find_group(const std::string& root, bool version2) {
  std::ifstream file(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version2 ? (line.substr(0, first) == "0" && controllers.empty()) : has_item(controllers, "memory")) {
      return line.substr(second + 1);
    }
  }
  return std::nullopt;
}

// The directories of the group and of all groups around it, innermost first: each one's limit binds.
std::vector<std::string> group_directories(const Mount& mount, const std::string& group) {
  std::string inside = group;
  if (mount.root != "/") {
    // In a container the mount shows only a part of the hierarchy; a group outside it is seen as the mount point.
    const bool within = group.compare(0, mount.root.size(), mount.root) == 0 &&
                        (group.size() == mount.root.size() || group[mount.root.size()] == '/');
    inside = within ? group.substr(mount.root.size()) : "";
  }
  if (inside.find("/..") != std::string::npos) inside.clear();
  std::vector<std::string> directories;
  while (!inside.empty() && inside != "/") {
    directories.push_back(mount.point + inside);
    inside.erase(inside.rfind('/'));
  }
  directories.push_back(mount.point);
  return directories;
}

void apply_cgroup(const std::string& root, bool version2, MemoryLimits& limits) {
  const std::optional<Mount> mount = find_mount(root, version2);
  const std::optional<std::string> group = find_group(root, version2);
  if (!mount || !group) return;
  for (const std::string& directory : group_directories(*mount, *group)) {
    const std::string path = root + directory + "/";
    const auto limit = read_number(path + (version2 ? "memory.max" : "memory.limit_in_bytes"));
    const auto used = read_number(path + (version2 ? "memory.current" : "memory.usage_in_bytes"));
    // Version 1 says "no limit" with a number near 2^63.
    if (!limit || !used || *limit >= std::size_t{1} << 60) continue;
    const std::size_t cache =
        read_keyed(path + "memory.stat", version2 ? "inactive_file" : "total_inactive_file").value_or(0);
    const std::size_t held = *used - std::min(*used, cache);
    const std::size_t room = *limit - std::min(*limit, held);
    const std::size_t known =
        limits.cgroup_limit_bytes == 0
            ? kUnlimited
            : limits.cgroup_limit_bytes - std::min(limits.cgroup_limit_bytes, limits.cgroup_used_bytes);
    if (room < known) {
      limits.cgroup_limit_bytes = *limit;
      limits.cgroup_used_bytes = held;
    }
  }
}

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
  apply_cgroup(root, /*version2=*/true, limits);
  apply_cgroup(root, /*version2=*/false, limits);
  return limits;
}

bool memory_check_skipped() noexcept {
  const char* value = std::getenv("ROUNDPIPE_SKIP_MEMORY_CHECK");
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

void require_host_memory(std::size_t bytes, const std::string& purpose) {
  if (memory_check_skipped()) return;
  const MemoryLimits limits = read_memory_limits();
  if (limits.headroom_bytes() >= bytes) return;
  throw HostOutOfMemory("host memory: asked for " + format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes) " +
                            purpose + ", but " + limits.describe() +
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
