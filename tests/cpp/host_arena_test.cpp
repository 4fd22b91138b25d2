#include "core/host_arena.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/memory_limits.h"
#include "registering_backend.h"

namespace roundpipe {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;

HostArenaOptions small_mappings() {
  HostArenaOptions options;
  options.mapping_bytes = kMiB;
  options.keep_free_bytes = 2 * kMiB;
  return options;
}

std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// By memcmp, which sanitizers check as a whole instead of byte by byte.
bool all_are(const HostBlock& block, unsigned char value) {
  const auto* bytes = static_cast<const unsigned char*>(block.data());
  return bytes[0] == value && std::memcmp(bytes, bytes + 1, block.bytes() - 1) == 0;
}
bool all_zero(const HostBlock& block) { return all_are(block, 0); }

TEST(HostArena, RandomUseAgreesWithAModel) {
  for (unsigned seed = 0; seed < 6; ++seed) {
    auto backend = std::make_shared<RegisteringBackend>();
    auto arena = HostArena::make(backend, small_mappings());
    std::mt19937 random(seed);
    struct Live {
      HostBlock block;
      unsigned char mark;
    };
    std::vector<Live> live;
    std::vector<std::pair<std::shared_ptr<bool>, std::size_t>> retired;  // may it go back, its bytes
    std::size_t used = 0, quarantined = 0, peak = 0;
    std::uint64_t allocations = 0;
    const auto settle = [&] {  // what the arena's next poll will do
      std::erase_if(retired, [&](const auto& one) {
        if (*one.first) quarantined -= one.second;
        return *one.first;
      });
    };
    for (int step = 0; step < 1500; ++step) {
      const unsigned action = random() % 10;
      if (action < 5 || live.empty()) {
        const std::size_t shift = random() % 22;
        const std::size_t bytes = 1 + random() % (std::size_t{1} << shift);
        const bool zeroed = random() % 2 == 0;
        settle();
        HostBlock block = arena->allocate(bytes, zeroed);
        ASSERT_EQ(block.bytes(), bytes);
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(block.data()) % 256, 0U);
        if (zeroed) {
          ASSERT_TRUE(all_zero(block)) << "seed " << seed << " step " << step;
        }
        const auto mark = static_cast<unsigned char>(1 + random() % 255);
        std::memset(block.data(), mark, bytes);
        used += rounded(bytes);
        peak = std::max(peak, used);
        ++allocations;
        live.push_back({std::move(block), mark});
      } else if (action < 9) {
        const std::size_t index = random() % live.size();
        Live gone = std::move(live[index]);
        live[index] = std::move(live.back());
        live.pop_back();
        // An overlap with any other block would have overwritten some of it.
        ASSERT_TRUE(all_are(gone.block, gone.mark));
        used -= rounded(gone.block.bytes());
        if (action == 8) {
          auto may_go = std::make_shared<bool>(false);
          quarantined += rounded(gone.block.bytes());
          retired.emplace_back(may_go, rounded(gone.block.bytes()));
          gone.block.retire([may_go] { return *may_go; });
          ASSERT_EQ(gone.block.data(), nullptr);
        }
      } else {
        for (auto& one : retired) *one.first = *one.first || random() % 2 == 0;
        if (random() % 8 == 0) arena->trim();
      }
      if (step % 16 == 0) {
        settle();
        const HostArenaStats stats = arena->stats();
        ASSERT_EQ(stats.used_bytes, used);
        ASSERT_EQ(stats.quarantined_bytes, quarantined);
        ASSERT_EQ(stats.peak_used_bytes, peak);
        ASSERT_EQ(stats.allocations, allocations);
        ASSERT_EQ(stats.registered_bytes, stats.reserved_bytes);
        ASSERT_EQ(stats.registered_bytes, backend->registered);
        ASSERT_GE(stats.reserved_bytes, used + quarantined);
      }
    }
    std::map<void*, std::size_t> ranges;
    for (const Live& one : live) ranges.emplace(one.block.data(), rounded(one.block.bytes()));
    for (auto at = ranges.begin(); at != ranges.end() && std::next(at) != ranges.end(); ++at) {
      ASSERT_LE(static_cast<char*>(at->first) + at->second, std::next(at)->first);
    }
    live.clear();
    for (auto& one : retired) *one.first = true;
    arena->trim();
    const HostArenaStats empty = arena->stats();
    EXPECT_EQ(empty.used_bytes, 0U);
    EXPECT_EQ(empty.quarantined_bytes, 0U);
    EXPECT_EQ(empty.reserved_bytes, 0U);
    EXPECT_TRUE(backend->ranges.empty());
  }
}

TEST(HostArena, CostsAtMostTwoPercentMoreThanAsked) {
  HostArenaOptions options;
  options.mapping_bytes = 8 * kMiB;
  for (const std::size_t bytes : {std::size_t{300}, 5 * kKiB, 130 * kKiB, 131 * kKiB, 700 * kKiB, 1300 * kKiB, 2 * kMiB,
                                  2 * kMiB + 1, 3 * kMiB + 5}) {
    auto arena = HostArena::make(nullptr, options);
    std::vector<HostBlock> blocks;
    const std::size_t count = 96 * kMiB / std::max(bytes, 64 * kKiB);
    for (std::size_t i = 0; i < count; ++i) blocks.push_back(arena->allocate(bytes, false));
    const HostArenaStats stats = arena->stats();
    // Of whole mappings; the last one of the pool may still be filling.
    const double asked = static_cast<double>(count * rounded(bytes));
    EXPECT_LE(static_cast<double>(stats.reserved_bytes), 1.02 * asked + static_cast<double>(options.mapping_bytes))
        << bytes;
    if (bytes > options.mapping_bytes / 4) {
      EXPECT_LE(stats.reserved_bytes, count * (bytes + page_bytes()));
    }
  }
}

TEST(HostArena, FreedNeighboursCoalesce) {
  auto arena = HostArena::make(nullptr, small_mappings());
  std::vector<HostBlock> blocks;
  for (int i = 0; i < 1024; ++i) blocks.push_back(arena->allocate(1024, false));
  ASSERT_EQ(arena->stats().reserved_bytes, kMiB);
  std::mt19937 random(1);
  std::shuffle(blocks.begin(), blocks.end(), random);
  blocks.clear();
  for (int i = 0; i < 4; ++i) blocks.push_back(arena->allocate(256 * kKiB, false));
  EXPECT_EQ(arena->stats().reserved_bytes, kMiB);  // the same mapping, whole again
}

TEST(HostArena, ReusedMemoryIsZeroedWhenAsked) {
  auto arena = HostArena::make(nullptr, {});
  for (const std::size_t bytes : {std::size_t{1000}, 72 * kMiB}) {
    void* first;
    {
      HostBlock block = arena->allocate(bytes, true);
      ASSERT_TRUE(all_zero(block));
      first = block.data();
      std::memset(first, 0xAB, bytes);
    }
    HostBlock again = arena->allocate(bytes, false);
    ASSERT_EQ(again.data(), first);
    ASSERT_FALSE(all_zero(again)) << "the test must see reuse";
    again = HostBlock();
    HostBlock zeroed = arena->allocate(bytes, true);
    ASSERT_EQ(zeroed.data(), first);
    EXPECT_TRUE(all_zero(zeroed));
  }
}

TEST(HostArena, QuarantineHoldsUntilSafe) {
  auto arena = HostArena::make(nullptr, small_mappings());
  bool safe = false;
  HostBlock block = arena->allocate(4096, false);
  void* data = block.data();
  block.retire([&] { return safe; });
  EXPECT_EQ(arena->stats().used_bytes, 0U);
  EXPECT_EQ(arena->stats().quarantined_bytes, 4096U);
  HostBlock other = arena->allocate(4096, false);
  EXPECT_NE(other.data(), data);
  safe = true;
  HostBlock third = arena->allocate(4096, false);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(arena->stats().quarantined_bytes, 0U);
  EXPECT_THROW(third.retire({}), InvalidArgument);
}

TEST(HostArena, QuarantineMayComeBackIntoTheArena) {
  auto arena = HostArena::make(nullptr, small_mappings());
  auto held = std::make_shared<HostBlock>(arena->allocate(512, false));
  HostBlock block = arena->allocate(512, false);
  block.retire(
      [held, weak = std::weak_ptr(arena)] { return weak.lock() ? weak.lock()->stats().used_bytes > 0 : true; });
  held.reset();  // now only `safe` holds it: it dies inside the poll
  EXPECT_EQ(arena->stats().quarantined_bytes, 0U);
  EXPECT_EQ(arena->stats().used_bytes, 0U);
}

TEST(HostArena, AThrowingSafeKeepsTheBlock) {
  auto arena = HostArena::make(nullptr, small_mappings());
  int asked = 0;
  arena->allocate(512, false).retire([&]() -> bool {
    if (++asked < 3) throw DriverError("not now", 1);
    return true;
  });
  EXPECT_EQ(arena->stats().quarantined_bytes, 512U);
  EXPECT_EQ(arena->stats().quarantined_bytes, 512U);
  EXPECT_EQ(arena->stats().quarantined_bytes, 0U);
}

TEST(HostArena, TheLastBlockKeepsTheArenaForItsQuarantine) {
  auto backend = std::make_shared<RegisteringBackend>();
  auto arena = HostArena::make(backend, small_mappings());
  HostBlock block = arena->allocate(3 * kMiB, false);
  arena.reset();
  const auto begin = std::chrono::steady_clock::now();
  block.retire([begin] { return std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(50); });
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(50));
  EXPECT_TRUE(backend->ranges.empty());
}

TEST(HostArena, NeverSafeMemoryIsLeakedRatherThanUnmapped) {
  auto backend = std::make_shared<RegisteringBackend>();
  void* data;
  {
    auto arena = HostArena::make(backend, small_mappings());
    HostBlock other = arena->allocate(3 * kMiB, false);
    HostBlock block = arena->allocate(3 * kMiB, false);
    data = block.data();
    block.retire([] { return false; });
  }
  EXPECT_EQ(backend->ranges.size(), 1U);
  std::memset(data, 1, 3 * kMiB);  // still mapped
}

TEST(HostArena, IdleMappingsAreKeptUpToTheLimit) {
  auto backend = std::make_shared<RegisteringBackend>();
  HostArenaOptions options = small_mappings();
  options.keep_free_bytes = 8 * kMiB;
  auto arena = HostArena::make(backend, options);
  HostBlock a = arena->allocate(3 * kMiB, false), b = arena->allocate(4 * kMiB, false),
            c = arena->allocate(5 * kMiB, false), big = arena->allocate(9 * kMiB, false);
  void* const b_data = b.data();
  a = HostBlock();
  b = HostBlock();
  EXPECT_EQ(arena->stats().reserved_bytes, 21 * kMiB);
  big = HostBlock();  // above the limit alone: goes, and takes nobody with it
  EXPECT_EQ(arena->stats().reserved_bytes, 12 * kMiB);
  // Reuse wastes at most an eighth.
  HostBlock tight = arena->allocate(4 * kMiB - 256 * kKiB, false);
  EXPECT_EQ(tight.data(), b_data);
  EXPECT_EQ(arena->stats().reserved_bytes, 12 * kMiB);
  HostBlock loose = arena->allocate(2 * kMiB, false);
  EXPECT_EQ(arena->stats().reserved_bytes, 14 * kMiB);
  tight = HostBlock();
  c = HostBlock();  // 3 + 4 + 5 idle: the longest idle (3) goes, then the next (4)
  EXPECT_EQ(arena->stats().reserved_bytes, 2 * kMiB + 5 * kMiB);
  EXPECT_EQ(backend->registered, arena->stats().registered_bytes);
  arena->trim();
  EXPECT_EQ(arena->stats().reserved_bytes, 2 * kMiB);
}

TEST(HostArena, AnArenaThatIsFilledInTurnsKeepsItsPeak) {
  auto backend = std::make_shared<RegisteringBackend>();
  HostArenaOptions options = small_mappings();
  options.keep_free_bytes = 0;
  options.keep_peak = true;
  auto arena = HostArena::make(backend, options);
  for (int round = 0; round < 3; ++round) {
    std::vector<HostBlock> blocks;
    for (int i = 0; i < 5; ++i) blocks.push_back(arena->allocate(3 * kMiB, false));
    EXPECT_EQ(arena->stats().reserved_bytes, 15 * kMiB);
    blocks.resize(2);
    EXPECT_EQ(arena->stats().reserved_bytes, 15 * kMiB);
    EXPECT_EQ(backend->ranges.size(), 5U) << "registered anew in round " << round;
  }
  HostBlock kept = arena->allocate(3 * kMiB, false);
  arena->trim();
  EXPECT_EQ(arena->stats().reserved_bytes, 3 * kMiB);
  HostBlock other = arena->allocate(3 * kMiB, false);
  kept = HostBlock();
  other = HostBlock();
  EXPECT_EQ(arena->stats().reserved_bytes, 6 * kMiB);  // the peak since the trim, not the one before
}

TEST(HostArena, AFailingRegistrationLeavesNothingBehind) {
  auto backend = std::make_shared<RegisteringBackend>();
  HostArenaOptions options = small_mappings();
  options.registration_bytes = 256 * kKiB;
  auto arena = HostArena::make(backend, options);
  for (int piece = 0; piece < 4; ++piece) {
    backend = std::make_shared<RegisteringBackend>();
    backend->fail_at = piece;
    arena = HostArena::make(backend, options);
    EXPECT_THROW(arena->allocate(kMiB, false), DriverError);
    EXPECT_TRUE(backend->ranges.empty()) << piece;
    const HostArenaStats stats = arena->stats();
    EXPECT_EQ(stats.reserved_bytes + stats.used_bytes + stats.registered_bytes + stats.allocations, 0U);
    HostBlock works = arena->allocate(kMiB, true);  // only one failure was injected
    EXPECT_TRUE(all_zero(works));
  }
}

TEST(HostArena, AnImpossibleRequestSaysWhyInNumbers) {
  auto arena = HostArena::make(nullptr, {});
  HostBlock held = arena->allocate(kMiB, false);
  const std::size_t asked = std::size_t{1} << 45;
  try {
    arena->allocate(asked, false);
    FAIL() << "32 TiB were given";
  } catch (const HostOutOfMemory& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.asked_bytes, asked);
    for (const char* part : {"35184372088832 bytes", "MemAvailable", "cgroup", "ROUNDPIPE_SKIP_MEMORY_CHECK"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
    }
  }
  EXPECT_THROW(arena->allocate(std::numeric_limits<std::size_t>::max() - 100, false), HostOutOfMemory);
  EXPECT_EQ(arena->stats().used_bytes, kMiB);
}

TEST(HostArena, EmptyBlocks) {
  auto arena = HostArena::make(nullptr, {});
  HostBlock block = arena->allocate(0, true);
  EXPECT_EQ(block.bytes(), 0U);
  block.retire([] { return true; });
  HostBlock moved = std::move(block);
  EXPECT_EQ(arena->stats().reserved_bytes, 0U);
}

TEST(HostArena, ThreadsShareOneArena) {
  auto backend = std::make_shared<RegisteringBackend>();
  auto arena = HostArena::make(backend, small_mappings());
  std::vector<std::thread> threads;
  for (unsigned id = 0; id < 4; ++id) {
    threads.emplace_back([&arena, id] {
      std::mt19937 random(id);
      std::vector<HostBlock> mine;
      for (int step = 0; step < 400; ++step) {
        mine.push_back(arena->allocate(1 + random() % (random() % 8 == 0 ? kMiB : 20 * kKiB), random() % 2 == 0));
        std::memset(mine.back().data(), static_cast<int>(id + 1), mine.back().bytes());
        if (mine.size() > 12) {
          const std::size_t index = random() % mine.size();
          ASSERT_TRUE(all_are(mine[index], static_cast<unsigned char>(id + 1)));
          auto polls = std::make_shared<std::atomic<int>>(0);
          if (step % 3 == 0) mine[index].retire([polls] { return ++*polls > 3; });
          mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(index));
        }
        if (step % 100 == 0) arena->trim();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 5; ++i) arena->trim();
  EXPECT_EQ(arena->stats().reserved_bytes, 0U);
  EXPECT_TRUE(backend->ranges.empty());
}

TEST(HostArena, ANewLifeForgetsTheOldOnesAccesses) {
  auto backend = std::make_shared<RegisteringBackend>();
  backend->check();
  HappensBefore& checker = *backend->checker();
  auto arena = HostArena::make(backend, small_mappings());
  const auto first = checker.add_actor("first"), second = checker.add_actor("second");
  HostBlock block = arena->allocate(4096, false);
  checker.access(first, Access::kWrite, block.data(), 4096, "first life");
  void* data = block.data();
  block = HostBlock();
  block = arena->allocate(4096, false);
  ASSERT_EQ(block.data(), data);
  checker.access(second, Access::kWrite, block.data(), 4096, "second life");
  EXPECT_TRUE(checker.take_reports().empty());
  checker.access(first, Access::kWrite, block.data(), 4096, "unordered");
  EXPECT_FALSE(checker.take_reports().empty()) << "the checker was not looking";
}

// A child that reports through its exit status: 0 is good.
template <typename Body>
int status_of_child(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(HostArena, AForkedChildNeitherSeesNorTouchesTheMappings) {
  auto backend = std::make_shared<RegisteringBackend>();
  auto arena = HostArena::make(backend, {});
  HostBlock block = arena->allocate(4096, true);
  HostBlock quarantined = arena->allocate(4096, true);
  EXPECT_EQ(status_of_child([&] {
              const std::size_t before = backend->ranges.size();
              try {
                arena->allocate(1, false);
                return 1;
              } catch (const Error&) {
              }
              block = HostBlock();
              quarantined.retire([]() -> bool { _exit(2); });
              arena->trim();
              static_cast<void>(arena->stats());
              arena.reset();
              return backend->ranges.size() == before ? 0 : 3;
            }),
            0);
  const int touched = status_of_child([&] {
    signal(SIGSEGV, SIG_DFL);  // a sanitizer would print the fault that is wanted here
    *static_cast<volatile char*>(block.data()) = 1;
    return 0;
  });
  EXPECT_TRUE(!WIFEXITED(touched) || WEXITSTATUS(touched) != 0) << "MADV_DONTFORK had no effect";
  EXPECT_TRUE(all_zero(block));
  EXPECT_EQ(arena->stats().used_bytes, 8192U);
}

}  // namespace
}  // namespace roundpipe
