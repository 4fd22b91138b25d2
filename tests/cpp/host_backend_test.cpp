#include "core/host_backend.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_stream.h"

namespace roundpipe {
namespace {

using Bytes = std::vector<unsigned char>;

HostBackendOptions checking(std::size_t devices = 1) {
  HostBackendOptions options;
  options.devices = devices;
  options.check = true;
  return options;
}

// A message must say enough to be acted upon, so tests look at it.
template <class E, class F>
std::string message_of(F&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void up(Device& device, Stream& stream, void* dst, const void* src, std::size_t bytes) {
  device.copy(stream, Direction::kHostToDevice, dst, src, bytes);
}

// Keeps the stream from going on until the gate opens.
void hold(Stream& stream, std::latch& gate) {
  dynamic_cast<HostStream&>(stream).run([&gate] { gate.wait(); });
}

TEST(HostBackend, CopiesBytesUpAndDown) {
  HostBackend backend({});
  Device& device = backend.device(0);
  device.attach_thread();
  EXPECT_EQ(device.name(), "host:0");
  EXPECT_EQ(backend.checker(), nullptr);
  Bytes host(1000), on_device(1000, 0), back(1000, 0);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<unsigned char>(i * 7);
  auto stream = device.make_copy_stream("weights");
  auto event = device.make_event();
  up(device, *stream, on_device.data(), host.data(), host.size());
  device.copy(*stream, Direction::kDeviceToHost, back.data(), on_device.data(), back.size());
  device.zero(*stream, on_device.data(), 10);
  up(device, *stream, nullptr, nullptr, 0);
  device.record(*event, *stream);
  device.synchronize(*event);
  EXPECT_TRUE(device.query(*event));
  EXPECT_EQ(back, host);
  EXPECT_EQ(Bytes(on_device.begin(), on_device.begin() + 10), Bytes(10, 0));
  EXPECT_EQ(on_device[10], host[10]);
}

TEST(HostBackend, CopyStreamsRunBesideTheCaller) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto stream = device.make_copy_stream("copy");
  auto event = device.make_event();
  Bytes source(8, 1), target(8, 0);
  std::latch gate(1);
  hold(*stream, gate);
  up(device, *stream, target.data(), source.data(), 8);
  device.record(*event, *stream);
  EXPECT_FALSE(device.query(*event));
  source.assign(8, 2);  // read when the copy runs, not when it is called
  gate.count_down();
  device.synchronize(*event);
  EXPECT_EQ(target, Bytes(8, 2));
}

TEST(HostBackend, WaitHoldsTheStreamBack) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto first = device.make_copy_stream("first");
  auto second = device.make_copy_stream("second");
  auto event = device.make_event(), done = device.make_event();
  Bytes source(8, 1), target(8, 0);
  std::latch gate(1);
  hold(*first, gate);
  device.zero(*first, source.data(), 4);
  device.record(*event, *first);
  device.wait(*second, *event);
  up(device, *second, target.data(), source.data(), 8);
  device.record(*done, *second);
  EXPECT_FALSE(device.query(*done));
  gate.count_down();
  device.synchronize(*done);
  EXPECT_EQ(target, (Bytes{0, 0, 0, 0, 1, 1, 1, 1}));
}

TEST(HostBackend, UnrecordedEventsAreRefused) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto stream = device.make_copy_stream("copy");
  auto compute = device.wrap_compute_stream(0);
  auto event = device.make_event();
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { device.wait(*stream, *event); }), "never recorded"));
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { device.wait(*compute, *event); }), "never recorded"));
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { device.query(*event); }), "query"));
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { device.synchronize(*event); }), "synchronize"));
}

TEST(HostBackend, WaitMeansTheRecordingCurrentAtTheCall) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto first = device.make_copy_stream("first");
  auto second = device.make_copy_stream("second");
  auto event = device.make_event();
  auto done = device.make_event();
  device.record(*event, *first);
  device.synchronize(*event);
  device.wait(*second, *event);
  // Were the wait to mean this later recording, it and the wait of `first` for `second` would block each other.
  device.record(*done, *second);
  device.wait(*first, *done);
  device.record(*event, *first);
  device.synchronize(*event);
  EXPECT_TRUE(device.query(*done));
}

TEST(HostBackend, EventsWorkAcrossDevices) {
  HostBackend backend(checking(2));
  Device& a = backend.device(0);
  Device& b = backend.device(1);
  auto stream_a = a.make_copy_stream("a");
  auto stream_b = b.make_copy_stream("b");
  Bytes host(64, 5), device_a(64), back(64);
  backend.set_delays(1, 2000);
  auto event = a.make_event();
  auto done = b.make_event();
  up(a, *stream_a, device_a.data(), host.data(), 64);
  a.record(*event, *stream_a);
  b.wait(*stream_b, *event);
  b.copy(*stream_b, Direction::kDeviceToHost, back.data(), device_a.data(), 64);
  b.record(*done, *stream_b);
  a.synchronize(*done);
  EXPECT_EQ(back, host);
  EXPECT_TRUE(backend.checker()->take_reports().empty());
}

TEST(HostBackend, StreamsAndEventsOfOtherBackendsAreRefused) {
  HostBackend backend({}), other({});
  auto stream = other.device(0).make_copy_stream("copy");
  auto event = backend.device(0).make_event();
  EXPECT_THROW(backend.device(0).record(*event, *stream), InvalidArgument);
  EXPECT_THROW(up(backend.device(0), *stream, nullptr, nullptr, 0), InvalidArgument);
  other.device(0).record(*event, *stream);
  EXPECT_THROW(backend.device(0).synchronize(*event), InvalidArgument);
  EXPECT_THROW(backend.device(1), InvalidArgument);
}

TEST(HostBackend, BadCopiesAreRefusedAtTheCall) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto stream = device.make_copy_stream("copy");
  Bytes memory(64);
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { up(device, *stream, nullptr, memory.data(), 8); }), "dst"));
  EXPECT_TRUE(contains(message_of<InvalidArgument>([&] { up(device, *stream, memory.data(), nullptr, 8); }), "src"));
  EXPECT_TRUE(
      contains(message_of<InvalidArgument>([&] { up(device, *stream, &memory[7], &memory[0], 8); }), "overlap"));
  EXPECT_THROW(device.zero(*stream, nullptr, 8), InvalidArgument);
}

TEST(HostBackend, EventsMayDieBeforeTheirRecordRuns) {
  HostBackend backend(checking());
  Device& device = backend.device(0);
  auto first = device.make_copy_stream("first");
  auto second = device.make_copy_stream("second");
  backend.set_delays(3, 3000);
  Bytes host(16, 9), target(16, 0);
  {
    auto event = device.make_event();
    up(device, *first, target.data(), host.data(), 16);
    device.record(*event, *first);
    device.wait(*second, *event);
  }
  first.reset();
  second.reset();  // finishes what is queued
  EXPECT_EQ(target, host);
}

TEST(HostBackend, BackendMayDieFirst) {
  auto backend = std::make_unique<HostBackend>(checking());
  backend->set_delays(1, 3000);
  Device& device = backend->device(0);
  Bytes host(16, 9), target(16, 0);
  auto stream = device.make_copy_stream("copy");
  auto event = device.make_event();
  device.zero(*stream, target.data(), 16);
  device.record(*event, *stream);
  backend.reset();
  stream.reset();
  event.reset();
  EXPECT_EQ(target, Bytes(16, 0));
}

TEST(HostBackend, ForkedChildDropsStreamsWithoutWaiting) {
  HostBackend backend({});
  auto stream = backend.device(0).make_copy_stream("copy");
  auto event = backend.device(0).make_event();
  backend.device(0).record(*event, *stream);
  backend.device(0).synchronize(*event);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(5);  // ends the child by a signal should the destructor block
    stream.reset();
    event.reset();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(HostBackend, InjectedFailureIsThrownOnceByTheNextEvent) {
  HostBackendOptions options;
  options.fail_copy_at = 1;
  HostBackend backend(options);
  Device& device = backend.device(0);
  auto stream = device.make_copy_stream("copy");
  auto other = device.make_copy_stream("other");
  Bytes host(16, 9), targets(64, 0);
  auto before = device.make_event(), after = device.make_event(), later = device.make_event(),
       elsewhere = device.make_event();
  up(device, *stream, &targets[0], host.data(), 16);
  device.record(*before, *stream);
  up(device, *stream, &targets[16], host.data(), 16);
  device.record(*after, *stream);
  up(device, *stream, &targets[32], host.data(), 16);
  device.record(*later, *stream);
  up(device, *other, &targets[48], host.data(), 16);
  device.record(*elsewhere, *other);
  device.synchronize(*before);
  device.synchronize(*elsewhere);
  const std::string message = message_of<DriverError>([&] { device.synchronize(*later); });
  EXPECT_TRUE(contains(message, "injected") && contains(message, "16 bytes on host:0")) << message;
  EXPECT_TRUE(device.query(*after));
  EXPECT_TRUE(device.query(*later));
  device.record(*after, *stream);
  device.synchronize(*after);
  Bytes expected(64, 9);
  std::fill(expected.begin() + 16, expected.begin() + 32, static_cast<unsigned char>(0));
  EXPECT_EQ(targets, expected);

  backend.fail_copy_after(2);
  for (int i = 0; i < 4; ++i) {
    up(device, *stream, targets.data(), host.data(), 16);
    device.record(*after, *stream);
    if (i == 2) {
      while (true) {
        try {
          if (device.query(*after)) FAIL() << "copy 2 was to fail";
        } catch (const DriverError&) {
          break;
        }
      }
    } else {
      device.synchronize(*after);
    }
  }
  backend.fail_copy_after(-1);
  up(device, *stream, targets.data(), host.data(), 16);
  device.record(*after, *stream);
  EXPECT_NO_THROW(device.synchronize(*after));
}

TEST(HostBackend, LeasesAreLimited) {
  HostBackendOptions options;
  options.memory_limit_bytes = 1000;
  HostBackend backend(options);
  Device& device = backend.device(0);
  EXPECT_EQ(device.memory_limit_bytes(), 1000U);
  Bytes memory(4096);
  device.lease(memory.data(), 600);
  EXPECT_THROW(device.lease(memory.data(), 1), InvalidArgument);
  try {
    device.lease(memory.data() + 600, 401);
    FAIL() << "over the limit";
  } catch (const DeviceOutOfMemory& error) {
    EXPECT_EQ(error.asked_bytes, 401U);
    for (const char* part : {"401", "600", "1000", "host:0"}) EXPECT_TRUE(contains(error.what(), part)) << error.what();
  }
  device.lease(memory.data() + 600, 400);
  device.end_lease(memory.data());
  device.end_lease(memory.data());  // unknown: ignored
  device.lease(memory.data(), 600);
}

TEST(HostBackend, RegistrationIsAsStrictAsTheDrivers) {
  HostBackend backend({});
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  void* mapping = mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapping, MAP_FAILED);
  char* base = static_cast<char*>(mapping);
  backend.register_host(base + page, 2 * page);
  EXPECT_THROW(backend.register_host(base, 2 * page), DriverError);
  EXPECT_THROW(backend.register_host(base + 2 * page, 2 * page), DriverError);
  EXPECT_THROW(backend.register_host(base + 1, page), InvalidArgument);
  EXPECT_THROW(backend.register_host(base, page - 1), InvalidArgument);
  EXPECT_THROW(backend.register_host(base, 0), InvalidArgument);
  EXPECT_THROW(backend.register_host(base, (std::size_t{64} << 30) + page), InvalidArgument);
  backend.register_host(base, page);
  backend.unregister_host(base + page);
  backend.unregister_host(base + page);
  backend.register_host(base + page, page);
  munmap(mapping, 4 * page);
}

TEST(HostBackend, DelaysSlowOperationsUntilTurnedOff) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto stream = device.make_copy_stream("copy");
  Bytes memory(8);
  const auto run = [&](std::uint64_t seed) {
    backend.set_delays(seed, 4000);
    const auto begin = std::chrono::steady_clock::now();
    auto event = device.make_event();
    for (int i = 0; i < 30; ++i) device.zero(*stream, memory.data(), 8);
    device.record(*event, *stream);
    device.synchronize(*event);
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  };
  EXPECT_GT(run(7), 10.0);  // 31 uniform delays of 0..4 ms: 62 ms expected
  backend.set_delays(7, 0);
  auto event = device.make_event();
  device.record(*event, *stream);
  device.synchronize(*event);
}

// -- the happens-before checker, as the backend drives it ------------------------------------------------------------

struct Checked : ::testing::Test {
  HostBackend backend{checking()};
  Device& device = backend.device(0);
  HappensBefore& checker = *backend.checker();
  std::unique_ptr<Stream> compute = device.wrap_compute_stream(0);
  std::unique_ptr<Stream> stream = device.make_copy_stream("weights");
  std::unique_ptr<Event> event = device.make_event();
  Bytes host = Bytes(256, 1), target = Bytes(256, 0);

  void drain() {  // real end of the work, invisible to the checker's clocks of thread and compute
    std::thread([&] {
      auto end = device.make_event();
      device.record(*end, *stream);
      device.synchronize(*end);
    }).join();
  }
};

TEST_F(Checked, EventBetweenCopyAndComputeOrdersThem) {
  up(device, *stream, target.data(), host.data(), 256);
  device.record(*event, *stream);
  device.wait(*compute, *event);
  EXPECT_EQ(target, host);  // the compute stream's wait blocks the thread
  device.declare(*compute, Access::kRead, target.data(), 256, "layer forward");
  EXPECT_TRUE(checker.take_reports().empty());
}

TEST_F(Checked, MissingEventIsReportedThoughTheTimingWasKind) {
  up(device, *stream, target.data(), host.data(), 256);
  drain();
  device.declare(*compute, Access::kRead, target.data(), 256, "layer forward");
  const auto reports = checker.take_reports();
  ASSERT_EQ(reports.size(), 1U);
  for (const char* part : {"layer forward", "copy to device", "host:0/weights", "host:0/compute", "256 bytes"}) {
    EXPECT_TRUE(contains(reports[0], part)) << reports[0];
  }
}

TEST_F(Checked, ComputeIsNotOrderedBeforeACopyByTheThreadAlone) {
  device.declare(*compute, Access::kRead, target.data(), 256, "layer forward");
  up(device, *stream, target.data(), host.data(), 256);  // on a GPU this overwrites weights in use
  drain();
  EXPECT_EQ(checker.take_reports().size(), 1U);
}

TEST_F(Checked, RecordOnComputeOrdersACopyAfterIt) {
  device.declare(*compute, Access::kWrite, target.data(), 256, "layer backward");
  device.record(*event, *compute);
  EXPECT_TRUE(device.query(*event));
  device.wait(*stream, *event);
  device.copy(*stream, Direction::kDeviceToHost, host.data(), target.data(), 256);
  auto done = device.make_event();
  device.record(*done, *stream);
  device.synchronize(*done);
  checker.access(checker.this_thread(), Access::kRead, host.data(), 256, "optimizer");
  EXPECT_TRUE(checker.take_reports().empty());
}

TEST_F(Checked, ComputeComesAfterWhatItsThreadHasDone) {
  checker.access(checker.this_thread(), Access::kWrite, target.data(), 128, "inputs made");
  device.zero(*compute, target.data(), 64);
  device.declare(*compute, Access::kRead, target.data() + 64, 64, "layer forward");
  checker.access(checker.this_thread(), Access::kWrite, host.data(), 256, "weights made");
  device.record(*event, *compute);
  device.wait(*stream, *event);
  // The enqueuer is another thread, so all the copy knows of this one came by the compute stream's event.
  std::thread([&] { up(device, *stream, target.data(), host.data(), 256); }).join();
  drain();
  EXPECT_TRUE(checker.take_reports().empty());
}

TEST_F(Checked, WaitOfComputeDoesNotOrderTheThread) {
  device.copy(*stream, Direction::kDeviceToHost, host.data(), target.data(), 256);
  device.record(*event, *stream);
  device.wait(*compute, *event);
  checker.access(checker.this_thread(), Access::kRead, host.data(), 256, "optimizer");
  EXPECT_EQ(checker.take_reports().size(), 1U);
}

TEST_F(Checked, QueryOrdersTheThreadOnlyWhenTrue) {
  device.copy(*stream, Direction::kDeviceToHost, host.data(), target.data(), 256);
  device.record(*event, *stream);
  while (!device.query(*event)) std::this_thread::yield();
  checker.access(checker.this_thread(), Access::kWrite, host.data(), 256, "optimizer");
  EXPECT_TRUE(checker.take_reports().empty());
}

TEST_F(Checked, LaterWorkOfTheEnqueuerIsNotPartOfAQueuedCopysPast) {
  std::latch gate(1);
  hold(*stream, gate);
  up(device, *stream, target.data(), host.data(), 64);
  checker.access(checker.this_thread(), Access::kWrite, host.data(), 64, "user writes inputs");
  auto second = device.make_event();
  device.record(*second, *stream);  // its enqueuer has written by now; the copy's had not
  gate.count_down();
  drain();
  EXPECT_EQ(checker.take_reports().size(), 1U);
}

TEST_F(Checked, DiscardFillsWithNanAndIsAWrite) {
  up(device, *stream, target.data(), host.data(), 128);
  device.record(*event, *stream);
  device.wait(*compute, *event);
  device.discard(*compute, target.data(), 128);
  EXPECT_EQ(target[0], 0xFF);
  EXPECT_EQ(target[127], 0xFF);
  EXPECT_EQ(target[128], 0);
  EXPECT_TRUE(checker.take_reports().empty());
  device.zero(*stream, target.data(), 64);
  drain();
  EXPECT_EQ(checker.take_reports().size(), 1U);
  EXPECT_EQ(target[0], 0);
}

TEST_F(Checked, WrappersOfOneComputeStreamAreOneStream) {
  auto again = device.wrap_compute_stream(0);
  device.declare(*compute, Access::kWrite, target.data(), 256, "first");
  std::thread([&] { device.declare(*again, Access::kWrite, target.data(), 256, "second"); }).join();
  EXPECT_TRUE(checker.take_reports().empty());
  auto different = device.wrap_compute_stream(1);
  device.declare(*different, Access::kWrite, target.data(), 256, "third");
  EXPECT_EQ(checker.take_reports().size(), 1U);
}

TEST_F(Checked, LeaseBeginsANewLife) {
  up(device, *stream, target.data(), host.data(), 256);
  drain();
  device.lease(target.data(), 256);
  device.declare(*compute, Access::kWrite, target.data(), 256, "new owner");
  EXPECT_TRUE(checker.take_reports().empty());
}

TEST(HostBackend, NothingIsDiscardedOrDeclaredWhenNotChecking) {
  HostBackend backend({});
  Device& device = backend.device(0);
  auto compute = device.wrap_compute_stream(0);
  Bytes memory(8, 3);
  device.discard(*compute, memory.data(), 8);
  device.declare(*compute, Access::kWrite, memory.data(), 8, "ignored");
  EXPECT_EQ(memory, Bytes(8, 3));
}

TEST(HostBackend, ManyThreadsAndStreams) {
  HostBackend backend(checking(2));
  backend.set_delays(5, 50);
  // Outlives the threads: memory freed by one and given to another would look like a race.
  std::vector<std::array<Bytes, 3>> memories;
  for (std::size_t t = 0; t < 4; ++t)
    memories.push_back({Bytes(512, static_cast<unsigned char>(t)), Bytes(512), Bytes(512)});
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&backend, &memories, t] {
      Device& device = backend.device(t % 2);
      auto lane_up = device.make_copy_stream("up");
      auto lane_down = device.make_copy_stream("down");
      auto compute = device.wrap_compute_stream(t);
      auto uploaded = device.make_event(), computed = device.make_event(), downloaded = device.make_event();
      auto& [host, work, back] = memories[t];
      for (int i = 0; i < 40; ++i) {
        up(device, *lane_up, work.data(), host.data(), 512);
        device.record(*uploaded, *lane_up);
        device.wait(*compute, *uploaded);
        device.declare(*compute, Access::kWrite, work.data(), 512, "compute");
        for (auto& byte : work) ++byte;
        device.record(*computed, *compute);
        device.wait(*lane_down, *computed);
        device.copy(*lane_down, Direction::kDeviceToHost, back.data(), work.data(), 512);
        device.record(*downloaded, *lane_down);
        device.wait(*lane_up, *downloaded);
        device.synchronize(*downloaded);
        ASSERT_EQ(back, Bytes(512, static_cast<unsigned char>(t + 1)));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_TRUE(backend.checker()->take_reports().empty());
}

}  // namespace
}  // namespace roundpipe
