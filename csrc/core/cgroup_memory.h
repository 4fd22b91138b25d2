// What the control groups (versions 1 and 2) around this process let it take.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace roundpipe {

struct GroupMemory {
  std::size_t limit_bytes;
  std::size_t used_bytes;  // less the page cache, which the kernel drops before anything is killed

  std::size_t room_bytes() const noexcept {
    return limit_bytes - (used_bytes < limit_bytes ? used_bytes : limit_bytes);
  }
};

// The enclosing group with the least room left; nothing when no group has a limit. `root` is the directory that holds
// proc and sys ("" for the real ones). A fact that cannot be read does not limit.
std::optional<GroupMemory> tightest_group(const std::string& root);

}  // namespace roundpipe
