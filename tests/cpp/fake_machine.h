// A made-up /proc and /sys.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

#include "core/memory_limits.h"

namespace roundpipe {

inline constexpr std::size_t kMiB = std::size_t{1} << 20;

class FakeMachine {
 public:
  FakeMachine() {
    std::string pattern = (std::filesystem::temp_directory_path() / "fake_machine_XXXXXX").string();
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  ~FakeMachine() { std::filesystem::remove_all(root_); }
  FakeMachine(const FakeMachine&) = delete;
  FakeMachine& operator=(const FakeMachine&) = delete;

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void memory(std::size_t total, std::size_t available) {
    write("/proc/meminfo", "MemTotal:       " + std::to_string(total / 1024) +
                               " kB\nMemFree:   1 kB\nMemAvailable:   " + std::to_string(available / 1024) +
                               " kB\nBuffers: 5 kB\n");
  }
  const std::string& root() const { return root_; }
  MemoryLimits limits() const { return read_memory_limits(root_); }

 private:
  std::string root_;
};

}  // namespace roundpipe
