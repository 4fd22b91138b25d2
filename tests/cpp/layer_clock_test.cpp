#include "core/layer_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define RP_SANITIZED 1
#else
#define RP_SANITIZED 0
#endif

namespace roundpipe {
namespace {

using std::chrono::milliseconds;
constexpr TicketKind kUpload = TicketKind::kUpload, kPublish = TicketKind::kPublish, kLoad = TicketKind::kGradientLoad,
                     kWrite = TicketKind::kGradientWrite, kTake = TicketKind::kGradientTake;
constexpr TicketKind kKinds[] = {kUpload, kPublish, kLoad, kWrite, kTake};

// Which kind waits for which, written down once more from the note of the five rules.
struct Waits {
  TicketKind waiter, needed;
  int rule;  // 0: no rule that can be dropped
};
constexpr Waits kWaits[] = {{kUpload, kPublish, 2}, {kPublish, kUpload, 1}, {kPublish, kPublish, 5},
                            {kLoad, kWrite, 0},     {kWrite, kTake, 4},     {kWrite, kLoad, 4},
                            {kWrite, kWrite, 0},    {kTake, kWrite, 3},     {kTake, kTake, 5}};

int rule_between(TicketKind waiter, TicketKind needed) {
  for (const Waits& one : kWaits) {
    if (one.waiter == waiter && one.needed == needed) return one.rule;
  }
  return -1;
}

TEST(LayerClock, EachKindWaitsForExactlyItsRules) {
  for (const TicketKind needed : kKinds) {
    for (const TicketKind waiter : kKinds) {
      LayerClock clock;
      const Ticket first = clock.issue(needed), second = clock.issue(waiter);
      EXPECT_EQ(clock.state(first), TicketState::kReady);
      const bool waits = rule_between(waiter, needed) >= 0;
      EXPECT_EQ(clock.state(second), waits ? TicketState::kWaiting : TicketState::kReady)
          << static_cast<int>(waiter) << " after " << static_cast<int>(needed);
      clock.complete(first);
      EXPECT_EQ(clock.state(second), TicketState::kReady);
    }
  }
}

TEST(LayerClock, ADroppedRuleDropsItsWaitsAndNoOthers) {
  for (int rule = 1; rule <= 5; ++rule) {
    for (const TicketKind needed : kKinds) {
      for (const TicketKind waiter : kKinds) {
        LayerClock clock;
        clock.drop_rule_for_test(rule);
        clock.issue(needed);
        const int between = rule_between(waiter, needed);
        EXPECT_EQ(clock.state(clock.issue(waiter)),
                  between >= 0 && between != rule ? TicketState::kWaiting : TicketState::kReady);
      }
    }
  }
  LayerClock clock;
  EXPECT_THROW(clock.drop_rule_for_test(0), InvalidArgument);
  EXPECT_THROW(clock.drop_rule_for_test(6), InvalidArgument);
}

TEST(LayerClock, ALaterTicketCannotStandInForAnEarlierOne) {
  LayerClock clock;
  const Ticket old_upload = clock.issue(kUpload);
  const Ticket publish = clock.issue(kPublish);
  const Ticket new_upload = clock.issue(kUpload);
  clock.poison(new_upload);  // a job that was aborted before it began
  EXPECT_EQ(clock.completed(kUpload), 1U);
  EXPECT_EQ(clock.state(publish), TicketState::kWaiting) << "old_upload still reads the weights";
  clock.complete(old_upload);
  EXPECT_EQ(clock.state(publish), TicketState::kReady);
}

TEST(LayerClock, TicketsOfOneKindFinishInAnyOrder) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    LayerClock clock;
    std::vector<Ticket> uploads;
    for (int i = 0; i < 9; ++i) uploads.push_back(clock.issue(kUpload));
    const Ticket publish = clock.issue(kPublish);
    std::shuffle(uploads.begin(), uploads.end(), random);
    for (const Ticket& upload : uploads) {
      EXPECT_EQ(clock.state(publish), TicketState::kWaiting);
      clock.complete(upload);
      EXPECT_THROW(clock.complete(upload), InvalidArgument);
    }
    EXPECT_EQ(clock.state(publish), TicketState::kReady);
    EXPECT_EQ(clock.completed(kUpload), 9U);
    EXPECT_EQ(clock.issued(kUpload), 9U);
  }
}

// A unit is opened anew when its gradients are laid out anew: the update of its weights comes after uploads that only
// the clock before knew of, and the other way round no such order is made up.
TEST(LayerClock, MemoryThatGetsAnotherClockStaysOrdered) {
  for (const bool closed_properly : {true, false}) {
    HappensBefore checker;
    std::array<char, 64> weights{};
    auto before = std::make_unique<LayerClock>(&checker);
    std::thread([&] {
      const Ticket upload = before->issue(kUpload);
      checker.access(checker.this_thread(), Access::kRead, weights.data(), weights.size(), "upload");
      before->complete(upload);
    }).join();
    if (closed_properly) before->acquire_finished();
    LayerClock after(&checker);
    const Ticket publish = after.issue(kPublish);
    std::thread([&] {
      ASSERT_EQ(after.state(publish), TicketState::kReady);
      checker.access(checker.this_thread(), Access::kWrite, weights.data(), weights.size(), "update");
      after.complete(publish);
    }).join();
    EXPECT_EQ(checker.take_reports().size(), closed_properly ? 0U : 1U);
  }
}

TEST(LayerClock, AnEpochComesAfterAllThatTheOneBeforeDid) {
  HappensBefore checker;
  std::array<char, 64> gradients{}, weights{};
  LayerClock clock(&checker);
  std::thread([&] {
    const Ticket write = clock.issue(kWrite);
    checker.access(checker.this_thread(), Access::kWrite, gradients.data(), gradients.size(), "aborted download");
    checker.access(checker.this_thread(), Access::kRead, weights.data(), weights.size(), "aborted upload");
    clock.poison(write);
  }).join();
  clock.new_epoch();
  checker.access(checker.this_thread(), Access::kRead, gradients.data(), gradients.size(), "the caller");
  std::thread([&] {
    const Ticket upload = clock.issue(kUpload);  // a kind that waits for no gradient
    ASSERT_EQ(clock.state(upload), TicketState::kReady);
    checker.access(checker.this_thread(), Access::kWrite, weights.data(), weights.size(), "whoever comes next");
  }).join();
  EXPECT_EQ(checker.take_reports(), std::vector<std::string>{});
}

TEST(LayerClock, MisuseIsNamed) {
  LayerClock clock;
  Ticket never = clock.issue(kTake);
  never.number = 7;
  try {
    clock.complete(never);
    FAIL() << "a ticket that was never issued finished";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("gradient take ticket 7"), std::string::npos) << error.what();
  }
  EXPECT_THROW(clock.issue(static_cast<TicketKind>(5)), InvalidArgument);
}

TEST(LayerClock, PoisonReachesWhoeverWaitsInTheSameEpoch) {
  LayerClock clock;
  const Ticket before = clock.issue(kUpload);
  const Ticket slow = clock.issue(kUpload);
  const Ticket failed = clock.issue(kUpload);
  const Ticket publish = clock.issue(kPublish);
  clock.poison(failed);
  EXPECT_EQ(clock.state(publish), TicketState::kPoisoned) << "as soon as one is poisoned, though `slow` still runs";
  EXPECT_EQ(clock.wait(publish, milliseconds(0)), TicketState::kPoisoned);
  EXPECT_EQ(clock.state(before), TicketState::kReady) << "who does not wait for it is not concerned";
  EXPECT_EQ(clock.state(failed), TicketState::kPoisoned) << "itself it is";
  const Ticket take = clock.issue(kTake);
  EXPECT_EQ(clock.state(take), TicketState::kReady);
  EXPECT_THROW(clock.new_epoch(), InvalidArgument) << "before, slow, publish and take are outstanding";
  const Ticket later = clock.issue(kUpload);  // waits for the publish, which is not poisoned yet
  EXPECT_EQ(clock.state(later), TicketState::kWaiting);
  clock.poison(publish);
  EXPECT_EQ(clock.state(later), TicketState::kPoisoned);
  for (const Ticket& ticket : {before, slow, take, later}) clock.complete(ticket);
  clock.new_epoch();
  EXPECT_EQ(clock.state(clock.issue(kPublish)), TicketState::kReady);
  for (const TicketKind kind : kKinds) EXPECT_LE(clock.completed(kind), clock.issued(kind));
}

TEST(LayerClock, WaitTimesOutAndWakes) {
  LayerClock clock;
  const Ticket publish = clock.issue(kPublish), upload = clock.issue(kUpload), doomed = clock.issue(kPublish);
  EXPECT_EQ(clock.wait(upload, milliseconds(5)), TicketState::kWaiting);
  std::thread finisher([&] {
    std::this_thread::sleep_for(milliseconds(20));
    clock.complete(publish);
    std::this_thread::sleep_for(milliseconds(20));
    clock.poison(upload);
  });
  EXPECT_EQ(clock.wait(upload, milliseconds::max()), TicketState::kReady);
  EXPECT_EQ(clock.wait(doomed, milliseconds::max()), TicketState::kPoisoned);
  finisher.join();
}

TEST(LayerClock, TheObserverIsCalledAfterEachEndOutsideTheLock) {
  LayerClock clock;
  int calls = 0;
  std::uint64_t seen = 0;
  clock.set_observer([&] {
    ++calls;
    seen = clock.completed(kUpload);  // would deadlock under the lock
  });
  const Ticket first = clock.issue(kUpload), second = clock.issue(kUpload);
  EXPECT_EQ(calls, 0);
  clock.complete(first);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(seen, 1U);
  clock.poison(second);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(seen, 2U);
}

// -- random programs against a sequential model ----------------------------------------------------------------------

struct Operation {
  TicketKind kind;
  Ticket ticket;
  int expected = 0;  // upload: the version it must see; load, take: the sum
  int value = 0;     // publish: the version it writes; write: what it adds
  int load = -1;     // write: the job's load, in whose buffer the old sum stands
};

// Plain memory, so that ThreadSanitizer sees every missing order; several words, so that a torn image shows.
struct Unit {
  std::array<int, 8> weights{};
  std::array<int, 8> gradients{};
  std::vector<std::array<int, 8>> loaded;
  LayerClock clock;
};

// What one training loop issues: several calls a step, each of one or two backward jobs, calls without gradients
// between.
std::vector<Operation> random_program(std::mt19937& random, LayerClock& clock, std::size_t length) {
  std::vector<Operation> program;
  int version = 0, sum = 0, written = 0;
  const auto issue = [&](Operation operation) {
    operation.ticket = clock.issue(operation.kind);
    program.push_back(operation);
  };
  while (program.size() < length) {
    switch (random() % 5) {
      case 0:  // a call without gradients
        issue({kUpload, {}, version, 0, -1});
        break;
      case 1:
      case 2: {  // a backward job
        issue({kUpload, {}, version, 0, -1});
        int load = -1;
        if (written != 0) {
          load = static_cast<int>(program.size());
          issue({kLoad, {}, sum, 0, -1});
        } else {
          sum = 0;
        }
        const int added = 1 + static_cast<int>(random() % 1000);
        sum += added;
        ++written;
        issue({kWrite, {}, 0, added, load});
        break;
      }
      case 3:  // a step; the first may come before any gradient
        issue({kTake, {}, sum, 0, -1});
        written = 0;
        break;
      default:
        issue({kPublish, {}, 0, ++version, -1});
    }
  }
  return program;
}

void execute(Unit& unit, const Operation& operation, std::size_t index, std::mt19937& random,
             std::atomic<int>& errors) {
  const auto pause = [&] {
    if (random() % 3 == 0) std::this_thread::yield();
  };
  const auto expect_all = [&](const std::array<int, 8>& image, int want) {
    for (const int word : image) {
      if (word != want) ++errors;
    }
  };
  if (unit.clock.wait(operation.ticket, milliseconds(60000)) != TicketState::kReady) ++errors;
  pause();
  switch (operation.kind) {
    case kUpload:
      expect_all(unit.weights, operation.expected);
      break;
    case kPublish:
      for (int& word : unit.weights) word = operation.value;
      break;
    case kLoad:
      unit.loaded[index] = unit.gradients;
      expect_all(unit.loaded[index], operation.expected);
      break;
    case kWrite:
      for (std::size_t i = 0; i < unit.gradients.size(); ++i) {
        unit.gradients[i] =
            operation.value + (operation.load < 0 ? 0 : unit.loaded[static_cast<std::size_t>(operation.load)][i]);
      }
      break;
    case kTake:
      expect_all(unit.gradients, operation.expected);
      break;
  }
  pause();
  unit.clock.complete(operation.ticket);
}

TEST(LayerClock, RandomProgramsOnThreadsSeeWhatProgramOrderImplies) {
  constexpr int kPrograms = RP_SANITIZED ? 1000 : 10000;
  std::atomic<int> errors{0};
  for (unsigned seed = 0; seed < kPrograms; ++seed) {
    std::mt19937 random(seed);
    Unit unit;
    const std::vector<Operation> program = random_program(random, unit.clock, 6 + random() % 20);
    unit.loaded.resize(program.size());
    std::vector<std::vector<std::size_t>> share(2 + random() % 2);
    // In each thread in program order: then the first unfinished operation can always run.
    for (std::size_t i = 0; i < program.size(); ++i) share[random() % share.size()].push_back(i);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < share.size(); ++t) {
      threads.emplace_back([&, t] {
        std::mt19937 mine(seed * 16 + static_cast<unsigned>(t));
        for (const std::size_t i : share[t]) execute(unit, program[i], i, mine, errors);
      });
    }
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(errors, 0) << "seed " << seed;
    for (const TicketKind kind : kKinds) ASSERT_EQ(unit.clock.completed(kind), unit.clock.issued(kind));
  }
}

// -- each rule is needed: the checker notices when one is dropped ----------------------------------------------------

// Each operation runs on a thread of its own that knows of the others only through the clock, one after the other: so
// timing is as kind as can be, and only the declared order can tell.
std::vector<std::string> races(const std::vector<TicketKind>& program, int dropped_rule) {
  HappensBefore checker;
  LayerClock clock(&checker);
  if (dropped_rule != 0) clock.drop_rule_for_test(dropped_rule);
  std::array<char, 64> weights, gradients, moments;
  std::vector<Ticket> tickets;
  for (const TicketKind kind : program) tickets.push_back(clock.issue(kind));
  for (const Ticket& ticket : tickets) {
    std::thread([&] {
      EXPECT_EQ(clock.state(ticket), TicketState::kReady);
      const auto self = checker.this_thread();
      switch (ticket.kind) {
        case kUpload:
          checker.access(self, Access::kRead, weights.data(), weights.size(), "upload reads weights");
          break;
        case kPublish:
          checker.access(self, Access::kWrite, weights.data(), weights.size(), "publish writes weights");
          break;
        case kLoad:
          checker.access(self, Access::kRead, gradients.data(), gradients.size(), "load reads gradients");
          break;
        case kWrite:
          checker.access(self, Access::kWrite, gradients.data(), gradients.size(), "job writes gradients");
          break;
        case kTake:
          checker.access(self, Access::kRead, gradients.data(), gradients.size(), "take reads gradients");
          checker.access(self, Access::kWrite, moments.data(), moments.size(), "take writes moments");
          break;
      }
      clock.complete(ticket);
    }).join();
  }
  return checker.take_reports();
}

TEST(LayerClock, TheCheckerNoticesEachDroppedRule) {
  struct Case {
    int rule;
    std::vector<TicketKind> program;
  };
  const Case cases[] = {
      {1, {kUpload, kPublish}},     {2, {kPublish, kUpload}},     {3, {kWrite, kTake}},
      {4, {kWrite, kTake, kWrite}}, {4, {kWrite, kLoad, kWrite}}, {5, {kPublish, kPublish}},
      {5, {kWrite, kTake, kTake}},
  };
  for (const Case& one : cases) {
    EXPECT_TRUE(races(one.program, 0).empty()) << "rule " << one.rule << ": " << races(one.program, 0).front();
    EXPECT_FALSE(races(one.program, one.rule).empty()) << "rule " << one.rule;
  }
}

TEST(LayerClock, AWholeTrainingLoopNeedsEveryRule) {
  std::vector<TicketKind> program;
  for (int step = 0; step < 3; ++step) {
    for (int call = 0; call < 3; ++call) {
      program.insert(program.end(), {kUpload, kUpload});  // forward, backward
      if (call != 0) program.push_back(kLoad);
      program.push_back(kWrite);
    }
    program.insert(program.end(), {kTake, kPublish, kUpload});  // and a call without gradients
  }
  program.push_back(kPublish);  // weights edited by hand
  program.push_back(kTake);
  EXPECT_TRUE(races(program, 0).empty()) << races(program, 0).front();
  for (int rule = 1; rule <= 5; ++rule) EXPECT_FALSE(races(program, rule).empty()) << "rule " << rule;
}

}  // namespace
}  // namespace roundpipe
