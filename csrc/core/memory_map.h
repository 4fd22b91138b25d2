// What stands behind the process's addresses: memory of its own, or a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace roundpipe {

// A snapshot of /proc/self/maps. Memory that is shared by name only (shared-memory files, memfd) counts as the
// process's own: its pages are no copy of anything on a disk.
class MemoryMap {
 public:
  struct Range {
    std::uintptr_t begin, end;
  };

  // Never throws for what it cannot read: memory that is not known to be a file's is treated as ordinary.
  static MemoryMap read(const std::string& path = "/proc/self/maps");

  std::size_t file_bytes(const void* base, std::size_t bytes) const;  // how many of these a file stands behind
  // Whether a file stands behind the first byte, and for how many more bytes that answer holds.
  bool is_file(const void* base, std::size_t bytes, std::size_t* run) const;

 private:
  std::vector<Range> files_;  // ascending, disjoint, neighbours joined
};

}  // namespace roundpipe
