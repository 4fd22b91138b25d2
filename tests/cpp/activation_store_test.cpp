#include "core/activation_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_backend.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{20'000};
constexpr milliseconds kNow{0};
const std::vector<std::string> kSilent;
using Bytes = std::vector<unsigned char>;

Bytes pattern(std::size_t bytes, std::size_t seed) {
  Bytes data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(seed * 37 + i * 11 + (i >> 8));
  return data;
}

// Tensors of one record, in separate allocations.
struct Tensors {
  std::vector<Bytes> data;
  std::vector<DeviceBytes> ranges() {
    std::vector<DeviceBytes> result;
    for (Bytes& bytes : data) result.push_back({bytes.data(), bytes.size()});
    return result;
  }
  static std::shared_ptr<Tensors> filled(const std::vector<std::size_t>& sizes, std::size_t seed) {
    auto made = std::make_shared<Tensors>();
    for (const std::size_t size : sizes) made->data.push_back(pattern(size, seed++));
    return made;
  }
  static std::shared_ptr<Tensors> empty(const std::vector<std::size_t>& sizes) {
    auto made = std::make_shared<Tensors>();
    for (const std::size_t size : sizes) made->data.emplace_back(size);
    return made;
  }
};

class ActivationStoreTest : public testing::Test {
 protected:
  ActivationStoreTest() { open({.devices = 2, .check = true, .seed = 1, .max_delay_us = 20}); }
  ~ActivationStoreTest() override { close(); }

  void open(const HostBackendOptions& options, std::size_t max_outstanding_bytes = std::size_t{1} << 20) {
    close();
    backend = std::make_shared<HostBackend>(options);
    arena = HostArena::make(backend, {.mapping_bytes = 1 << 20, .huge_pages = false});
    for (std::size_t d = 0; d < options.devices; ++d) {
      engines.push_back(
          std::make_unique<TransferEngine>(backend->device(d), TransferOptions{.checker = backend->checker()}));
      compute.push_back(backend->device(d).wrap_compute_stream(0));
    }
    store = std::make_unique<ActivationStore>(arena, backend->checker(), max_outstanding_bytes);
  }
  void close() {
    store.reset();
    engines.clear();
    compute.clear();
    arena.reset();
  }

  std::shared_ptr<Record> stash(std::size_t device, const std::shared_ptr<Tensors>& sources) {
    return store->stash(backend->device(device), *engines[device], *compute[device], sources->ranges(),
                        Traffic::kActivations, sources);
  }
  std::shared_ptr<Handover> fetch(std::size_t device, const std::shared_ptr<Record>& record,
                                  const std::shared_ptr<Tensors>& targets) {
    return store->fetch(backend->device(device), *engines[device], *compute[device], record, targets->ranges(),
                        Traffic::kInputs, targets);
  }
  bool fetch_wait(std::size_t device, Handover& handover, Tensors& targets, milliseconds timeout = kLong) {
    return store->fetch_wait(backend->device(device), handover, *compute[device], targets.ranges(), timeout);
  }
  std::vector<std::string> reports() { return backend->checker()->take_reports(); }

  // Keeps a lane busy until released.
  struct Gate {
    std::atomic<bool> open{false};
    std::shared_ptr<Handover> handover;
  };
  std::shared_ptr<Gate> block(std::size_t device, Direction direction, Bytes* target = nullptr,
                              const Bytes* source = nullptr) {
    auto gate = std::make_shared<Gate>();
    TransferRequest request;
    request.direction = direction;
    request.lane = Lane::kActivations;
    if (target != nullptr) request.segments.push_back({target->data(), source->data(), source->size()});
    request.ready = [gate] { return gate->open ? Readiness::kReady : Readiness::kNotYet; };
    gate->handover = engines[device]->submit(std::move(request));
    return gate;
  }
  void release(std::size_t device, Gate& gate) {
    gate.open = true;
    engines[device]->poke();
  }

  std::shared_ptr<HostBackend> backend;
  std::shared_ptr<HostArena> arena;
  std::vector<std::unique_ptr<TransferEngine>> engines;
  std::vector<std::unique_ptr<Stream>> compute;
  std::unique_ptr<ActivationStore> store;
};

TEST_F(ActivationStoreTest, RecordsTravelBetweenDevicesUnchanged) {
  std::mt19937 random(3);
  struct Journey {
    std::vector<std::size_t> sizes;
    std::size_t seed;
    std::shared_ptr<Record> record;
    std::shared_ptr<Tensors> targets;
    std::shared_ptr<Handover> handover;
    std::size_t device;
  };
  std::vector<Journey> journeys;
  std::size_t down = 0, up = 0;
  for (std::size_t i = 0; i < 60; ++i) {
    Journey journey{{}, i * 100, nullptr, nullptr, nullptr, random() % 2};
    for (std::size_t t = random() % 5; t > 0; --t) journey.sizes.push_back(random() % 3 ? random() % 2000 : 0);
    const auto sources = Tensors::filled(journey.sizes, journey.seed);
    if (i % 5 == 4) {
      journey.record = store->from_host(sources->ranges());
    } else {
      journey.record = stash(random() % 2, sources);
      for (const std::size_t size : journey.sizes) down += size;
    }
    for (const std::size_t size : journey.sizes) up += size;
    journey.targets = Tensors::empty(journey.sizes);
    journey.handover = fetch(journey.device, journey.record, journey.targets);
    journeys.push_back(std::move(journey));
    if (journeys.size() < 3) continue;  // always a few ahead
    Journey& oldest = journeys[journeys.size() - 3];
    ASSERT_TRUE(fetch_wait(oldest.device, *oldest.handover, *oldest.targets));
    EXPECT_EQ(oldest.targets->data, Tensors::filled(oldest.sizes, oldest.seed)->data);
  }
  for (Journey& journey : journeys) {
    ASSERT_TRUE(journey.record->wait_host(kLong));
    ASSERT_EQ(journey.record->size(), journey.sizes.size());
    for (std::size_t t = 0; t < journey.sizes.size(); ++t) {
      ASSERT_EQ(journey.record->bytes(t), journey.sizes[t]);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(journey.record->host(t)) % 256, 0u);
      const Bytes expected = pattern(journey.sizes[t], journey.seed + t);
      if (!expected.empty()) {
        EXPECT_EQ(std::memcmp(journey.record->host(t), expected.data(), expected.size()), 0);
      }
    }
    ASSERT_TRUE(fetch_wait(journey.device, *journey.handover, *journey.targets));
    EXPECT_EQ(journey.targets->data, Tensors::filled(journey.sizes, journey.seed)->data);
  }
  std::size_t counted_down = 0, counted_up = 0;
  for (const auto& engine : engines) {
    counted_down += engine->bytes(Direction::kDeviceToHost, Traffic::kActivations);
    counted_up += engine->bytes(Direction::kHostToDevice, Traffic::kInputs);
  }
  EXPECT_EQ(counted_down, down);
  EXPECT_EQ(counted_up, up);
  EXPECT_EQ(store->live_records(), 60u);
  journeys.clear();
  for (const auto& engine : engines) EXPECT_TRUE(engine->drain(kLong));
  EXPECT_EQ(store->live_records(), 0u);
  EXPECT_EQ(store->live_bytes(), 0u);
  EXPECT_GT(store->peak_bytes(), 0u);
  EXPECT_EQ(arena->stats().used_bytes, 0u);
  EXPECT_EQ(reports(), kSilent);
}

TEST_F(ActivationStoreTest, HoldsSourcesAndBlocksUntilNoCopyCanTouchThem) {
  Bytes from(8), to(8);
  const auto gate = block(0, Direction::kDeviceToHost, &to, &from);
  auto sources = Tensors::filled({1000, 24}, 1);
  const std::weak_ptr<Tensors> watch = sources;
  stash(0, sources);  // the record is dropped at once
  sources.reset();
  EXPECT_FALSE(watch.expired());
  EXPECT_EQ(store->live_records(), 1u);
  EXPECT_EQ(store->live_bytes(), 1280u);
  EXPECT_EQ(arena->stats().used_bytes, 1280u);
  release(0, *gate);
  ASSERT_TRUE(engines[0]->drain(kLong));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(store->live_records(), 0u);
  EXPECT_EQ(store->peak_bytes(), 1280u);
  EXPECT_EQ(arena->stats().used_bytes, 0u);

  // The same for a copy up whose record and handle are dropped.
  auto record = stash(0, Tensors::filled({500}, 2));
  const auto up_gate = block(1, Direction::kHostToDevice, &to, &from);
  auto targets = Tensors::empty({500});
  const std::weak_ptr<Tensors> target_watch = targets;
  fetch(1, record, targets);
  targets.reset();
  record.reset();
  ASSERT_TRUE(engines[0]->drain(kLong));
  EXPECT_FALSE(target_watch.expired());
  EXPECT_EQ(store->live_records(), 1u);
  release(1, *up_gate);
  ASSERT_TRUE(engines[1]->drain(kLong));
  EXPECT_TRUE(target_watch.expired());
  EXPECT_EQ(store->live_records(), 0u);
}

TEST_F(ActivationStoreTest, StashBlocksWhileTooMuchIsOutstanding) {
  open({.devices = 1, .check = true}, 1000);
  Bytes from(8), to(8);
  const auto gate = block(0, Direction::kDeviceToHost, &to, &from);
  stash(0, Tensors::filled({1200}, 1));  // nothing much before it: taken whatever its size
  std::atomic<bool> done{false};
  auto second = std::async(std::launch::async, [&] {
    stash(0, Tensors::filled({10}, 2));
    done = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(done.load());
  release(0, *gate);
  second.get();
  EXPECT_TRUE(engines[0]->drain(kLong));
}

TEST_F(ActivationStoreTest, UploadsFromHostMemoryThatIsNoRecord) {
  Bytes from(8), to(8);
  const auto gate = block(0, Direction::kHostToDevice, &to, &from);
  auto source = Tensors::filled({700}, 9);
  const auto targets = Tensors::empty({700});
  const std::weak_ptr<Tensors> watch = source;
  const auto handover = store->upload(backend->device(0), *engines[0], *compute[0], source->data[0].data(),
                                      {targets->data[0].data(), 700}, Traffic::kActivations, source);
  source.reset();
  EXPECT_FALSE(fetch_wait(0, *handover, *targets, milliseconds(20)));
  EXPECT_FALSE(watch.expired());
  release(0, *gate);
  ASSERT_TRUE(fetch_wait(0, *handover, *targets));
  ASSERT_TRUE(handover->wait_complete(kLong));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(targets->data[0], pattern(700, 9));
  EXPECT_THROW(store->upload(backend->device(0), *engines[0], *compute[0], nullptr, {targets->data[0].data(), 700},
                             Traffic::kActivations, nullptr),
               InvalidArgument);
  EXPECT_EQ(reports(), kSilent);
}

TEST_F(ActivationStoreTest, AFetchWaitsForADownloadOfAnotherDevice) {
  Bytes from(8), to(8);
  const auto gate = block(0, Direction::kDeviceToHost, &to, &from);
  const auto record = stash(0, Tensors::filled({300}, 5));
  const auto targets = Tensors::empty({300});
  const auto handover = fetch(1, record, targets);
  EXPECT_FALSE(fetch_wait(1, *handover, *targets, milliseconds(20)));
  EXPECT_FALSE(record->wait_host(kNow));
  release(0, *gate);  // nobody pokes the other engine but the record
  ASSERT_TRUE(fetch_wait(1, *handover, *targets));
  EXPECT_EQ(targets->data[0], pattern(300, 5));
  EXPECT_EQ(reports(), kSilent);
}

TEST_F(ActivationStoreTest, OrderAfterReadAllowsOverwritingTheSource) {
  for (const bool ordered : {true, false}) {
    open({.devices = 1, .check = true});
    Bytes from(8), to(8);
    const auto gate = block(0, Direction::kDeviceToHost, &to, &from);
    const auto sources = Tensors::filled({300}, 5);
    const auto record = stash(0, sources);
    EXPECT_FALSE(store->order_after_read(*record, *compute[0], milliseconds(5)));
    release(0, *gate);
    if (ordered) {
      ASSERT_TRUE(store->order_after_read(*record, *compute[0], kLong));
    } else {
      ASSERT_TRUE(engines[0]->drain(kLong));  // the timing is kind
    }
    backend->device(0).declare(*compute[0], Access::kWrite, sources->data[0].data(), 300, "in place");
    std::memset(sources->data[0].data(), 0, 300);
    ASSERT_TRUE(record->wait_host(kLong));
    EXPECT_EQ(std::memcmp(record->host(0), pattern(300, 5).data(), 300), 0);
    EXPECT_EQ(reports().empty(), ordered);
  }
  const auto host = store->from_host(Tensors::filled({10}, 1)->ranges());
  EXPECT_TRUE(store->order_after_read(*host, *compute[0], kNow));
}

TEST_F(ActivationStoreTest, TheCheckerSeesTargetsReadWithoutAWait) {
  const auto record = stash(0, Tensors::filled({300}, 5));
  const auto targets = Tensors::empty({300});
  const auto handover = fetch(0, record, targets);
  ASSERT_TRUE(engines[0]->drain(kLong));
  backend->device(0).declare(*compute[0], Access::kRead, targets->data[0].data(), 300, "eager reader");
  EXPECT_FALSE(reports().empty());
}

TEST_F(ActivationStoreTest, RecycledDeviceMemoryIsNotMistakenForARace) {
  Bytes memory(400);
  for (std::size_t i = 0; i < 50; ++i) {
    // A framework reuses the address as soon as the owner is dropped, which keep_alive delays until the copy is over.
    const Bytes content = pattern(400, i);
    std::memcpy(memory.data(), content.data(), 400);
    std::promise<void> dropped;
    const auto record =
        store->stash(backend->device(0), *engines[0], *compute[0], {{memory.data(), 400}}, Traffic::kActivations,
                     std::shared_ptr<void>(nullptr, [&](void*) { dropped.set_value(); }));
    dropped.get_future().wait();
    ASSERT_TRUE(record->wait_host(kLong));
    EXPECT_EQ(std::memcmp(record->host(0), content.data(), 400), 0);
  }
  EXPECT_EQ(reports(), kSilent);
}

TEST_F(ActivationStoreTest, ViewsOfOneTensorAreStashedAtTheSameTime) {
  for (std::size_t i = 0; i < 20; ++i) {
    const auto whole = Tensors::filled({400}, i);
    unsigned char* const data = whole->data[0].data();
    const auto gate = block(0, Direction::kDeviceToHost);
    std::vector<std::shared_ptr<Record>> records;
    const std::vector<DeviceBytes> views{{data, 400}, {data, 400}, {data + 100, 50}, {data + 4, 396}, {data, 8}};
    for (const DeviceBytes& view : views) {
      records.push_back(
          store->stash(backend->device(0), *engines[0], *compute[0], {view}, Traffic::kActivations, whole));
    }
    release(0, *gate);
    for (std::size_t v = 0; v < views.size(); ++v) {
      ASSERT_TRUE(records[v]->wait_host(kLong));
      EXPECT_EQ(std::memcmp(records[v]->host(0), views[v].data, views[v].bytes), 0);
    }
  }
  EXPECT_EQ(reports(), kSilent);
}

TEST_F(ActivationStoreTest, MemoryIsReusedTheMomentThatItsDownloadLetsGo) {
  for (std::size_t i = 0; i < 20; ++i) {
    const auto memory = Tensors::filled({400}, i);
    const auto other = stash(0, Tensors::filled({400}, i + 1));
    std::promise<void> let_go, reused;
    std::shared_ptr<void> tensor(memory.get(), [&](void*) {  // what a tensor's last owner does
      let_go.set_value();
      reused.get_future().wait();
    });
    const auto record = store->stash(backend->device(0), *engines[0], *compute[0], memory->ranges(),
                                     Traffic::kActivations, std::move(tensor));
    let_go.get_future().wait();
    const auto up = fetch(0, other, memory);
    reused.set_value();
    ASSERT_TRUE(store->fetch_wait(backend->device(0), *up, *compute[0], memory->ranges(), kLong));
    EXPECT_EQ(memory->data[0], pattern(400, i + 1));
  }
  EXPECT_EQ(reports(), kSilent);
}

TEST_F(ActivationStoreTest, AFailureOfAnyCopyReachesWhoDependsOnIt) {
  const auto message = [](const std::function<bool()>& call) -> std::string {
    try {
      return call() ? "" : "timed out";
    } catch (const DriverError& error) {
      return error.what();
    }
  };
  // The first copies are the stash's two tensors, the next ones the fetch's on the other device.
  for (std::int64_t failing = 0; failing < 5; ++failing) {
    for (const bool host_first : {false, true}) {
      open({.devices = 2, .check = true, .seed = 2, .max_delay_us = 30, .fail_copy_at = failing});
      const auto record = stash(0, Tensors::filled({300, 40}, 5));
      std::string on_host;
      if (host_first) on_host = message([&] { return record->wait_host(kLong); });
      const auto targets = Tensors::empty({300, 40});
      const auto handover = fetch(1, record, targets);
      const std::string on_device = message([&] { return fetch_wait(1, *handover, *targets); });
      if (!host_first) on_host = message([&] { return record->wait_host(kLong); });
      EXPECT_EQ(on_host != "", failing < 2) << failing;
      EXPECT_EQ(on_device != "", failing < 4) << failing;
      if (failing < 2) {
        EXPECT_EQ(on_device, on_host);
      }
      if (on_device == "") {
        EXPECT_EQ(targets->data[1], pattern(40, 6));
      }
      // The record is good if only the copy up failed, and everything works on.
      if (failing >= 2) {
        const auto again = Tensors::empty({300, 40});
        backend->fail_copy_after(-1);
        ASSERT_TRUE(fetch_wait(0, *fetch(0, record, again), *again));
        EXPECT_EQ(again->data[0], pattern(300, 5));
      }
      for (const auto& engine : engines) ASSERT_TRUE(engine->drain(kLong));
      backend->fail_copy_after(-1);
      const auto next = stash(1, Tensors::filled({20}, 9));
      ASSERT_TRUE(next->wait_host(kLong));
      EXPECT_EQ(std::memcmp(next->host(0), pattern(20, 9).data(), 20), 0);
      EXPECT_EQ(reports(), kSilent);
    }
  }
}

TEST_F(ActivationStoreTest, RefusesWhatCannotWork) {
  const auto record = store->from_host(Tensors::filled({300, 40}, 5)->ranges());
  EXPECT_THROW(fetch(0, record, Tensors::empty({300})), InvalidArgument);
  EXPECT_THROW(fetch(0, record, Tensors::empty({300, 41})), InvalidArgument);
  EXPECT_THROW(fetch(0, nullptr, Tensors::empty({300, 40})), InvalidArgument);
  EXPECT_THROW(record->host(2), InvalidArgument);
  EXPECT_THROW(record->bytes(2), InvalidArgument);
  EXPECT_THROW(store->from_host({{nullptr, 4}}), InvalidArgument);
  EXPECT_THROW(store->stash(backend->device(0), *engines[0], *compute[0], {{nullptr, 4}}, Traffic::kActivations, {}),
               InvalidArgument);
  struct Foreign final : Record {
    std::size_t size() const override { return 0; }
    std::size_t bytes(std::size_t) const override { return 0; }
    void* host(std::size_t) const override { return nullptr; }
    bool wait_host(milliseconds) override { return true; }
  };
  EXPECT_THROW(fetch(0, std::make_shared<Foreign>(), Tensors::empty({})), InvalidArgument);
  EXPECT_THROW(ActivationStore(nullptr, nullptr), InvalidArgument);
  EXPECT_THROW(ActivationStore(arena, nullptr, 0), InvalidArgument);
}

TEST_F(ActivationStoreTest, RecordsOutliveStoreAndEngines) {
  const auto kept = stash(0, Tensors::filled({300}, 5));
  ASSERT_TRUE(kept->wait_host(kLong));
  Bytes from(8), to(8);
  block(0, Direction::kDeviceToHost, &to, &from);
  const auto unfinished = stash(0, Tensors::filled({300}, 6));
  const auto targets = Tensors::empty({300});
  const auto handover = fetch(1, unfinished, targets);
  close();
  EXPECT_EQ(std::memcmp(kept->host(0), pattern(300, 5).data(), 300), 0);
  EXPECT_TRUE(kept->wait_host(kNow));
  EXPECT_THROW(unfinished->wait_host(kLong), Poisoned);
  EXPECT_THROW(handover->wait_issued(kLong), Poisoned);
}

}  // namespace
}  // namespace roundpipe
