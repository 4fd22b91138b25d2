#include "core/cgroup_memory.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include "core/proc_files.h"

namespace roundpipe {
namespace {

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

// What the kernel has to keep: all that is charged but pages of files, which it drops or writes first. Active ones too:
// weights mapped from a file are read again and again, and yet nothing is lost when they go.
std::size_t held_bytes(const std::string& path, bool version2, std::size_t used) {
  std::size_t cache = 0;
  for (const char* key : {"inactive_file", "active_file"}) {
    cache += read_keyed(path + "memory.stat", (version2 ? "" : "total_") + std::string(key)).value_or(0);
  }
  return used - std::min(used, cache);
}

// The lowest bound of one group; nothing when it has none. Above memory.high the kernel reclaims at every allocation
// and slows the process down to a crawl, so it binds like a limit.
std::optional<std::size_t> limit_bytes(const std::string& path, bool version2) {
  std::optional<std::size_t> least;
  for (const char* file : {"memory.max", "memory.high", "memory.limit_in_bytes"}) {
    if (version2 != (std::string_view(file) != "memory.limit_in_bytes")) continue;
    const std::optional<std::size_t> limit = read_number(path + file);
    // Version 1 says "no limit" with a number near 2^63.
    if (limit && *limit < std::size_t{1} << 60 && (!least || *limit < *least)) least = limit;
  }
  return least;
}

void visit(const std::string& root, bool version2, std::optional<GroupMemory>& tightest) {
  const std::optional<Mount> mount = find_mount(root, version2);
  const std::optional<std::string> group = find_group(root, version2);
  if (!mount || !group) return;
  for (const std::string& directory : group_directories(*mount, *group)) {
    const std::string path = root + directory + "/";
    const auto limit = limit_bytes(path, version2);
    const auto used = read_number(path + (version2 ? "memory.current" : "memory.usage_in_bytes"));
    if (!limit || !used) continue;
    const GroupMemory found{*limit, held_bytes(path, version2, *used)};
    if (!tightest || found.room_bytes() < tightest->room_bytes()) tightest = found;
  }
}

}  // namespace

std::optional<GroupMemory> tightest_group(const std::string& root) {
  std::optional<GroupMemory> tightest;
  visit(root, /*version2=*/true, tightest);
  visit(root, /*version2=*/false, tightest);
  return tightest;
}

}  // namespace roundpipe
