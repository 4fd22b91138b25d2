#include "cuda/cuda_backend.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "cuda/driver_api.h"

namespace roundpipe {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(DriverApi, AMissingLibraryIsNamedWithARemedy) {
  try {
    cuda::load_driver("libroundpipe-no-such-driver.so.1");
    FAIL() << "loaded a library that does not exist";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, cuda::kNoDriver);
    EXPECT_TRUE(contains(error.what(), "libroundpipe-no-such-driver.so.1")) << error.what();
    EXPECT_TRUE(contains(error.what(), "Install the NVIDIA driver")) << error.what();
  }
}

TEST(DriverApi, MissingFunctionsAreNamed) {
  try {
    cuda::load_driver("libm.so.6");
    FAIL() << "took the mathematics library for a driver";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, cuda::kNoDriver);
    for (const char* part : {"libm.so.6", "cuInit", "cuEventDestroy_v2", "12.0"}) {
      EXPECT_TRUE(contains(error.what(), part)) << part << " is missing in: " << error.what();
    }
  }
}

TEST(CudaBackend, OrdinalsAreChecked) { EXPECT_THROW(make_cuda_backend({}), InvalidArgument); }

TEST(CudaBackend, WithoutADriverItSaysWhyAndThrows) {
  std::string why;
  if (cuda_driver_available(&why)) {
    EXPECT_TRUE(why.empty());
    EXPECT_NO_THROW(make_cuda_backend({0}));
    EXPECT_EQ(make_cuda_backend({0, 0})->device_count(), 2u);  // logical devices of one GPU
    return;
  }
  EXPECT_FALSE(why.empty());
  EXPECT_FALSE(cuda_driver_available(nullptr));
  try {
    make_cuda_backend({0});
    FAIL() << "made a backend without a driver";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.what(), why);
    EXPECT_NE(error.code, 0);
  }
}

// -- on a GPU

// What the engine takes from the framework, taken here from the driver.
struct TestDriver {
  cuda::Result (*allocate)(cuda::DevicePointer*, std::size_t);
  cuda::Result (*free)(cuda::DevicePointer);
  TestDriver() {
    void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    allocate = reinterpret_cast<decltype(allocate)>(dlsym(handle, "cuMemAlloc_v2"));
    free = reinterpret_cast<decltype(free)>(dlsym(handle, "cuMemFree_v2"));
  }
};

class DeviceMemory {
 public:
  DeviceMemory(Device& device, std::size_t bytes) : device_(device) {
    device_.attach_thread();
    if (driver_.allocate(&pointer_, bytes) != 0) throw std::runtime_error("cuMemAlloc failed");
  }
  ~DeviceMemory() {
    device_.attach_thread();
    driver_.free(pointer_);
  }
  void* data() const { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(pointer_)); }

 private:
  Device& device_;
  TestDriver driver_;
  cuda::DevicePointer pointer_ = 0;
};

class HostMapping {
 public:
  explicit HostMapping(std::size_t bytes) : bytes_(bytes) {
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~HostMapping() { munmap(data_, bytes_); }
  unsigned char* data() const { return static_cast<unsigned char*>(data_); }

 private:
  void* data_;
  std::size_t bytes_;
};

cuda::ContextHandle current_context() {
  cuda::ContextHandle context = nullptr;
  cuda::driver_api().context_get_current(&context);
  return context;
}

constexpr std::size_t kBytes = std::size_t{64} << 20;

struct OnGpu : ::testing::Test {
  std::unique_ptr<Backend> backend;
  Device* device = nullptr;
  HostMapping host{2 * kBytes};

  void SetUp() override {
    std::string why;
    if (!cuda_driver_available(&why)) {
      const char* required = std::getenv("ROUNDPIPE_REQUIRE_CUDA");
      if (required != nullptr && std::string(required) == "1") FAIL() << "a GPU is required: " << why;
      GTEST_SKIP() << why;
    }
    backend = make_cuda_backend({0});
    device = &backend->device(0);
    device->attach_thread();
    backend->register_host(host.data(), 2 * kBytes);
    for (std::size_t i = 0; i < kBytes; ++i) host.data()[i] = static_cast<unsigned char>(i * 31 + i / 4093);
    std::memset(host.data() + kBytes, 0, kBytes);
  }
  void TearDown() override {
    if (backend) backend->unregister_host(host.data());
  }
  void up(Stream& stream, const DeviceMemory& target, std::size_t bytes = kBytes) {
    device->copy(stream, Direction::kHostToDevice, target.data(), host.data(), bytes);
  }
  void down(Stream& stream, const DeviceMemory& source, std::size_t bytes = kBytes) {
    device->copy(stream, Direction::kDeviceToHost, host.data() + kBytes, source.data(), bytes);
  }
  bool round_trip_is_equal(std::size_t from = 0) const {
    return std::memcmp(host.data() + from, host.data() + kBytes + from, kBytes - from) == 0;
  }
};

TEST_F(OnGpu, BytesGoUpAndDown) {
  EXPECT_EQ(device->name(), "cuda:0");
  EXPECT_EQ(backend->device_count(), 1U);
  EXPECT_EQ(backend->checker(), nullptr);
  EXPECT_EQ(device->memory_limit_bytes(), 0U);
  EXPECT_THROW(backend->device(1), InvalidArgument);
  DeviceMemory memory(*device, kBytes);
  auto stream = device->make_copy_stream("copy");
  auto event = device->make_event();
  up(*stream, memory);
  device->copy(*stream, Direction::kHostToDevice, nullptr, nullptr, 0);
  device->zero(*stream, memory.data(), 4096);
  device->discard(*stream, memory.data(), kBytes);  // nothing happens on a GPU
  down(*stream, memory);
  device->record(*event, *stream);
  device->synchronize(*event);
  EXPECT_TRUE(device->query(*event));
  EXPECT_TRUE(round_trip_is_equal(4096));
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(host.data()[kBytes + i], 0);
}

TEST_F(OnGpu, EventsOrderStreams) {
  DeviceMemory memory(*device, kBytes);
  auto first = device->make_copy_stream("first");
  auto second = device->make_copy_stream("second");
  auto compute = device->wrap_compute_stream(0);
  auto uploaded = device->make_event(), zeroed = device->make_event(), done = device->make_event();
  for (int i = 0; i < 10; ++i) {
    std::memset(host.data() + kBytes, 0xAB, kBytes);
    up(*first, memory);
    device->record(*uploaded, *first);
    device->wait(*compute, *uploaded);
    device->zero(*compute, memory.data(), 4096);
    device->record(*zeroed, *compute);
    device->wait(*second, *zeroed);
    down(*second, memory);
    device->record(*done, *second);
    device->synchronize(*done);
    ASSERT_TRUE(round_trip_is_equal(4096));
    ASSERT_EQ(host.data()[kBytes], 0);
  }
}

TEST_F(OnGpu, QueryIsFalseWhileACopyRuns) {
  DeviceMemory memory(*device, kBytes);
  auto stream = device->make_copy_stream("copy");
  auto event = device->make_event();
  for (int i = 0; i < 20; ++i) up(*stream, memory);  // more than a gigabyte: tens of milliseconds
  device->record(*event, *stream);
  EXPECT_FALSE(device->query(*event));
  while (!device->query(*event)) std::this_thread::yield();
}

TEST_F(OnGpu, UnrecordedEventsAreRefused) {
  auto stream = device->make_copy_stream("copy");
  auto event = device->make_event();
  EXPECT_THROW(device->wait(*stream, *event), InvalidArgument);
  EXPECT_THROW(device->query(*event), InvalidArgument);
  EXPECT_THROW(device->synchronize(*event), InvalidArgument);
  device->record(*event, *stream);
  device->synchronize(*event);
  event.reset();
  event = device->make_event();  // the pool's, but a new event all the same
  EXPECT_THROW(device->wait(*stream, *event), InvalidArgument);
}

TEST_F(OnGpu, EventsMayDieWhileAStreamWaitsForThem) {
  DeviceMemory memory(*device, kBytes);
  auto first = device->make_copy_stream("first");
  auto second = device->make_copy_stream("second");
  for (int i = 0; i < 10; ++i) up(*first, memory);
  {
    auto event = device->make_event();
    device->record(*event, *first);
    device->wait(*second, *event);
  }
  auto reused = device->make_event();
  auto third = device->make_copy_stream("third");
  device->record(*reused, *third);  // complete at once; must not release `second`
  down(*second, memory);
  auto done = device->make_event();
  device->record(*done, *second);
  first.reset();
  second.reset();
  device->synchronize(*done);
  EXPECT_TRUE(round_trip_is_equal());
}

TEST_F(OnGpu, OtherThreadsMayUseEverything) {
  DeviceMemory memory(*device, kBytes);
  auto stream = device->make_copy_stream("copy");
  auto event = device->make_event();
  std::thread([&] {
    device->attach_thread();
    up(*stream, memory);
    device->record(*event, *stream);
  }).join();
  std::thread([&] {
    // Not attached, as a thread whose context the framework has changed meanwhile.
    EXPECT_EQ(current_context(), nullptr);
    device->wait(*stream, *event);
    down(*stream, memory);
    device->record(*event, *stream);
    device->synchronize(*event);
    EXPECT_EQ(current_context(), nullptr) << "a call left its context behind";
    device->attach_thread();
    EXPECT_NE(current_context(), nullptr);
  }).join();
  EXPECT_TRUE(round_trip_is_equal());
}

TEST_F(OnGpu, RegistrationErrorsAreTyped) {
  HostMapping other(1 << 20);
  EXPECT_THROW(backend->register_host(other.data(), 0), InvalidArgument);
  EXPECT_THROW(backend->register_host(other.data() + 8, 4096), InvalidArgument);
  try {
    backend->register_host(host.data(), kBytes);
    FAIL() << "registered twice";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, 712) << error.what();
    EXPECT_TRUE(contains(error.what(), "cuMemHostRegister_v2") && contains(error.what(), "712")) << error.what();
  }
  backend->register_host(other.data(), 1 << 20);
  backend->unregister_host(other.data());
  backend->unregister_host(other.data());  // unknown by now: quiet
  backend->register_host(other.data(), 1 << 20);
  backend->unregister_host(other.data());
}

TEST_F(OnGpu, AnUnknownOrdinalIsExplained) {
  try {
    make_cuda_backend({4711});
    FAIL() << "found GPU 4711";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, 101);
    for (const char* part : {"cuDeviceGet", "101", "cuda:4711", "visible"}) {
      EXPECT_TRUE(contains(error.what(), part)) << error.what();
    }
  }
}

TEST_F(OnGpu, AFailedCopyNamesCallAndSize) {
  auto stream = device->make_copy_stream("copy");
  try {
    device->copy(*stream, Direction::kHostToDevice, reinterpret_cast<void*>(0x10), host.data(), 4096);
    auto event = device->make_event();
    device->record(*event, *stream);
    device->synchronize(*event);
    FAIL() << "copied to an address that is no memory";
  } catch (const DriverError& error) {
    EXPECT_TRUE(contains(error.what(), "cuMemcpyHtoDAsync_v2") && contains(error.what(), "4096")) << error.what();
  }
}

TEST_F(OnGpu, StreamsAndEventsMayOutliveTheBackend) {
  auto stream = device->make_copy_stream("copy");
  auto event = device->make_event();
  device->record(*event, *stream);
  backend->unregister_host(host.data());
  backend.reset();
  stream.reset();
  event.reset();
}

TEST_F(OnGpu, TwoGpusShareEvents) {
  if (cuda::driver_device_count() < 2) GTEST_SKIP() << "one GPU only";
  auto both = make_cuda_backend({0, 1});
  Device& a = both->device(0);
  Device& b = both->device(1);
  DeviceMemory memory_a(a, kBytes), memory_b(b, kBytes);
  auto stream_a = a.make_copy_stream("a");
  auto stream_b = b.make_copy_stream("b");
  auto event = a.make_event();
  a.attach_thread();
  const cuda::ContextHandle before = current_context();
  up(*stream_a, memory_a);
  down(*stream_a, memory_a);
  a.record(*event, *stream_a);
  b.wait(*stream_b, *event);
  b.copy(*stream_b, Direction::kHostToDevice, memory_b.data(), host.data() + kBytes, kBytes);
  b.copy(*stream_b, Direction::kDeviceToHost, host.data() + kBytes, memory_b.data(), kBytes);
  b.record(*event, *stream_b);  // an event made by the other device
  a.wait(*stream_a, *event);
  a.synchronize(*event);
  EXPECT_TRUE(round_trip_is_equal());
  EXPECT_EQ(current_context(), before);
}

}  // namespace
}  // namespace roundpipe
