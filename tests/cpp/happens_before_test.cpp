#include "core/happens_before.h"

#include <gtest/gtest.h>

#include <array>
#include <bitset>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"

namespace roundpipe {
namespace {

using Actor = HappensBefore::Actor;

// Addresses are never read, only compared.
const void* at(std::uintptr_t address) { return reinterpret_cast<const void*>(address); }

struct HappensBeforeTest : ::testing::Test {
  HappensBefore checker;
  Actor a = checker.add_actor("stream a");
  Actor b = checker.add_actor("stream b");
  Actor c = checker.add_actor("stream c");
  int token = 0;

  void read(Actor who, std::uintptr_t begin, std::size_t bytes, const char* what = "read") {
    checker.access(who, Access::kRead, at(begin), bytes, what);
  }
  void write(Actor who, std::uintptr_t begin, std::size_t bytes, const char* what = "write") {
    checker.access(who, Access::kWrite, at(begin), bytes, what);
  }
  std::size_t reports() { return checker.take_reports().size(); }
};

TEST_F(HappensBeforeTest, OneActorNeverConflictsWithItself) {
  write(a, 100, 10);
  read(a, 105, 10);
  write(a, 95, 30);
  EXPECT_EQ(reports(), 0U);
}

TEST_F(HappensBeforeTest, ReadsDoNotConflict) {
  read(a, 100, 10);
  read(b, 100, 10);
  EXPECT_EQ(reports(), 0U);
}

TEST_F(HappensBeforeTest, EveryKindOfConflictIsFound) {
  write(a, 100, 10, "a writes");
  write(b, 109, 10, "b writes");  // one byte in common
  EXPECT_EQ(reports(), 1U);
  write(a, 200, 10, "a writes");
  read(b, 200, 10, "b reads");
  EXPECT_EQ(reports(), 1U);
  read(a, 300, 10, "a reads");
  write(b, 300, 10, "b writes");
  EXPECT_EQ(reports(), 1U);
  write(a, 400, 10);
  write(b, 410, 10);
  read(b, 390, 10);
  EXPECT_EQ(reports(), 0U);
}

TEST_F(HappensBeforeTest, AReportNamesBothAccesses) {
  write(a, 0x1000, 16, "upload of weights");
  read(b, 0x1008, 32, "layer forward");
  const auto reports = checker.take_reports();
  ASSERT_EQ(reports.size(), 1U);
  for (const char* part : {"upload of weights", "layer forward", "write by stream a", "read by stream b", "16 bytes",
                           "32 bytes", "[0x1000, 0x1010)", "[0x1008, 0x1028)"}) {
    EXPECT_NE(reports[0].find(part), std::string::npos) << part << " is missing in: " << reports[0];
  }
}

TEST_F(HappensBeforeTest, TokensOrderWhatCameBeforeTheRelease) {
  write(a, 100, 10);
  checker.release(&token, a);
  write(a, 200, 10);
  checker.acquire(&token, b);
  write(b, 100, 10);
  EXPECT_EQ(reports(), 0U);
  write(b, 200, 10);
  EXPECT_EQ(reports(), 1U);
}

TEST_F(HappensBeforeTest, TokensCollectSeveralReleases) {
  write(a, 100, 10);
  write(b, 110, 10);
  checker.release(&token, a);
  checker.release(&token, b);
  checker.acquire(&token, c);
  write(c, 100, 20);
  EXPECT_EQ(reports(), 0U);
}

TEST_F(HappensBeforeTest, OrderIsTransitiveButNotSymmetric) {
  int second = 0;
  write(a, 100, 10);
  checker.release(&token, a);
  checker.acquire(&token, b);
  checker.release(&second, b);
  checker.acquire(&second, c);
  write(c, 100, 10);
  EXPECT_EQ(reports(), 0U);
  write(a, 100, 10);
  EXPECT_EQ(reports(), 1U);
}

TEST_F(HappensBeforeTest, JoinOrdersOnlyThePast) {
  write(a, 100, 10);
  checker.join(b, a);
  read(b, 100, 10);
  EXPECT_EQ(reports(), 0U);
  write(a, 100, 10);
  EXPECT_EQ(reports(), 1U);
}

TEST_F(HappensBeforeTest, ForgottenTokensOrderNothing) {
  write(a, 100, 10);
  checker.release(&token, a);
  checker.forget_token(&token);
  checker.forget_token(&token);
  checker.acquire(&token, b);
  write(b, 100, 10);
  EXPECT_EQ(reports(), 1U);
}

TEST_F(HappensBeforeTest, FreshEndsOnlyTheRangesOldLife) {
  write(a, 100, 30);
  checker.fresh(at(110), 10);
  write(b, 110, 10);
  EXPECT_EQ(reports(), 0U);
  read(b, 109, 1, "left");
  read(b, 120, 1, "right");
  EXPECT_EQ(reports(), 2U);
}

TEST_F(HappensBeforeTest, AllUnorderedReadsAreRemembered) {
  read(a, 100, 10, "a reads");
  read(b, 100, 10, "b reads");
  checker.join(c, b);
  write(c, 100, 10);
  const auto reports = checker.take_reports();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_NE(reports[0].find("a reads"), std::string::npos);
}

TEST_F(HappensBeforeTest, AConflictIsReportedOnce) {
  for (int i = 0; i < 50; ++i) {
    write(a, 100, 10, "one");
    write(b, 100, 10, "other");
  }
  EXPECT_EQ(reports(), 1U);
  write(a, 100, 10, "one");
  EXPECT_EQ(reports(), 0U);
  write(b, 101, 10, "other");
  EXPECT_EQ(reports(), 1U);
}

TEST_F(HappensBeforeTest, ReportsAreBounded) {
  for (std::uintptr_t i = 0; i < 300; ++i) {
    write(a, 100 + 10 * i, 10, "one");
    write(b, 100 + 10 * i, 10, "other");
  }
  EXPECT_EQ(reports(), 100U);
  EXPECT_EQ(reports(), 0U);
}

TEST_F(HappensBeforeTest, TextIsKeptAfterTheCallersStringIsGone) {
  {
    const std::string what = "temporary name of more than sixteen characters";
    write(a, 100, 10, what.c_str());
  }
  read(b, 100, 10);
  const auto reports = checker.take_reports();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_NE(reports[0].find("temporary name of more than"), std::string::npos);
}

TEST_F(HappensBeforeTest, UnknownActorsAreRefused) {
  EXPECT_THROW(write(99, 100, 10), InvalidArgument);
  EXPECT_THROW(checker.join(a, 99), InvalidArgument);
  EXPECT_THROW(checker.release(&token, 99), InvalidArgument);
}

TEST_F(HappensBeforeTest, ThreadsAreDifferentActorsEvenWhenTheirIdsAreReused) {
  const Actor self = checker.this_thread();
  EXPECT_EQ(checker.this_thread(), self);
  std::vector<Actor> seen;
  for (int i = 0; i < 3; ++i) std::thread([&] { seen.push_back(checker.this_thread()); }).join();
  EXPECT_TRUE(seen[0] != self && seen[0] != seen[1] && seen[1] != seen[2] && seen[0] != seen[2]);
  HappensBefore other;
  EXPECT_EQ(other.this_thread(), 0U);  // every checker counts for itself
}

TEST_F(HappensBeforeTest, RepeatedRangesStayCheap) {
  // A long run: the same weights uploaded and read by many layers, correctly ordered. The bound is generous; an
  // implementation whose history grows with the number of accesses misses it by far.
  const auto begin = std::chrono::steady_clock::now();
  for (int step = 0; step < 200; ++step) {
    for (std::uintptr_t layer = 0; layer < 50; ++layer) {
      for (std::uintptr_t chunk = 0; chunk < 4; ++chunk) write(a, layer * 4000 + chunk * 1000, 1000);
      checker.release(&token, a);
      checker.acquire(&token, b);
      for (int i = 0; i < 4; ++i) read(b, layer * 4000, 4000);
      checker.join(a, b);
    }
  }
  EXPECT_EQ(reports(), 0U);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

// The oracle keeps, for every actor and token, the set of all operations it knows of, and compares every pair of
// accesses. A race exists exactly when the checker reports one.
TEST(HappensBefore, AgreesWithCompleteHistories) {
  constexpr std::size_t kSteps = 24, kActors = 3, kTokens = 2, kMemory = 6;
  using Known = std::bitset<kSteps>;
  struct Operation {
    bool access = false, write = false;
    std::uintptr_t begin = 0, end = 0;
    Known past;
  };
  std::size_t racy = 0, clean = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    std::mt19937 random(seed);
    HappensBefore checker;
    std::array<int, kTokens> tokens{};
    std::array<Known, kActors> knows;
    std::array<Known, kTokens> holds;
    std::vector<Operation> operations(kSteps);
    for (std::size_t i = 0; i < kActors; ++i) checker.add_actor("actor");
    bool race = false;
    const std::size_t steps = 4 + random() % (kSteps - 3);
    for (std::size_t step = 0; step < steps; ++step) {
      const Actor who = random() % kActors;
      const std::size_t token = random() % kTokens;
      switch (random() % 6) {
        case 0:
          checker.release(&tokens[token], who);
          holds[token] |= knows[who];
          break;
        case 1:
          checker.acquire(&tokens[token], who);
          knows[who] |= holds[token];
          break;
        case 2: {
          const Actor from = random() % kActors;
          checker.join(who, from);
          knows[who] |= knows[from];
          break;
        }
        default: {
          const std::uintptr_t begin = random() % kMemory, bytes = 1 + random() % 3;
          const Operation now{true, random() % 3 == 0, begin, begin + bytes, knows[who]};
          checker.access(who, now.write ? Access::kWrite : Access::kRead, at(begin), bytes, "access");
          for (std::size_t i = 0; i < step; ++i) {
            const Operation& then = operations[i];
            race |= then.access && (then.write || now.write) && then.begin < now.end && now.begin < then.end &&
                    !now.past[i];
          }
          operations[step] = now;
          knows[who].set(step);
        }
      }
      ASSERT_EQ(race, !checker.take_reports().empty()) << "seed " << seed << " step " << step;
      if (race) break;  // after the first one, only that one is promised
    }
    ++(race ? racy : clean);
  }
  EXPECT_GT(racy, 200U);
  EXPECT_GT(clean, 200U);
}

TEST(HappensBefore, MayBeUsedFromManyThreads) {
  HappensBefore checker;
  std::vector<std::thread> threads;
  for (std::uintptr_t t = 0; t < 4; ++t) {
    threads.emplace_back([&checker, t] {
      const Actor self = checker.this_thread();
      int token = 0;
      for (std::uintptr_t i = 0; i < 200; ++i) {
        checker.access(self, Access::kWrite, at(1000 * t + i), 10, "own");
        checker.release(&token, self);
        checker.acquire(&token, self);
        checker.fresh(at(1000 * t), 5);
      }
      checker.forget_token(&token);
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(checker.take_reports().empty());
}

}  // namespace
}  // namespace roundpipe
