#include "core/proc_files.h"

#include <fstream>
#include <sstream>

namespace roundpipe {

std::optional<std::size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::size_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

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

}  // namespace roundpipe
