#include "core/transfer_engine.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_backend.h"
#include "probe_device.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{20'000};
constexpr milliseconds kNow{0};

std::vector<unsigned char> pattern(std::size_t bytes, unsigned seed) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(seed * 131 + i * 7 + (i >> 8));
  return data;
}

TransferRequest copy_request(Direction direction, Lane lane, void* dst, const void* src, std::size_t bytes) {
  TransferRequest request;
  request.direction = direction;
  request.lane = lane;
  request.segments = {{dst, src, bytes}};
  return request;
}

TransferRequest upload(void* dst, const void* src, std::size_t bytes, Lane lane = Lane::kBulk) {
  return copy_request(Direction::kHostToDevice, lane, dst, src, bytes);
}

// A switch that a request's `ready` looks at.
struct Switch {
  std::atomic<int> state{0};  // 0: not yet, 1: ready, 2: poisoned
  std::function<Readiness()> ready() {
    return [this] {
      const int now = state.load();
      return now == 0 ? Readiness::kNotYet : now == 1 ? Readiness::kReady : Readiness::kPoisoned;
    };
  }
};

class TransferEngineTest : public testing::Test {
 protected:
  void open(TransferOptions options = {}, HostBackendOptions backend_options = {}) {
    engine.reset();
    backend = std::make_unique<HostBackend>(backend_options);
    probe = std::make_unique<ProbeDevice>(backend->device(0));
    options.checker = backend->checker();
    engine = std::make_unique<TransferEngine>(*probe, options);
    compute = backend->device(0).wrap_compute_stream(0);
  }

  std::unique_ptr<HostBackend> backend;
  std::unique_ptr<ProbeDevice> probe;
  std::unique_ptr<Stream> compute;
  std::unique_ptr<TransferEngine> engine;
};

TEST_F(TransferEngineTest, MovesRandomSegmentsOnEveryLaneUnderDelays) {
  open({.chunk_bytes = 64}, {.devices = 1, .check = true, .seed = 5, .max_delay_us = 30});
  std::mt19937 random(1);
  struct Sent {
    std::vector<unsigned char> source, target;
    std::shared_ptr<Handover> handover;
  };
  std::vector<std::unique_ptr<Sent>> sent;
  for (unsigned i = 0; i < 120; ++i) {
    const std::size_t bytes = random() % 500;
    auto one = std::make_unique<Sent>();
    one->source = pattern(bytes, i);
    one->target.assign(bytes, 0);
    TransferRequest request;
    request.direction = static_cast<Direction>(random() % 2);
    request.lane = static_cast<Lane>(random() % 2);
    for (std::size_t begin = 0; begin < bytes;) {
      const std::size_t size = std::min<std::size_t>(bytes - begin, random() % 150);
      request.segments.push_back({one->target.data() + begin, one->source.data() + begin, size});
      begin += size;
    }
    one->handover = engine->submit(std::move(request));
    sent.push_back(std::move(one));
  }
  for (const auto& one : sent) {
    ASSERT_TRUE(one->handover->wait_complete(kLong));
    EXPECT_TRUE(one->handover->complete());
    EXPECT_EQ(one->source, one->target);
  }
  EXPECT_TRUE(engine->drain(kLong));
  EXPECT_EQ(backend->checker()->take_reports(), std::vector<std::string>());
}

TEST_F(TransferEngineTest, CountsBytesAndCutsChunksExactly) {
  open({.chunk_bytes = 100});
  const std::vector<std::size_t> sizes = {1, 99, 100, 101, 0, 250, 30, 30, 30, 30};
  const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
  auto source = pattern(total, 1);
  std::vector<unsigned char> target(total);
  for (const Lane lane : {Lane::kBulk, Lane::kActivations}) {
    engine->reset_counters();
    const std::size_t copies_before = probe->copies().size();
    TransferRequest request = upload(nullptr, nullptr, 0, lane);
    request.traffic = Traffic::kBuffers;
    request.segments.clear();
    std::size_t offset = 0, expected_copies = 0;
    for (const std::size_t size : sizes) {
      request.segments.push_back({target.data() + offset, source.data() + offset, size});
      offset += size;
      expected_copies += lane == Lane::kBulk ? (size + 99) / 100 : (size != 0);
    }
    ASSERT_TRUE(engine->submit(std::move(request))->wait_complete(kLong));
    EXPECT_EQ(engine->bytes(Direction::kHostToDevice, Traffic::kBuffers), total);
    EXPECT_EQ(engine->bytes(Direction::kHostToDevice, Traffic::kWeights), 0u);
    EXPECT_EQ(engine->bytes(Direction::kDeviceToHost, Traffic::kBuffers), 0u);
    EXPECT_EQ(engine->copies(Direction::kHostToDevice), expected_copies);
    EXPECT_EQ(engine->copies(Direction::kDeviceToHost), 0u);
    EXPECT_EQ(probe->copies().size() - copies_before, expected_copies);
  }
  EXPECT_EQ(source, target);
}

TEST_F(TransferEngineTest, BoundsTheChunksInFlight) {
  open({.chunk_bytes = 16, .bulk_chunks_in_flight = 3}, {.devices = 1, .seed = 3, .max_delay_us = 100});
  auto source = pattern(16 * 40, 2);
  std::vector<unsigned char> target(source.size());
  ASSERT_TRUE(engine->submit(upload(target.data(), source.data(), source.size()))->wait_complete(kLong));
  EXPECT_EQ(source, target);
  EXPECT_EQ(probe->most_in_flight(), 3u);
}

TEST_F(TransferEngineTest, StartsInOrderWithinALaneAndIndependentlyBetweenLanes) {
  open();
  auto source = pattern(64, 3);
  std::vector<unsigned char> a(64), b(64), c(64);
  Switch head;
  TransferRequest first = upload(a.data(), source.data(), 64);
  first.ready = head.ready();
  const auto one = engine->submit(std::move(first));
  const auto two = engine->submit(upload(b.data(), source.data(), 64));
  const auto other_lane = engine->submit(upload(c.data(), source.data(), 64, Lane::kActivations));
  EXPECT_TRUE(other_lane->wait_complete(kLong));
  EXPECT_FALSE(two->wait_issued(milliseconds(20)));
  EXPECT_FALSE(one->wait_issued(kNow));
  EXPECT_FALSE(engine->drain(kNow));
  head.state = 1;
  engine->poke();
  EXPECT_TRUE(two->wait_complete(kLong));
  EXPECT_TRUE(one->complete());
  const auto copies = probe->copies();
  ASSERT_EQ(copies.size(), 3u);
  EXPECT_EQ(copies[1].dst, a.data());
  EXPECT_EQ(copies[2].dst, b.data());
}

TEST_F(TransferEngineTest, ActivationsOvertakeBulk) {
  open({.chunk_bytes = 64, .bulk_chunks_in_flight = 2}, {.devices = 1, .seed = 1, .max_delay_us = 2000});
  auto source = pattern(64 * 100, 4);
  std::vector<unsigned char> bulk(source.size()), activation(64);
  const auto slow = engine->submit(upload(bulk.data(), source.data(), source.size()));
  const auto fast = engine->submit(upload(activation.data(), source.data(), 64, Lane::kActivations));
  ASSERT_TRUE(fast->wait_complete(kLong));
  EXPECT_FALSE(slow->complete());
  backend->set_delays(0, 0);
  ASSERT_TRUE(slow->wait_complete(kLong));
  EXPECT_EQ(bulk, source);
}

TEST_F(TransferEngineTest, NoPokeIsLost) {
  open();
  auto source = pattern(8, 5);
  std::vector<unsigned char> target(8);
  std::mt19937 random(2);
  for (int i = 0; i < 1000; ++i) {
    Switch gate;
    TransferRequest request = upload(target.data(), source.data(), 8);
    request.ready = gate.ready();
    const auto handover = engine->submit(std::move(request));
    for (unsigned spin = random() % 3000; spin > 0; --spin) std::atomic_signal_fence(std::memory_order_seq_cst);
    gate.state = 1;
    engine->poke();
    ASSERT_TRUE(handover->wait_complete(kLong)) << "after " << i << " rounds";
  }
}

TEST_F(TransferEngineTest, APokeDuringTheQuestionIsNotLost) {
  open();
  auto source = pattern(8, 5);
  std::vector<unsigned char> target(8);
  TransferRequest request = upload(target.data(), source.data(), 8);
  int asked = 0;
  request.ready = [&] {
    if (asked++ > 0) return Readiness::kReady;
    engine->poke();  // what it waits for comes after it has looked and before it has answered; nobody pokes again
    return Readiness::kNotYet;
  };
  EXPECT_TRUE(engine->submit(std::move(request))->wait_complete(milliseconds(5'000)));
}

TEST_F(TransferEngineTest, BackPressureBlocksUntilBytesAreGone) {
  open();
  auto source = pattern(100, 6);
  std::vector<unsigned char> target(100);
  Switch gate;
  TransferRequest blocked = upload(target.data(), source.data(), 100);
  blocked.ready = gate.ready();
  engine->submit(std::move(blocked), 50);  // nothing is outstanding yet, so it is taken whatever its size
  std::atomic<bool> submitted{false};
  auto second = std::async(std::launch::async, [&] {
    const auto handover = engine->submit(upload(target.data(), source.data(), 10), 50);
    submitted = true;
    return handover;
  });
  const auto unlimited = engine->submit(upload(target.data(), source.data(), 10));
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(submitted.load());
  gate.state = 1;
  engine->poke();
  EXPECT_TRUE(second.get()->wait_complete(kLong));
}

TEST_F(TransferEngineTest, ShutdownFailsWhatWaitsAndUnblocksSubmitters) {
  open();
  auto source = pattern(100, 7);
  std::vector<unsigned char> target(100);
  Switch gate;
  std::atomic<int> finished{0};
  std::vector<std::shared_ptr<Handover>> handovers;
  for (int i = 0; i < 5; ++i) {
    TransferRequest request = upload(target.data(), source.data(), 100);
    request.ready = gate.ready();
    request.finished = [&](const std::exception_ptr& failure) {
      EXPECT_THROW(std::rethrow_exception(failure), Poisoned);
      ++finished;
    };
    handovers.push_back(engine->submit(std::move(request)));
  }
  auto blocked = std::async(std::launch::async, [&] { engine->submit(upload(target.data(), source.data(), 10), 50); });
  std::this_thread::sleep_for(milliseconds(5));
  engine->shutdown();
  EXPECT_EQ(finished.load(), 5);
  EXPECT_THROW(blocked.get(), Error);
  for (const auto& handover : handovers) {
    EXPECT_TRUE(handover->complete());
    EXPECT_THROW(handover->wait_issued(kNow), Poisoned);
    EXPECT_THROW(handover->wait_complete(kNow), Poisoned);
    EXPECT_THROW(handover->order_after(*compute), Poisoned);
  }
  EXPECT_THROW(engine->submit(upload(target.data(), source.data(), 10)), Error);
  EXPECT_TRUE(engine->drain(kNow));
  engine->shutdown();  // again: nothing
}

TEST_F(TransferEngineTest, ShutdownAtRandomMomentsFinishesEveryRequestOnce) {
  std::mt19937 random(4);
  auto source = pattern(400, 8);
  for (int round = 0; round < 60; ++round) {
    open({.chunk_bytes = 50}, {.devices = 1, .seed = static_cast<std::uint64_t>(round), .max_delay_us = 40});
    std::vector<std::vector<unsigned char>> targets(6, std::vector<unsigned char>(400));
    std::atomic<int> finished{0};
    std::vector<std::shared_ptr<Handover>> handovers;
    for (std::size_t i = 0; i < 6; ++i) {
      TransferRequest request = upload(targets[i].data(), source.data(), 400, static_cast<Lane>(i % 2));
      request.finished = [&](const std::exception_ptr&) { ++finished; };
      handovers.push_back(engine->submit(std::move(request)));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    engine.reset();
    EXPECT_EQ(finished.load(), 6);
    for (const auto& handover : handovers) EXPECT_TRUE(handover->complete());
  }
}

TEST_F(TransferEngineTest, AFailureEndsItsRequestAlone) {
  // 3 requests of 4 chunks: whatever copy fails, its own request fails and the others are whole.
  for (std::int64_t failing = 0; failing < 12; ++failing) {
    open({.chunk_bytes = 32}, {.devices = 1, .seed = 9, .max_delay_us = 20, .fail_copy_at = failing});
    auto source = pattern(128, static_cast<unsigned>(failing));
    std::vector<std::vector<unsigned char>> targets(3, std::vector<unsigned char>(128));
    std::vector<std::shared_ptr<Handover>> handovers;
    for (auto& target : targets) handovers.push_back(engine->submit(upload(target.data(), source.data(), 128)));
    for (std::size_t i = 0; i < 3; ++i) {
      if (static_cast<std::int64_t>(i) == failing / 4) {
        EXPECT_THROW(handovers[i]->wait_complete(kLong), DriverError) << failing;
      } else {
        EXPECT_TRUE(handovers[i]->wait_complete(kLong)) << failing;
        EXPECT_EQ(targets[i], source);
      }
    }
  }
}

TEST_F(TransferEngineTest, AnyDeviceCallMayThrow) {
  auto source = pattern(96, 1);
  int failures = 0;
  for (std::int64_t call = 0;; ++call) {
    open({.chunk_bytes = 32}, {.devices = 1, .seed = 2, .max_delay_us = 10});
    std::vector<unsigned char> first(96), second(96);
    std::atomic<int> finished{0};
    auto alive = std::make_shared<int>(1);
    const std::weak_ptr<int> watch = alive;
    probe->fail_after(call);
    std::vector<std::shared_ptr<Handover>> handovers;
    for (auto* target : {&first, &second}) {
      TransferRequest request = upload(target->data(), source.data(), 96);
      request.before = [this](Stream& stream) {
        const auto event = engine->take_event();
        probe->record(*event, *compute);
        probe->wait(stream, *event);
      };
      request.finished = [&, watch](const std::exception_ptr&) {
        EXPECT_FALSE(watch.expired());
        ++finished;
      };
      request.keep_alive = alive;
      handovers.push_back(engine->submit(std::move(request)));
    }
    alive.reset();
    ASSERT_TRUE(engine->drain(kLong)) << "call " << call;
    const bool reached = probe->left_until_failure() < 0;
    probe->fail_after(-1);
    EXPECT_EQ(finished.load(), 2);
    EXPECT_TRUE(watch.expired());
    int failed = 0;
    for (std::size_t i = 0; i < 2; ++i) {
      try {
        ASSERT_TRUE(handovers[i]->wait_complete(kNow));
        EXPECT_EQ(i == 0 ? first : second, source) << "call " << call;
      } catch (const DriverError&) {
        ++failed;
      }
    }
    EXPECT_EQ(failed, reached ? 1 : 0) << "call " << call;
    failures += failed;
    // The lane works on.
    std::vector<unsigned char> third(96);
    ASSERT_TRUE(engine->submit(upload(third.data(), source.data(), 96))->wait_complete(kLong));
    EXPECT_EQ(third, source);
    if (!reached) break;
  }
  EXPECT_GT(failures, 20);
}

TEST_F(TransferEngineTest, PoisonedOrThrowingQuestionsCopyNothing) {
  open();
  auto source = pattern(8, 1);
  std::vector<unsigned char> target(8);
  const auto make = [&] { return upload(target.data(), source.data(), 8); };
  Switch poisoned;
  poisoned.state = 2;
  TransferRequest one = make();
  one.ready = poisoned.ready();
  one.before = [](Stream&) { ADD_FAILURE() << "must not start"; };
  TransferRequest two = make();
  two.ready = []() -> Readiness { throw InvalidArgument("the reason"); };
  TransferRequest three = make();
  three.before = [](Stream&) { throw InvalidArgument("before"); };
  TransferRequest four = make();
  four.finished = [](const std::exception_ptr&) { throw InvalidArgument("finished"); };
  const auto a = engine->submit(std::move(one)), b = engine->submit(std::move(two));
  const auto c = engine->submit(std::move(three));
  EXPECT_THROW(a->wait_issued(kLong), Poisoned);
  EXPECT_THROW(b->wait_issued(kLong), InvalidArgument);
  EXPECT_THROW(c->wait_complete(kLong), InvalidArgument);
  EXPECT_EQ(probe->copies().size(), 0u);
  EXPECT_EQ(engine->copies(Direction::kHostToDevice), 0u);
  EXPECT_THROW(engine->submit(std::move(four))->wait_complete(kLong), InvalidArgument);
  TransferRequest null_address = make();
  null_address.segments[0].dst = nullptr;
  EXPECT_THROW(engine->submit(std::move(null_address)), InvalidArgument);
  EXPECT_TRUE(engine->submit(make())->wait_complete(kLong));
}

TEST_F(TransferEngineTest, AnEmptyRequestIsOrderedLikeAnyOther) {
  open({}, {.devices = 1, .seed = 1, .max_delay_us = 200});
  auto source = pattern(64, 1);
  std::vector<unsigned char> target(64);
  const auto full = engine->submit(upload(target.data(), source.data(), 64));
  TransferRequest empty = upload(nullptr, nullptr, 0);
  std::atomic<bool> before{false};
  empty.before = [&](Stream&) { before = true; };
  empty.finished = [&](const std::exception_ptr& failure) {
    EXPECT_EQ(failure, nullptr);
    EXPECT_EQ(target, source);
  };
  EXPECT_TRUE(engine->submit(std::move(empty))->wait_complete(kLong));
  EXPECT_TRUE(before.load());
  EXPECT_TRUE(full->complete());
}

TEST_F(TransferEngineTest, OrderAfterNeedsAnIssuedRequest) {
  open();
  auto source = pattern(8, 1);
  std::vector<unsigned char> target(8);
  Switch gate;
  TransferRequest request = upload(target.data(), source.data(), 8);
  request.ready = gate.ready();
  std::atomic<int> issued{0};
  const auto handover = engine->submit(std::move(request));
  handover->on_issued([&] { ++issued; });
  EXPECT_THROW(handover->order_after(*compute), InvalidArgument);
  EXPECT_EQ(issued.load(), 0);
  gate.state = 1;
  engine->poker()();
  ASSERT_TRUE(handover->wait_issued(kLong));
  handover->order_after(*compute);
  EXPECT_EQ(target, source);  // compute is this thread
  ASSERT_TRUE(handover->wait_complete(kLong));
  EXPECT_EQ(issued.load(), 1);
  handover->on_issued([&] { ++issued; });
  EXPECT_EQ(issued.load(), 2);
}

TEST_F(TransferEngineTest, APokerOutlivesItsEngine) {
  open();
  const auto poker = engine->poker();
  poker();
  engine.reset();
  poker();
}

TEST_F(TransferEngineTest, TheCheckerSeesTheOrderOfAHandoverAndItsAbsence) {
  for (const bool ordered : {true, false}) {
    open({}, {.devices = 1, .check = true});
    auto source = pattern(64, 1);
    std::vector<unsigned char> target(64);
    const auto handover = engine->submit(upload(target.data(), source.data(), 64));
    ASSERT_TRUE(handover->wait_issued(kLong));
    ASSERT_TRUE(handover->wait_settled(kLong));  // the timing is kind in both cases
    if (ordered) handover->order_after(*compute);
    backend->device(0).declare(*compute, Access::kRead, target.data(), 64, "compute");
    EXPECT_EQ(backend->checker()->take_reports().empty(), ordered);
  }
  for (const bool ordered : {true, false}) {
    open({}, {.devices = 1, .check = true});
    auto source = pattern(64, 1);
    std::vector<unsigned char> target(64);
    const auto handover = engine->submit(upload(target.data(), source.data(), 64));
    ASSERT_TRUE(ordered ? handover->wait_complete(kLong) : handover->wait_settled(kLong));
    HappensBefore& checker = *backend->checker();
    checker.access(checker.this_thread(), Access::kWrite, source.data(), 64, "host overwrites the source");
    EXPECT_EQ(checker.take_reports().empty(), ordered);
  }
}

}  // namespace
}  // namespace roundpipe
