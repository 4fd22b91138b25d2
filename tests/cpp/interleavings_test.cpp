// Thousands of short random programs over simulated devices, checked by value and by the happens-before checker; and,
// for each of the five rules, a scenario in which the checker notices its absence.
#include <gtest/gtest.h>

#include <cstdlib>

#include "interleavings_world.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;

std::uint64_t scenario_count() {
  if (const char* asked = std::getenv("ROUNDPIPE_TEST_SCENARIOS")) return std::strtoull(asked, nullptr, 10);
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return 1'000;
#else
  return 10'000;
#endif
}

TEST(Interleavings, EveryReaderSeesTheValuesOfProgramOrder) {
  constexpr std::uint64_t kPerWorld = 100;
  const std::uint64_t count = scenario_count();
  std::uint64_t jobs = 0, poisoned = 0;
  for (std::uint64_t first = 0; first < count; first += kPerWorld) {
    InterleavingsWorld world(1 + first / kPerWorld % 4, first);
    for (std::uint64_t seed = first; seed < std::min(first + kPerWorld, count); ++seed) {
      ASSERT_TRUE(world.run_scenario(seed)) << "scenario " << seed << ": " << testing::PrintToString(world.problems());
    }
    jobs += world.jobs();
    poisoned += world.poisoned();
  }
  RecordProperty("jobs", static_cast<int>(jobs));
  RecordProperty("poisoned", static_cast<int>(poisoned));
  EXPECT_GT(jobs, count * 3);
  EXPECT_GT(poisoned, count / 50);
}

// One unit on one device, for the scenarios below. What the rule orders runs on a thread of its own, of whose place in
// time only tickets tell.
struct RuleRig : StreamerRig {
  explicit RuleRig(int dropped_rule) : StreamerRig(8192) {
    unit = make_unit({64}, 64);
    if (dropped_rule != 0) unit->unit->clock.drop_rule_for_test(dropped_rule);
  }
  Ticket issue(TicketKind kind) { return unit->unit->clock.issue(kind); }
  std::thread optimizer(Ticket ticket, Access access, bool weights, milliseconds pause = milliseconds(0)) {
    return std::thread([this, ticket, access, weights, pause] {
      EXPECT_EQ(unit->unit->clock.wait(ticket, kLong), TicketState::kReady);
      HappensBefore& checker = *backend.checker();
      const auto& memory = weights ? unit->weights[0] : unit->gradients;
      checker.access(checker.this_thread(), access, memory.data(), memory.size() * sizeof(Word), "optimizer");
      accessed = true;
      std::this_thread::sleep_for(pause);
      unit->unit->clock.complete(ticket);
    });
  }
  void run(std::uint64_t job, bool gradients) {
    wait(job, 0);
    if (gradients) streamer->gradients_done(job, 0, *compute);
    streamer->close(job, *compute);
  }
  std::unique_ptr<RigUnit> unit;
  std::atomic<bool> accessed{false};  // by the latest optimizer
};

void publish_after_upload(RuleRig& rig) {
  const auto job = rig.streamer->enqueue({reads(*rig.unit)});
  auto publisher = rig.optimizer(rig.issue(TicketKind::kPublish), Access::kWrite, true);
  rig.run(job, false);
  publisher.join();
}

void upload_after_publish(RuleRig& rig) {
  const Ticket publish = rig.issue(TicketKind::kPublish);
  const auto job = rig.streamer->enqueue({reads(*rig.unit)});
  auto publisher = rig.optimizer(publish, Access::kWrite, true, milliseconds(5));
  rig.run(job, false);
  publisher.join();
}

void take_after_write(RuleRig& rig) {
  const auto job = rig.streamer->enqueue({writes(*rig.unit)});
  auto taker = rig.optimizer(rig.issue(TicketKind::kGradientTake), Access::kRead, false);
  rig.run(job, true);
  taker.join();
}

void write_after_take(RuleRig& rig) {
  const auto first = rig.streamer->enqueue({writes(*rig.unit)});
  const Ticket take = rig.issue(TicketKind::kGradientTake);
  const auto second = rig.streamer->enqueue({writes(*rig.unit)});
  auto taker = rig.optimizer(take, Access::kRead, false, milliseconds(5));
  rig.run(first, true);
  // Only then: a take that begins after both writes would by chance be ordered after the second.
  while (!rig.accessed) std::this_thread::yield();
  rig.run(second, true);
  taker.join();
}

void publish_after_publish(RuleRig& rig) {
  const Ticket first = rig.issue(TicketKind::kPublish), second = rig.issue(TicketKind::kPublish);
  auto later = rig.optimizer(second, Access::kWrite, true);
  auto earlier = rig.optimizer(first, Access::kWrite, true, milliseconds(5));
  earlier.join();
  later.join();
}

TEST(Interleavings, TheCheckerNoticesTheAbsenceOfEachRule) {
  using Scenario = void (*)(RuleRig&);
  const Scenario scenarios[] = {publish_after_upload, upload_after_publish, take_after_write, write_after_take,
                                publish_after_publish};
  for (int rule = 1; rule <= 5; ++rule) {
    for (int dropped : {0, rule}) {
      for (int repeat = 0; repeat < 4; ++repeat) {
        RuleRig rig(dropped);
        scenarios[rule - 1](rig);
        ASSERT_TRUE(rig.streamer->wait_idle(kLong));
        EXPECT_EQ(rig.reports().empty(), dropped == 0) << "rule " << rule << (dropped ? " dropped" : " kept");
      }
    }
  }
}

}  // namespace

}  // namespace roundpipe
