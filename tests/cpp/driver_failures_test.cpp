// Every driver call that host memory, streams, events and copies make fails once, whichever it is: the failure is a
// typed error, everything is given back, and the next use works.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/activation_store.h"
#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_arena.h"
#include "core/host_backend.h"
#include "core/host_claim.h"
#include "core/pin_limits.h"
#include "core/stage_streamer.h"
#include "core/transfer_engine.h"
#include "failing_backend.h"

namespace roundpipe {
namespace {

constexpr std::chrono::milliseconds kLong{20'000};
constexpr std::size_t kKiB = 1024;
constexpr std::size_t kRange = 64 * kKiB;  // bytes of each of the two weights
constexpr std::size_t kGradients = 40 * kKiB;

unsigned char pattern(std::size_t i) { return static_cast<unsigned char>(i * 31 + (i >> 9)); }

// Weights as a user would have allocated them: two page-aligned ranges with a gap.
class Weights {
 public:
  Weights() {
    base_ = mmap(nullptr, 4 * kRange, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    for (std::size_t i = 0; i < 4 * kRange; ++i) static_cast<unsigned char*>(base_)[i] = pattern(i);
  }
  ~Weights() { munmap(base_, 4 * kRange); }
  unsigned char* at(std::size_t offset) const { return static_cast<unsigned char*>(base_) + offset; }

 private:
  void* base_;
};

// The first failure that a callback told.
struct Late {
  std::mutex mutex;
  std::exception_ptr failure;
  void note(const std::exception_ptr& told) {
    std::lock_guard lock(mutex);
    if (told && !failure) failure = told;
  }
  void rethrow() {
    std::lock_guard lock(mutex);
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }
};

// A short life of everything: weights claimed in place (one locked, one pageable), a streamed job with gradients, an
// activation stashed and fetched, a block that waits in quarantine for an event. Throws what failed; what comes through
// is right.
void life(const std::shared_ptr<FailingBackend>& backend, const Weights& weights) {
  Device& device = backend->device(0);
  HappensBefore* checker = backend->checker();
  std::vector<std::uint64_t> region(64 * kKiB);
  std::vector<unsigned char> activation(5000, 7), fetched(5000);
  for (auto* memory : {&activation, &fetched}) checker->fresh(memory->data(), memory->size());
  Late late;
  const auto arena = HostArena::make(
      backend,
      {.mapping_bytes = 256 * kKiB, .keep_free_bytes = 0, .huge_pages = false, .registration_bytes = 64 * kKiB});
  const HostClaim claim(backend, {{weights.at(0), kRange}, {weights.at(2 * kRange), kRange}},
                        {.registration_bytes = 32 * kKiB, .least_bytes = 1}, nullptr);
  EXPECT_EQ(claim.stats().registered_bytes, 2 * kRange);
  HostBlock gradients = arena->allocate(kGradients, true);
  const auto compute = device.wrap_compute_stream(0);
  TransferEngine engine(device, {.chunk_bytes = 16 * kKiB, .checker = checker, .arena = arena, .fill_threads = 2});
  StageStreamer streamer(device, engine);
  ActivationStore store(arena, checker);
  streamer.set_region(region.data(), region.size() * sizeof(region[0]), *compute);

  const auto unit = std::make_shared<WeightUnit>(checker);
  unit->id = 1;
  for (const HostPiece& piece : claim.pieces(weights.at(0), kRange)) {
    unit->weights.push_back({static_cast<char*>(piece.base),
                             static_cast<std::size_t>(static_cast<unsigned char*>(piece.base) - weights.at(0)),
                             piece.bytes, piece.memory});
  }
  unit->weights.push_back({reinterpret_cast<char*>(weights.at(2 * kRange)), kRange, kRange, HostMemory::kPageable});
  unit->weight_bytes = 2 * kRange;
  unit->gradient_bytes = kGradients;
  unit->clock.set_observer(engine.poker());

  const auto job = streamer.enqueue({UnitUse{.unit = unit, .gradients = true, .gradient_store = gradients.data()}});
  UnitPlace place;
  ASSERT_EQ(streamer.wait_unit(job, 0, *compute, kLong, &place), WaitResult::kDone);
  for (const std::size_t i : {std::size_t{0}, kRange - 1}) {
    ASSERT_EQ(static_cast<unsigned char*>(place.weights)[i], pattern(i));
    ASSERT_EQ(static_cast<unsigned char*>(place.weights)[kRange + i], pattern(2 * kRange + i));
  }
  const auto record =
      store.stash(device, engine, *compute, {{activation.data(), activation.size()}}, Traffic::kActivations, nullptr);
  const std::vector<DeviceBytes> targets{{fetched.data(), fetched.size()}};
  const auto handover = store.fetch(device, engine, *compute, record, targets, Traffic::kInputs, nullptr);
  ASSERT_TRUE(store.fetch_wait(device, *handover, *compute, targets, kLong));
  ASSERT_EQ(fetched, activation);
  ASSERT_TRUE(record->wait_host(kLong));
  for (std::size_t i = 0; i < kGradients; ++i) {
    ASSERT_EQ(static_cast<unsigned char*>(place.gradients)[i], 0);
    static_cast<unsigned char*>(place.gradients)[i] = pattern(i);
  }
  streamer.gradients_done(
      job, 0, *compute,
      [&late](const std::exception_ptr& failure, const std::shared_ptr<std::byte>&) { late.note(failure); });
  streamer.close(job, *compute);
  ASSERT_TRUE(streamer.wait_idle(kLong));
  late.rethrow();
  for (std::size_t i = 0; i < kGradients; ++i) {
    ASSERT_EQ(static_cast<unsigned char*>(gradients.data())[i], pattern(i));
  }
  const std::shared_ptr<Event> event = device.make_event();
  device.record(*event, *compute);
  arena->allocate(1000, false).retire([&device, event] { return device.query(*event); });
  gradients = HostBlock();
  bool thrown = false;
  try {
    ASSERT_TRUE(device.query(*event));
  } catch (const DriverError&) {
    thrown = true;
  }
  streamer.set_region(nullptr, 0);
  if (thrown) throw DriverError("the query failed", 999);
  while (arena->stats().quarantined_bytes != 0) {
  }
}

struct Row {
  DriverCall call;
  int least_failures;  // fewer: the table would no longer test what it says
};

class DriverFailures : public testing::TestWithParam<Row> {};

TEST_P(DriverFailures, NthCallFails) {
  const Row row = GetParam();
  const auto host = std::make_shared<HostBackend>(HostBackendOptions{.check = true, .seed = 3, .max_delay_us = 5});
  const auto backend = std::make_shared<FailingBackend>(host);
  const Weights weights;
  host->checker()->fresh(weights.at(0), 4 * kRange);
  const std::size_t locked_before = read_pin_limits({}).locked_bytes;
  int failures = 0;
  for (std::int64_t nth = 0;; ++nth) {
    backend->fail(row.call, nth);
    bool failed = false;
    try {
      life(backend, weights);
    } catch (const Error& error) {  // DriverError, or Poisoned for what depended on it
      failed = true;
      EXPECT_EQ(dynamic_cast<const InvalidArgument*>(&error), nullptr) << error.what();
    }
    const bool reached = backend->disarm();
    EXPECT_TRUE(reached || !failed) << "nothing was to fail at " << nth;
    failures += failed;
    ASSERT_FALSE(HasFatalFailure()) << nth;
    EXPECT_EQ(backend->held(), 0U) << "registrations or leases left after a failure at " << nth;
    EXPECT_EQ(HostClaim::live(), 0U);
    EXPECT_EQ(read_pin_limits({}).locked_bytes, locked_before);
    if (!reached) break;
  }
  EXPECT_GE(failures, row.least_failures);
  life(backend, weights);  // throws nothing
  EXPECT_EQ(backend->held(), 0U);
  for (const std::string& report : host->checker()->take_reports()) ADD_FAILURE() << report;
}

INSTANTIATE_TEST_SUITE_P(
    Table, DriverFailures,
    testing::Values(Row{DriverCall::kRegister, 8}, Row{DriverCall::kAttachThread, 1}, Row{DriverCall::kMakeStream, 4},
                    Row{DriverCall::kWrapStream, 1}, Row{DriverCall::kMakeEvent, 4}, Row{DriverCall::kRecord, 8},
                    Row{DriverCall::kWait, 3}, Row{DriverCall::kQuery, 1}, Row{DriverCall::kSynchronize, 8},
                    Row{DriverCall::kCopy, 10}, Row{DriverCall::kZero, 1}, Row{DriverCall::kDiscard, 0},
                    Row{DriverCall::kLease, 1}),
    [](const auto& row) { return std::string(kDriverCalls[static_cast<std::size_t>(row.param.call)]); });

}  // namespace
}  // namespace roundpipe
