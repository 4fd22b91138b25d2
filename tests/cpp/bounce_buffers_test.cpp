#include "core/bounce_buffers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cold_file.h"
#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_backend.h"
#include "core/memory_limits.h"
#include "core/read_ahead.h"

namespace roundpipe {
namespace {

constexpr std::chrono::milliseconds kLong{20'000};

std::vector<unsigned char> pattern(std::size_t bytes, unsigned seed) {
  std::vector<unsigned char> data(bytes);
  std::mt19937 random(seed);
  for (auto& byte : data) byte = static_cast<unsigned char>(random());
  return data;
}

TEST(BounceBuffers, PiecesOfAChunkStandBehindEachOther) {
  const auto arena = HostArena::make(nullptr);
  const auto source = pattern(1000, 1);
  {
    BounceBuffers buffers(arena, 1000, 2, 2, nullptr);
    EXPECT_EQ(buffers.bytes(), 0U);
    EXPECT_EQ(arena->stats().used_bytes, 0U);  // nothing before the first need
    const void* first = nullptr;
    for (int chunk = 0; chunk < 4; ++chunk) {
      buffers.begin_chunk();
      const auto* a = static_cast<const char*>(buffers.fill({nullptr, source.data(), 300, HostMemory::kPageable}));
      const auto* b =
          static_cast<const char*>(buffers.fill({nullptr, source.data() + 300, 700, HostMemory::kPageable}));
      EXPECT_EQ(b, a + 300);
      EXPECT_EQ(std::memcmp(a, source.data(), 1000), 0);
      if (chunk == 0) first = a;
      EXPECT_EQ(a == first, chunk % 2 == 0);  // a ring of two
      EXPECT_THROW(buffers.fill({nullptr, source.data(), 1, HostMemory::kPageable}), InvalidArgument);
    }
    EXPECT_EQ(buffers.bytes(), 2000U);
  }
  EXPECT_EQ(arena->stats().used_bytes, 0U);
}

// Pinned and pageable segments of random sizes, through a lane with delays and the checker.
TEST(BounceBuffers, UploadsOfAnySegmentsArriveWhole) {
  HostBackend backend({.check = true, .seed = 3, .max_delay_us = 200});
  TransferOptions options;
  options.chunk_bytes = 4096;
  options.checker = backend.checker();
  options.arena = HostArena::make(nullptr);
  options.fill_threads = 3;
  std::mt19937 random(11);
  const auto source = pattern(200'000, 2);
  std::vector<std::vector<unsigned char>> targets;
  {
    TransferEngine engine(backend.device(0), options);
    std::vector<std::shared_ptr<Handover>> handovers;
    std::uint64_t bounced = 0;
    std::vector<std::size_t> begins;
    for (int request = 0; request < 40; ++request) {
      TransferRequest made;
      const std::size_t begin = random() % 100'000;
      targets.emplace_back(random() % 50'000 + 1);
      auto& target = targets.back();
      backend.checker()->fresh(target.data(), target.size());
      for (std::size_t at = 0; at < target.size();) {
        const std::size_t bytes = std::min<std::size_t>(target.size() - at, random() % 9000 + 1);
        const auto memory = static_cast<HostMemory>(random() % 4);
        if (memory != HostMemory::kPinned) bounced += bytes;
        made.segments.push_back({target.data() + at, source.data() + begin + at, bytes, memory});
        at += bytes;
      }
      begins.push_back(begin);
      handovers.push_back(engine.submit(std::move(made)));
    }
    for (std::size_t i = 0; i < handovers.size(); ++i) {
      ASSERT_TRUE(handovers[i]->wait_complete(kLong));
      EXPECT_EQ(std::memcmp(targets[i].data(), source.data() + begins[i], targets[i].size()), 0) << i;
    }
    EXPECT_EQ(engine.bounced_bytes(), bounced);
    engine.reset_counters();
    EXPECT_EQ(engine.bounced_bytes(), 0U);
  }
  EXPECT_EQ(backend.checker()->take_reports(), std::vector<std::string>());
}

TEST(BounceBuffers, FilesAreReadAheadWhileCopiesWaitAndMoreThanOneStepAhead) {
  HostBackend backend({});
  const std::size_t bytes = std::min(read_ahead_bytes() / 2, std::size_t{32} << 20) / page_bytes() * page_bytes();
  const ColdFile file(2 * bytes);
  TransferOptions options;
  options.chunk_bytes = std::size_t{1} << 20;  // so that a step is much less than what lies ahead
  options.arena = HostArena::make(nullptr);
  TransferEngine engine(backend.device(0), options);
  std::vector<char> target(2 * bytes, 1);
  std::atomic<bool> open{false};
  std::vector<std::shared_ptr<Handover>> handovers;
  for (const std::size_t half : {std::size_t{0}, bytes}) {
    TransferRequest request;
    request.segments = {{target.data() + half, file.data() + half, bytes, HostMemory::kFile}};
    request.ready = [&] { return open ? Readiness::kReady : Readiness::kNotYet; };
    handovers.push_back(engine.submit(std::move(request)));
    // The second comes when the issuer sleeps for the first.
    EXPECT_TRUE(file.comes_into_memory(half + bytes, kLong)) << half;
  }
  EXPECT_EQ(engine.copies(Direction::kHostToDevice), 0U);
  EXPECT_EQ(target[0], 1);
  open = true;
  engine.poke();
  for (const auto& handover : handovers) ASSERT_TRUE(handover->wait_complete(kLong));
  EXPECT_EQ(std::count(target.begin(), target.end(), 0), static_cast<std::ptrdiff_t>(2 * bytes));
}

TEST(BounceBuffers, AFailedCopyFailsItsRequestAloneAndTheRingGoesOn) {
  HostBackend backend({.check = true});
  TransferOptions options;
  options.chunk_bytes = 1024;
  options.checker = backend.checker();
  options.arena = HostArena::make(nullptr);
  const auto source = pattern(20'000, 4);
  for (int failing = 0; failing < 12; ++failing) {
    TransferEngine engine(backend.device(0), options);
    std::vector<unsigned char> broken(10'000), whole(20'000);
    backend.fail_copy_after(failing % 10);
    TransferRequest first, second;
    first.segments = {{broken.data(), source.data(), broken.size(), HostMemory::kFile}};
    second.segments = {{whole.data(), source.data(), whole.size(), HostMemory::kPageable}};
    for (auto* memory : {&broken, &whole}) backend.checker()->fresh(memory->data(), memory->size());
    const auto one = engine.submit(std::move(first));
    EXPECT_THROW(one->wait_complete(kLong), DriverError);
    const auto two = engine.submit(std::move(second));
    ASSERT_TRUE(two->wait_complete(kLong));
    EXPECT_EQ(whole, source);
  }
  EXPECT_EQ(backend.checker()->take_reports(), std::vector<std::string>());
}

TEST(BounceBuffers, ALaneWithoutAnArenaRefusesPageableMemory) {
  HostBackend backend({.check = true});
  TransferEngine engine(backend.device(0), {.checker = backend.checker()});
  const auto source = pattern(10, 5);
  std::vector<unsigned char> target(10);
  TransferRequest request;
  request.segments = {{target.data(), source.data(), 10, HostMemory::kPageable}};
  EXPECT_THROW(engine.submit(std::move(request))->wait_complete(kLong), Error);
}

}  // namespace
}  // namespace roundpipe
