// A file whose pages are not in memory.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/memory_limits.h"

namespace roundpipe {

// Of holes, so that no disk is waited for.
class ColdFile {
 public:
  explicit ColdFile(std::size_t bytes) : bytes_(bytes) {
    std::string path = testing::TempDir() + "/cold-XXXXXX";
    const int file = mkstemp(path.data());
    unlink(path.c_str());
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::bad_alloc();
    base_ = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~ColdFile() { munmap(base_, bytes_); }
  const char* data() const { return static_cast<const char*>(base_); }
  bool resident(std::size_t offset) const {  // of a page
    unsigned char page = 0;
    EXPECT_EQ(mincore(static_cast<char*>(base_) + offset, 1, &page), 0);
    return (page & 1) != 0;
  }
  std::size_t resident_bytes() const {
    std::vector<unsigned char> pages(bytes_ / page_bytes());
    EXPECT_EQ(mincore(base_, bytes_, pages.data()), 0);
    return page_bytes() * static_cast<std::size_t>(
                              std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
  }

  bool comes_into_memory(std::size_t bytes, std::chrono::milliseconds timeout) const {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    while (resident_bytes() < bytes && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return resident_bytes() >= bytes;
  }

 private:
  const std::size_t bytes_;
  void* base_;
};

}  // namespace roundpipe
