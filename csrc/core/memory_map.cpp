#include "core/memory_map.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string_view>

namespace roundpipe {
namespace {

bool is_memory_by_name(std::string_view path) {
  for (const std::string_view prefix : {"/dev/shm/", "/memfd:", "/SYSV", "/dev/zero", "/dev/nvidia"}) {
    if (path.substr(0, prefix.size()) == prefix) return true;
  }
  return false;
}

}  // namespace

MemoryMap MemoryMap::read(const std::string& path) {
  MemoryMap map;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string range, permissions, offset, device, name;
    std::uint64_t inode = 0;
    if (!(fields >> range >> permissions >> offset >> device >> inode) || inode == 0) continue;
    std::getline(fields >> std::ws, name);
    if (is_memory_by_name(name)) continue;
    char dash = 0;
    Range found{};
    std::istringstream ends(range);
    if (!(ends >> std::hex >> found.begin >> dash >> found.end) || dash != '-') continue;
    if (!map.files_.empty() && map.files_.back().end == found.begin) {
      map.files_.back().end = found.end;
    } else {
      map.files_.push_back(found);
    }
  }
  return map;
}

bool MemoryMap::is_file(const void* base, std::size_t bytes, std::size_t* run) const {
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  const std::uintptr_t end = begin + bytes;
  const auto after = std::upper_bound(files_.begin(), files_.end(), begin,
                                      [](std::uintptr_t at, const Range& r) { return at < r.end; });
  if (after == files_.end() || after->begin >= end) {
    *run = bytes;
    return false;
  }
  if (after->begin > begin) {
    *run = after->begin - begin;
    return false;
  }
  *run = std::min(after->end, end) - begin;
  return true;
}

std::size_t MemoryMap::file_bytes(const void* base, std::size_t bytes) const {
  std::size_t total = 0;
  const auto* at = static_cast<const char*>(base);
  while (bytes != 0) {
    std::size_t run = 0;
    if (is_file(at, bytes, &run)) total += run;
    at += run;
    bytes -= run;
  }
  return total;
}

}  // namespace roundpipe
