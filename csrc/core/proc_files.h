// Numbers out of the text files of /proc and /sys.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace roundpipe {

// The file's first word; nothing when it is absent or no number ("max").
std::optional<std::size_t> read_number(const std::string& path);

// The value of `key` in a file of "key value" lines (memory.stat, meminfo).
std::optional<std::size_t> read_keyed(const std::string& path, std::string_view key);

}  // namespace roundpipe
