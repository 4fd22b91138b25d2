#include "core/memory_map.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "core/memory_limits.h"

namespace roundpipe {
namespace {

class MapsFile : public testing::Test {
 protected:
  MemoryMap read(const std::string& text) {
    std::ofstream(path) << text;
    return MemoryMap::read(path);
  }
  ~MapsFile() override { std::remove(path.c_str()); }
  const std::string path = testing::TempDir() + "/maps-" + std::to_string(getpid());
};

const void* at(std::uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST_F(MapsFile, OnlyWhatAFileStandsBehindCounts) {
  const MemoryMap map = read(
      "1000-3000 rw-p 00000000 00:00 0 \n"
      "3000-5000 r--p 00000000 fd:01 42                       /data/model with a space.safetensors\n"
      "5000-6000 rw-p 00002000 fd:01 42                       /data/model with a space.safetensors\n"
      "7000-8000 rw-s 00000000 00:1a 7                        /dev/shm/torch_1 (deleted)\n"
      "8000-9000 rw-s 00000000 00:01 8                        /memfd:x (deleted)\n"
      "9000-a000 rw-p 00000000 00:00 0                        [heap]\n"
      "nonsense\n");
  EXPECT_EQ(map.file_bytes(at(0x1000), 0x9000), 0x3000U);
  EXPECT_EQ(map.file_bytes(at(0x4ff0), 0x20), 0x20U);
  EXPECT_EQ(map.file_bytes(at(0x2000), 0x1800), 0x800U);
  EXPECT_EQ(map.file_bytes(at(0x6000), 0x4000), 0U);
  EXPECT_EQ(map.file_bytes(at(0x3000), 0), 0U);
}

TEST_F(MapsFile, AnAnswerHoldsUntilTheKindChanges) {
  const MemoryMap map = read("3000-5000 r--p 00000000 fd:01 42 /data/a\n");
  std::size_t run = 0;
  EXPECT_FALSE(map.is_file(at(0x1000), 0x8000, &run));
  EXPECT_EQ(run, 0x2000U);
  EXPECT_TRUE(map.is_file(at(0x3000), 0x8000, &run));
  EXPECT_EQ(run, 0x2000U);
  EXPECT_FALSE(map.is_file(at(0x5000), 0x8000, &run));
  EXPECT_EQ(run, 0x8000U);
}

TEST(MemoryMap, KnowsAMappingOfThisProcess) {
  const std::string path = testing::TempDir() + "/mapped-" + std::to_string(getpid());
  const std::size_t bytes = 4 * page_bytes();
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  ASSERT_GE(file, 0);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  close(file);
  ASSERT_NE(mapped, MAP_FAILED);
  const std::vector<char> own(bytes);
  const MemoryMap map = MemoryMap::read();
  EXPECT_EQ(map.file_bytes(mapped, bytes), bytes);
  EXPECT_EQ(map.file_bytes(own.data(), bytes), 0U);
  munmap(mapped, bytes);
  std::remove(path.c_str());
}

TEST(MemoryMap, WhatCannotBeReadIsOrdinaryMemory) {
  const MemoryMap map = MemoryMap::read("/nonexistent/maps");
  EXPECT_EQ(map.file_bytes(at(0x1000), 0x1000), 0U);
}

}  // namespace
}  // namespace roundpipe
