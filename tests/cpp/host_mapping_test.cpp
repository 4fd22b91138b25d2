#include "core/host_mapping.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/memory_limits.h"
#include "registering_backend.h"

namespace roundpipe {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kPiece = std::size_t{64} << 30;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kManyPages = 128 * kMiB;  // a sanitizer's shadow is several times what it watches
#else
constexpr std::size_t kManyPages = 1024 * kMiB;
#endif

bool mapped(const void* address) {
  std::ifstream maps("/proc/self/maps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::string line;
  while (std::getline(maps, line)) {
    const std::size_t dash = line.find('-');
    if (std::stoull(line, nullptr, 16) <= wanted && wanted < std::stoull(line.substr(dash + 1), nullptr, 16))
      return true;
  }
  return false;
}

TEST(HostMapping, IsExactZeroedAlignedAndGivenBack) {
  for (const bool huge_pages : {false, true}) {
    for (const std::size_t bytes : {page_bytes(), 2 * kMiB, 5 * kMiB + 3 * page_bytes(), 70 * kMiB}) {
      HostMapping mapping(nullptr, bytes, huge_pages, kPiece);
      std::byte* const base = mapping.base();
      EXPECT_EQ(mapping.bytes(), bytes);
      EXPECT_EQ(mapping.registered_bytes(), 0U);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(base) % (2 * kMiB), 0U);
      EXPECT_TRUE(base[0] == std::byte{0} && std::memcmp(base, base + 1, bytes - 1) == 0);
      std::memset(base, 1, bytes);
      EXPECT_TRUE(mapped(base + bytes - 1));
      HostMapping moved = std::move(mapping);
      EXPECT_EQ(mapping.base(), nullptr);
      EXPECT_EQ(moved.base(), base);
      moved = HostMapping();
      EXPECT_FALSE(mapped(base));
    }
  }
}

TEST(HostMapping, IsResidentFromTheStart) {
  const auto resident = [] {
    std::ifstream statm("/proc/self/statm");
    std::size_t size = 0, pages = 0;
    statm >> size >> pages;
    return pages * page_bytes();
  };
  const std::size_t before = resident();
  const HostMapping mapping(nullptr, 96 * kMiB, true, kPiece);
  EXPECT_GE(resident(), before + 90 * kMiB) << "the kernel's accounts must show what was promised";
}

TEST(HostMapping, RegistersInPieces) {
  RegisteringBackend backend;
  {
    const HostMapping mapping(&backend, 4 * kMiB + page_bytes(), true, kMiB);
    EXPECT_EQ(backend.ranges.size(), 5U);
    EXPECT_EQ(backend.largest, kMiB);
    EXPECT_EQ(backend.registered, 4 * kMiB + page_bytes());
    EXPECT_EQ(mapping.registered_bytes(), backend.registered);
  }
  EXPECT_TRUE(backend.ranges.empty());
}

TEST(HostMapping, AFailingPieceTakesTheOthersAndTheMemoryBack) {
  for (int piece = 0; piece < 4; ++piece) {
    RegisteringBackend backend;
    backend.fail_at = piece;
    EXPECT_THROW(HostMapping(&backend, 4 * kMiB, true, kMiB), DriverError);
    EXPECT_TRUE(backend.ranges.empty());
    EXPECT_FALSE(mapped(backend.last_base));
  }
}

TEST(HostMapping, ALeakedMappingStays) {
  RegisteringBackend backend;
  std::byte* base;
  {
    HostMapping mapping(&backend, kMiB, true, kPiece);
    base = mapping.base();
    mapping.leak();
  }
  EXPECT_EQ(backend.ranges.size(), 1U);
  EXPECT_TRUE(mapped(base));
}

TEST(HostMapping, RefusesWhatCannotBeMapped) {
  EXPECT_THROW(HostMapping(nullptr, 0, true, kPiece), InvalidArgument);
  EXPECT_THROW(HostMapping(nullptr, page_bytes() + 1, true, kPiece), InvalidArgument);
  EXPECT_THROW(HostMapping(nullptr, page_bytes(), true, page_bytes() / 2), InvalidArgument);
  EXPECT_THROW(HostMapping(nullptr, std::size_t{1} << 60, true, kPiece), HostOutOfMemory);
  EXPECT_THROW(HostMapping(nullptr, SIZE_MAX / page_bytes() * page_bytes(), true, kPiece), HostOutOfMemory);
}

TEST(HostMapping, PiecesInParallelCoverEverythingOnce) {
  for (const std::size_t bytes : {std::size_t{1}, 3 * kMiB, 64 * kMiB, 200 * kMiB + 12345}) {
    std::mutex mutex;
    std::set<std::pair<std::size_t, std::size_t>> pieces;
    for_pieces_in_parallel(bytes, [&](std::size_t begin, std::size_t end) {
      std::lock_guard lock(mutex);
      pieces.emplace(begin, end);
    });
    std::size_t at = 0;
    for (const auto& [begin, end] : pieces) {
      EXPECT_EQ(begin, at);
      EXPECT_EQ(begin % (2 * kMiB), 0U);
      EXPECT_LT(begin, end);
      at = end;
    }
    EXPECT_EQ(at, bytes);
  }
}

TEST(HostMapping, ForkingWithAGibibytePinnedIsPromptAndFree) {
  if (read_memory_limits().headroom_bytes() < 2 * kManyPages) GTEST_SKIP() << "too little free memory";
  const auto pages_of_child = [] {
    const pid_t child = fork();
    if (child == 0) {
      pause();
      _exit(0);
    }
    std::ifstream statm("/proc/" + std::to_string(child) + "/statm");
    std::size_t size = 0;
    EXPECT_TRUE(statm >> size);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    return size;
  };
  const std::size_t without = pages_of_child();
  RegisteringBackend backend;
  // Without huge pages: many page table entries are what makes a fork slow.
  const HostMapping mapping(&backend, kManyPages, /*huge_pages=*/false, kPiece);
  std::memset(mapping.base(), 7, mapping.bytes());
  const auto begin = std::chrono::steady_clock::now();
  const std::size_t with = pages_of_child();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(2));
  EXPECT_LT(with, without + kManyPages / page_bytes() / 4) << "the child was given the mapping";
}

}  // namespace
}  // namespace roundpipe
