// How jobs leave a streamer: closed, aborted, failed, or with the streamer itself.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "core/stage_streamer.h"
#include "streamer_rig.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;
const std::vector<std::string> kSilent;

// Three jobs, of which the second is aborted after `steps` steps of its life by its worker, or meanwhile by another
// thread.
TEST(StageRelease, AbortAtEveryPointDrainsAndLeavesAUsableStreamer) {
  constexpr int kSteps = 8;
  for (int round = 0; round < kSteps * 8; ++round) {
    const int steps = round % kSteps;
    const bool blocked = round / kSteps % 2 == 1, other_thread = round / kSteps % 4 >= 2;
    StreamerRig rig(6 * 256, {.devices = 1, .check = true, .seed = 3, .max_delay_us = 40});
    auto a = rig.make_unit({60}, 60), b = rig.make_unit({60}, 60);
    const auto first = rig.streamer->enqueue({writes(*a), reads(*b)});
    Ticket held{};
    if (blocked) held = b->unit->clock.issue(TicketKind::kPublish);
    const auto second = rig.streamer->enqueue({writes(*b), reads(*a)});
    const auto third = rig.streamer->enqueue({writes(*a, true), reads(*b)});
    rig.wait(first, 0);
    rig.wait(first, 1);
    rig.streamer->gradients_done(first, 0, *rig.compute);
    rig.streamer->close(first, *rig.compute);
    const auto abort = [&] { rig.streamer->abort(second, *rig.compute); };
    std::thread aborter;
    if (other_thread) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(60 * round % 500));
        abort();
      });
    }
    bool closed = false;
    try {
      int step = 0;
      const auto next = [&] { return (!blocked || other_thread) && step++ < steps; };
      if (next()) {
        const UnitPlace place = rig.wait(second, 0);
        if (!other_thread) rig.add(place, *b, 1);
      }
      if (next()) rig.wait(second, 1);
      if (next()) rig.streamer->weights_done(second, 0, *rig.compute);
      if (next()) rig.streamer->gradients_done(second, 0, *rig.compute);
      if (next()) rig.streamer->weights_done(second, 1, *rig.compute);
      if (next()) std::this_thread::sleep_for(milliseconds(2));
      if (next()) {
        rig.streamer->close(second, *rig.compute);
        closed = true;
      }
    } catch (const Poisoned&) {
      EXPECT_TRUE(other_thread);
    }
    if (aborter.joinable()) aborter.join();
    abort();
    abort();  // a second time, or after close: nothing
    rig.streamer->close(second, *rig.compute);
    if (blocked) b->unit->clock.poison(held);
    EXPECT_FALSE(blocked && closed && !other_thread);
    rig.streamer->abort(third, *rig.compute);
    ASSERT_TRUE(rig.streamer->wait_idle(kLong)) << round;
    ASSERT_TRUE(settled(*a) && settled(*b)) << round;
    a->unit->clock.new_epoch();
    b->unit->clock.new_epoch();
    const auto last = rig.streamer->enqueue({writes(*a), writes(*b)});
    for (const std::size_t i : {0, 1}) {
      RigUnit& unit = i == 0 ? *a : *b;
      const UnitPlace place = rig.wait(last, i);
      EXPECT_TRUE(unit.matches(place.weights));
      rig.add(place, unit, 7);
      rig.streamer->gradients_done(last, i, *rig.compute);
    }
    rig.streamer->close(last, *rig.compute);
    ASSERT_TRUE(rig.streamer->wait_idle(kLong));
    EXPECT_EQ(a->gradients[2], 9u);
    EXPECT_EQ(b->gradients[2], 9u);
    EXPECT_EQ(rig.reports(), kSilent) << round;
  }
}

// One small iteration; throws what the streamer throws, and what a gradient download finished with.
void iteration(StreamerRig& rig, RigUnit& a, RigUnit& b) {
  std::vector<std::uint64_t> jobs;
  std::mutex mutex;
  std::exception_ptr late;
  const auto finished = [&](const std::exception_ptr& failure, const auto&) {
    std::lock_guard lock(mutex);
    if (failure && !late) late = failure;
  };
  std::exception_ptr failure;
  try {
    jobs.push_back(rig.streamer->enqueue({reads(a), reads(b)}));
    jobs.push_back(rig.streamer->enqueue({writes(b), writes(a)}));
    for (const std::size_t i : {0, 1}) {
      EXPECT_TRUE((i == 0 ? a : b).matches(rig.wait(jobs[0], i).weights));
      rig.streamer->weights_done(jobs[0], i, *rig.compute);
    }
    rig.streamer->close(jobs[0], *rig.compute);
    for (const std::size_t i : {0, 1}) {
      RigUnit& unit = i == 0 ? b : a;
      const UnitPlace place = rig.wait(jobs[1], i);
      EXPECT_TRUE(unit.matches(place.weights));
      rig.add(place, unit, 1);
      rig.streamer->gradients_done(jobs[1], i, *rig.compute, finished);
    }
    rig.streamer->close(jobs[1], *rig.compute);
  } catch (...) {
    failure = std::current_exception();
    for (const auto job : jobs) rig.streamer->abort(job, *rig.compute);
  }
  ASSERT_TRUE(rig.streamer->wait_idle(kLong));
  if (failure) std::rethrow_exception(failure);
  if (late) std::rethrow_exception(late);
}

void run_until_no_failure(bool device_calls) {
  int failures = 0;
  for (std::int64_t at = 0;; ++at) {
    // Without the checker where calls fail: its own calls (fills of places given back) may fail without harm.
    StreamerRig rig(9 * 256, {.devices = 1, .check = !device_calls, .seed = 4, .max_delay_us = 10});
    auto a = rig.make_unit({60, 150}, 60), b = rig.make_unit({100}, 70);
    if (device_calls) {
      rig.probe.fail_after(at);
    } else {
      rig.backend.fail_copy_after(at);
    }
    bool threw = false;
    try {
      iteration(rig, *a, *b);
    } catch (const DriverError&) {
      threw = true;
    } catch (const Poisoned&) {  // someone who depends on what failed was asked first
      threw = true;
    }
    const bool reached =
        device_calls ? rig.probe.left_until_failure() < 0
                     : rig.engine->copies(Direction::kHostToDevice) + rig.engine->copies(Direction::kDeviceToHost) >
                           static_cast<std::uint64_t>(at);
    EXPECT_EQ(threw, reached) << "failure at " << at;
    rig.probe.fail_after(-1);
    rig.backend.fail_copy_after(-1);
    ASSERT_TRUE(settled(*a) && settled(*b)) << "failure at " << at;
    a->unit->clock.new_epoch();
    b->unit->clock.new_epoch();
    iteration(rig, *a, *b);
    for (Word i = 0; i < 60; ++i) EXPECT_EQ(a->gradients[i], 1 + i);
    for (Word i = 0; i < 70; ++i) EXPECT_EQ(b->gradients[i], 1 + i);
    EXPECT_EQ(rig.reports(), kSilent) << "failure at " << at;
    failures += threw;
    if (!reached) break;
  }
  EXPECT_GE(failures, device_calls ? 40 : 10);
}

TEST(StageRelease, AFailureOfAnyCopyIsSeenAndOvercome) { run_until_no_failure(false); }

TEST(StageRelease, AFailureOfAnyDeviceCallIsSeenAndOvercome) { run_until_no_failure(true); }

TEST(StageRelease, ClosePoisonsGradientsNeverHandedOver) {
  StreamerRig rig(16384);
  auto a = rig.make_unit({64}, 64);
  const auto job = rig.streamer->enqueue({writes(*a)});
  const Ticket take = a->unit->clock.issue(TicketKind::kGradientTake);
  rig.wait(job, 0);
  rig.streamer->close(job, *rig.compute);
  EXPECT_EQ(a->unit->clock.wait(take, kLong), TicketState::kPoisoned);
  a->unit->clock.poison(take);
  ASSERT_TRUE(rig.streamer->wait_idle(kLong));
  EXPECT_TRUE(settled(*a));
}

TEST(StageRelease, EndsWithJobsInEveryState) {
  for (const bool engine_first : {false, true}) {
    for (const bool blocked : {false, true}) {
      StreamerRig rig(16384, {.devices = 1, .check = true, .seed = 2, .max_delay_us = 50});
      auto a = rig.make_unit({64, 800}, 64), b = rig.make_unit({64}, 64);
      Ticket publish{}, take{};
      const auto first = rig.streamer->enqueue({writes(*a), reads(*b)});
      if (blocked) publish = b->unit->clock.issue(TicketKind::kPublish);
      if (blocked) take = a->unit->clock.issue(TicketKind::kGradientTake);
      rig.streamer->enqueue({writes(*b), writes(*a)});
      rig.streamer->enqueue({writes(*a)});
      rig.wait(first, 0);
      rig.streamer->gradients_done(first, 0, *rig.compute);
      if (engine_first) rig.engine.reset();
      rig.streamer.reset();
      if (blocked) b->unit->clock.poison(publish);
      if (blocked) a->unit->clock.poison(take);
      EXPECT_TRUE(settled(*a) && settled(*b)) << engine_first << blocked;
    }
  }
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of many threads
TEST(StageRelease, AForkedChildEndsWithoutWaitingForThreadsItDoesNotHave) {
  StreamerRig rig(16384);
  auto a = rig.make_unit({64}, 64);
  const Ticket publish = a->unit->clock.issue(TicketKind::kPublish);
  rig.streamer->enqueue({writes(*a)});
  const pid_t child = fork();
  if (child == 0) {
    alarm(10);
    rig.streamer.reset();
    rig.engine.reset();
    _exit(7);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7) << status;
  a->unit->clock.poison(publish);
}
#endif

TEST(StageRelease, EnqueueAfterTheEngineEndedPoisonsItsTickets) {
  StreamerRig rig(16384);
  auto a = rig.make_unit({64}, 64);
  rig.engine->shutdown();
  EXPECT_THROW(rig.streamer->enqueue({writes(*a, true)}), Error);
  EXPECT_EQ(a->unit->clock.issued(TicketKind::kGradientLoad), 1u);
  EXPECT_TRUE(settled(*a));
  EXPECT_TRUE(rig.streamer->wait_idle(kNow));
}

}  // namespace
}  // namespace roundpipe
