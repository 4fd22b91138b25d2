#include "core/optimizer_queue.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/trace.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{60000};

std::shared_ptr<WeightUnit> make_unit(HappensBefore* checker = nullptr) {
  auto unit = std::make_shared<WeightUnit>(checker);
  unit->id = 42;
  return unit;
}

Update simple(std::function<void()> body) {
  Update update;
  update.elements = 1;
  update.body = [body = std::move(body)](std::size_t, std::size_t) { body(); };
  return update;
}

TEST(OptimizerQueue, UpdatesRunInOrderAndWhole) {
  OptimizerQueue queue(3, nullptr);
  EXPECT_EQ(queue.threads(), 3U);
  std::vector<int> order;
  std::vector<int> values(100000);
  std::uint64_t last = 0;
  for (int i = 0; i < 20; ++i) {
    Update update;
    update.elements = values.size();
    update.grain = 1000;
    update.body = [&, i](std::size_t begin, std::size_t end) {
      if (begin == 0) order.push_back(i);
      // Each needs what the one before it left, in every element.
      for (std::size_t k = begin; k < end; ++k) values[k] = values[k] == i ? i + 1 : -1000;
    };
    const std::uint64_t number = queue.submit(std::move(update));
    EXPECT_EQ(number, last + 1);
    last = number;
  }
  ASSERT_TRUE(queue.wait(last, kLong));
  for (int i = 0; i < 20; ++i) EXPECT_EQ(order[static_cast<std::size_t>(i)], i);
  for (const int value : values) ASSERT_EQ(value, 20);
}

TEST(OptimizerQueue, AnUpdateWaitsForItsTicketAndEndsIt) {
  OptimizerQueue queue(2, nullptr);
  auto unit = make_unit();
  const Ticket upload = unit->clock.issue(TicketKind::kUpload);
  std::atomic<bool> ran{false};
  Update update = simple([&] { ran = true; });
  update.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
  const std::uint64_t number = queue.submit(std::move(update));
  EXPECT_FALSE(queue.wait(number, milliseconds(60)));
  EXPECT_FALSE(ran);
  EXPECT_EQ(unit->clock.completed(TicketKind::kPublish), 0U);
  unit->clock.complete(upload);
  EXPECT_TRUE(queue.wait(number, kLong));
  EXPECT_TRUE(ran);
  EXPECT_EQ(unit->clock.completed(TicketKind::kPublish), 1U);
  EXPECT_EQ(unit->clock.state(unit->clock.issue(TicketKind::kUpload)), TicketState::kReady);
}

TEST(OptimizerQueue, AnUpdateInPlaceWaitsForAllItsTickets) {
  OptimizerQueue queue(2, nullptr);
  auto unit = make_unit();
  const Ticket write = unit->clock.issue(TicketKind::kGradientWrite), upload = unit->clock.issue(TicketKind::kUpload);
  std::atomic<bool> ran{false};
  Update update = simple([&] { ran = true; });
  update.tickets = {{unit, unit->clock.issue(TicketKind::kGradientTake)},
                    {unit, unit->clock.issue(TicketKind::kPublish)}};
  const std::uint64_t number = queue.submit(std::move(update));
  unit->clock.complete(write);
  EXPECT_FALSE(queue.wait(number, milliseconds(60)));
  EXPECT_FALSE(ran) << "an upload still reads the weights";
  unit->clock.complete(upload);
  EXPECT_TRUE(queue.wait(number, kLong));
  EXPECT_TRUE(ran);
  EXPECT_EQ(unit->clock.state(unit->clock.issue(TicketKind::kUpload)), TicketState::kReady);
  EXPECT_EQ(unit->clock.state(unit->clock.issue(TicketKind::kGradientWrite)), TicketState::kReady);
}

TEST(OptimizerQueue, NobodyWaitsBehindAnUpdateThatIsNotReady) {
  OptimizerQueue queue(2, nullptr);
  auto late = make_unit(), ready = make_unit();
  for (const auto& unit : {late, ready}) unit->clock.set_observer([&queue] { queue.poke(); });
  const Ticket write = late->clock.issue(TicketKind::kGradientWrite);
  std::vector<int> order;
  Update first = simple([&] { order.push_back(1); });
  first.tickets = {{late, late->clock.issue(TicketKind::kGradientTake)}};
  const std::uint64_t waits = queue.submit(std::move(first));
  // As a download that needs a place: it is over only when a later update has ended.
  Update second = simple([&] { order.push_back(2); });
  second.tickets = {{ready, ready->clock.issue(TicketKind::kGradientTake)}};
  ASSERT_TRUE(queue.wait(queue.submit(std::move(second)), kLong));
  Update same_unit = simple([&] { order.push_back(4); });
  same_unit.tickets = {{late, late->clock.issue(TicketKind::kPublish)}};  // ready, but what came before may prepare it
  queue.submit(std::move(same_unit));
  const std::uint64_t last = queue.submit(simple([&] { order.push_back(3); }));
  EXPECT_FALSE(queue.wait(last, milliseconds(30))) << "without tickets it keeps its turn";
  late->clock.complete(write);
  EXPECT_TRUE(queue.wait(last, kLong));
  EXPECT_TRUE(queue.wait(waits, milliseconds(0)));
  EXPECT_EQ(order, (std::vector<int>{2, 1, 4, 3}));
}

TEST(OptimizerQueue, ANumberMayBeWaitedForBeforeItsUpdateComes) {
  OptimizerQueue queue(2, nullptr);
  const std::uint64_t early = queue.reserve(), given_up = queue.reserve(), never = queue.reserve();
  EXPECT_TRUE(queue.wait(queue.submit(simple([] {})), kLong)) << "later ones do not wait for it";
  EXPECT_FALSE(queue.wait(early, milliseconds(10)));
  bool ran = false;
  std::thread waiter([&] { EXPECT_TRUE(queue.wait(early, kLong)); });
  queue.submit(early, simple([&] { ran = true; }));
  waiter.join();
  EXPECT_TRUE(ran);
  EXPECT_THROW(queue.submit(early, simple([] {})), InvalidArgument);
  queue.give_up(given_up, std::make_exception_ptr(std::runtime_error("did not arrive")));
  EXPECT_THROW(queue.wait(given_up, kLong), std::runtime_error);
  EXPECT_THROW(queue.submit(given_up, simple([] {})), InvalidArgument);
  queue.shutdown();
  EXPECT_THROW(queue.wait(never, kLong), Poisoned);
  EXPECT_THROW(queue.submit(never, simple([] {})), Error);
  EXPECT_THROW(queue.reserve(), Error);
  queue.give_up(never, nullptr);  // too late, and harmless
}

TEST(OptimizerQueue, OnePoisonedTicketPoisonsAllOfAnUpdate) {
  OptimizerQueue queue(2, nullptr);
  auto unit = make_unit();
  unit->clock.poison(unit->clock.issue(TicketKind::kUpload));
  Update update = simple([] { FAIL() << "ran on a poisoned ticket"; });
  update.tickets = {{unit, unit->clock.issue(TicketKind::kGradientTake)},
                    {unit, unit->clock.issue(TicketKind::kPublish)}};
  EXPECT_THROW(queue.wait(queue.submit(std::move(update)), kLong), Poisoned);
  EXPECT_EQ(unit->clock.state(unit->clock.issue(TicketKind::kGradientWrite)), TicketState::kPoisoned);
  EXPECT_EQ(unit->clock.state(unit->clock.issue(TicketKind::kUpload)), TicketState::kPoisoned);
  unit->clock.poison(unit->clock.issue(TicketKind::kGradientWrite));
}

TEST(OptimizerQueue, AFailurePoisonsItsTicketAndOnlyItsWaiterHears) {
  OptimizerQueue queue(3, nullptr);
  auto unit = make_unit();
  Update failing;
  failing.elements = 1000;
  failing.grain = 10;
  failing.body = [](std::size_t begin, std::size_t) {
    if (begin == 0) throw std::runtime_error("lr is NaN");
  };
  failing.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
  const Ticket upload = unit->clock.issue(TicketKind::kUpload);
  Update dependent = simple([] { FAIL() << "ran on poisoned weights"; });
  dependent.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
  bool ran = false;
  const std::uint64_t first = queue.submit(std::move(failing)), second = queue.submit(std::move(dependent)),
                      third = queue.submit(simple([&] { ran = true; }));
  EXPECT_TRUE(queue.wait(third, kLong));
  EXPECT_TRUE(ran);
  EXPECT_EQ(unit->clock.state(upload), TicketState::kPoisoned);
  try {
    queue.wait(second, kLong);
    FAIL() << "the poison was lost";
  } catch (const Poisoned& error) {
    EXPECT_NE(std::string(error.what()).find("unit 42"), std::string::npos) << error.what();
  }
  try {
    queue.wait(first, kLong);
    FAIL() << "the failure was lost";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "lr is NaN");
  }
  EXPECT_TRUE(queue.wait(first, kLong)) << "a failure is told once";
  EXPECT_EQ(queue.take_failure(), nullptr);
  EXPECT_EQ(unit->clock.completed(TicketKind::kPublish), 2U);
}

TEST(OptimizerQueue, FailuresNobodyWaitedForAreKeptWithinBounds) {
  OptimizerQueue queue(1, nullptr);
  std::uint64_t last = 0;
  for (int i = 0; i < 6000; ++i) {
    last = queue.submit(simple([i] { throw std::runtime_error("failure " + std::to_string(i)); }));
  }
  EXPECT_THROW(queue.wait(last, kLong), std::runtime_error);
  std::vector<std::string> kept;
  while (const std::exception_ptr failure = queue.take_failure()) {
    try {
      std::rethrow_exception(failure);
    } catch (const std::runtime_error& error) {
      kept.push_back(error.what());
    }
  }
  ASSERT_GE(kept.size(), 1000U);
  EXPECT_LE(kept.size(), 4096U);
  EXPECT_EQ(kept.front(), "failure 0");
  EXPECT_EQ(kept.back(), "failure 5998");
}

TEST(OptimizerQueue, MisuseIsRefused) {
  OptimizerQueue queue(1, nullptr);
  EXPECT_THROW(queue.wait(1, milliseconds(0)), InvalidArgument);
  EXPECT_THROW(queue.wait(0, milliseconds(0)), InvalidArgument);
  Update no_body;
  no_body.elements = 5;
  EXPECT_THROW(queue.submit(no_body), InvalidArgument);
  Update no_unit = simple([] {});
  no_unit.tickets = {{nullptr, Ticket{}}};
  EXPECT_THROW(queue.submit(no_unit), InvalidArgument);
  EXPECT_TRUE(queue.wait(queue.submit(Update{}), kLong)) << "nothing to do is not an error";
}

TEST(OptimizerQueue, ShutdownPoisonsWhatHasNotBegun) {
  auto unit = make_unit();
  const Ticket upload = unit->clock.issue(TicketKind::kUpload);  // never completes
  std::uint64_t stuck = 0, behind = 0;
  std::thread waiter;
  OptimizerQueue queue(2, nullptr);
  Update update = simple([] { FAIL() << "ran though its ticket never was ready"; });
  update.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
  stuck = queue.submit(std::move(update));
  behind = queue.submit(simple([] { FAIL() << "ran after shutdown"; }));
  waiter = std::thread([&] { EXPECT_THROW(queue.wait(behind, kLong), Poisoned); });
  std::this_thread::sleep_for(milliseconds(30));
  const auto begin = std::chrono::steady_clock::now();
  queue.shutdown();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  waiter.join();
  EXPECT_THROW(queue.wait(stuck, kLong), Poisoned);
  EXPECT_EQ(unit->clock.completed(TicketKind::kPublish), 1U);
  EXPECT_THROW(queue.submit(simple([] {})), Error);
  queue.shutdown();
  unit->clock.complete(upload);
}

TEST(OptimizerQueue, ShutdownLetsTheRunningUpdateEndWell) {
  std::mutex mutex;
  std::condition_variable changed;
  bool begun = false, release = false;
  OptimizerQueue queue(1, nullptr);
  const std::uint64_t number = queue.submit(simple([&] {
    std::unique_lock lock(mutex);
    begun = true;
    changed.notify_all();
    changed.wait(lock, [&] { return release; });
  }));
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return begun; });
  }
  std::thread stopper([&] { queue.shutdown(); });
  std::this_thread::sleep_for(milliseconds(20));
  {
    std::lock_guard lock(mutex);
    release = true;
  }
  changed.notify_all();
  stopper.join();
  EXPECT_TRUE(queue.wait(number, kLong));
}

TEST(OptimizerQueue, ItsLastOwnerMayDieInABody) {
  auto queue = std::make_shared<OptimizerQueue>(2, nullptr);
  auto unit = make_unit();
  Update update = simple([] {});
  update.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
  update.body = [held = queue](std::size_t, std::size_t) { std::this_thread::sleep_for(milliseconds(20)); };
  OptimizerQueue& raw = *queue;
  raw.submit(std::move(update));
  queue.reset();
  EXPECT_EQ(unit->clock.wait(unit->clock.issue(TicketKind::kUpload), kLong), TicketState::kReady);
  while (unit.use_count() != 1) std::this_thread::yield();  // the dispatcher has let go of everything
}

TEST(OptimizerQueue, WhatABodyHoldsIsGoneWhenWaitReturns) {
  OptimizerQueue queue(3, nullptr);
  for (int i = 0; i < 100; ++i) {
    auto held = std::make_shared<int>(0);
    Update update;
    update.elements = 64;
    update.grain = 1;
    update.body = [held](std::size_t, std::size_t) {};
    ASSERT_TRUE(queue.wait(queue.submit(std::move(update)), kLong));
    ASSERT_EQ(held.use_count(), 1);
  }
}

TEST(OptimizerQueue, ThreadsAreNamed) {
  OptimizerQueue queue(1, nullptr);
  std::string name;
  queue.wait(queue.submit(simple([&] {
    char text[16];
    pthread_getname_np(pthread_self(), text, sizeof text);
    name = text;
  })),
             kLong);
  EXPECT_EQ(name, "rp-optimizer");
}

TEST(OptimizerQueue, TheEnvironmentSetsTheDefaultThreads) {
  setenv("ROUNDPIPE_OPTIMIZER_THREADS", "3", 1);
  EXPECT_EQ(OptimizerQueue(0, nullptr).threads(), 3U);
  EXPECT_EQ(OptimizerQueue(2, nullptr).threads(), 2U);
  for (const char* bad : {"0", "-1", "two", "3x", "99999"}) {
    setenv("ROUNDPIPE_OPTIMIZER_THREADS", bad, 1);
    EXPECT_THROW(OptimizerQueue(0, nullptr), InvalidArgument) << bad;
  }
  unsetenv("ROUNDPIPE_OPTIMIZER_THREADS");
  EXPECT_GE(OptimizerQueue(0, nullptr).threads(), 1U);
}

TEST(OptimizerQueue, UpdatesAreTraced) {
  Trace::global().start(100);
  OptimizerQueue queue(1, nullptr);
  auto unit = make_unit();
  Update update = simple([] { std::this_thread::sleep_for(milliseconds(2)); });
  update.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
  queue.wait(queue.submit(std::move(update)), kLong);
  queue.shutdown();
  bool found = false;
  for (const Span& span : Trace::global().stop()) {
    found = found || (span.kind == SpanKind::kUpdate && span.argument == 42 && span.end_ns - span.begin_ns > 1000000);
  }
  EXPECT_TRUE(found);
}

TEST(OptimizerQueue, AForkedChildLeavesItAlone) {
  auto queue = std::make_unique<OptimizerQueue>(2, nullptr);
  ASSERT_TRUE(queue->wait(queue->submit(simple([] {})), kLong));
  const pid_t child = fork();
  if (child == 0) {
    queue.reset();  // would wait for threads that this process does not have
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(OptimizerQueue, TheCheckerSeesUpdatesOrderedByTicketsAndWaits) {
  for (const int dropped : {0, 1}) {
    HappensBefore checker;
    OptimizerQueue queue(3, &checker);
    auto unit = make_unit(&checker);
    if (dropped != 0) unit->clock.drop_rule_for_test(dropped);
    std::vector<char> weights(4096);
    checker.access(checker.this_thread(), Access::kWrite, weights.data(), weights.size(),
                   "initialised by the submitter");
    const Ticket upload = unit->clock.issue(TicketKind::kUpload);
    Update update;
    update.tickets = {{unit, unit->clock.issue(TicketKind::kPublish)}};
    update.elements = weights.size();
    update.grain = 64;
    update.accesses = {{Access::kWrite, weights.data(), weights.size(), "update"}};
    update.body = [&](std::size_t begin, std::size_t end) {
      checker.access(checker.this_thread(), Access::kWrite, weights.data() + begin, end - begin, "slice");
    };
    const auto reader = checker.add_actor("copy stream");
    checker.join(reader, checker.this_thread());
    const std::uint64_t number = queue.submit(std::move(update));
    std::thread([&] {
      // As a copy lane does: the stream reads, the lane's thread learns of the end, and completes the ticket.
      checker.access(reader, Access::kRead, weights.data(), weights.size(), "upload");
      checker.join(checker.this_thread(), reader);
      unit->clock.complete(upload);
    }).join();
    ASSERT_TRUE(queue.wait(number, kLong));
    checker.access(checker.this_thread(), Access::kRead, weights.data(), weights.size(), "after wait");
    const std::vector<std::string> reports = checker.take_reports();
    if (dropped == 0) {
      EXPECT_TRUE(reports.empty()) << reports.front();
    } else {
      EXPECT_FALSE(reports.empty()) << "the update overwrote weights that the upload reads";
    }
  }
}

TEST(OptimizerQueue, SubmittersOnManyThreads) {
  OptimizerQueue queue(3, nullptr);
  auto unit = make_unit();
  std::mutex order;  // tickets in the order of submission, or the queue would wait for itself
  int sum = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::uint64_t last = 0;
      for (int i = 0; i < 50; ++i) {
        Update update = simple([&sum] { ++sum; });
        std::lock_guard lock(order);
        update.tickets = {{unit, unit->clock.issue(TicketKind::kGradientTake)}};
        last = queue.submit(std::move(update));
      }
      EXPECT_TRUE(queue.wait(last, kLong));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 200);
  EXPECT_EQ(unit->clock.completed(TicketKind::kGradientTake), 200U);
}

}  // namespace
}  // namespace roundpipe
