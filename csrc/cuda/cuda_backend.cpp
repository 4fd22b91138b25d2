#include "cuda/cuda_backend.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/argument_checks.h"
#include "core/errors.h"
#include "cuda/cuda_context.h"
#include "cuda/driver_api.h"

namespace roundpipe {
namespace {

using cuda::check;
using cuda::Context;
using cuda::driver_api;
using cuda::ScopedContext;

class CudaStream final : public Stream {
 public:
  // Non-blocking: never synchronises with the legacy default stream, on which the framework may compute.
  explicit CudaStream(std::shared_ptr<Context> context) : context_(std::move(context)), owned_(true) {
    const ScopedContext scope(*context_);
    check("cuStreamCreateWithPriority", driver_api().stream_create(&handle_, cuda::kStreamNonBlocking, 0),
          context_->name());
  }
  CudaStream(std::shared_ptr<Context> context, cuda::StreamHandle borrowed)
      : context_(std::move(context)), handle_(borrowed), owned_(false) {}
  // Work pending on the stream still finishes; the driver frees the stream after it.
  ~CudaStream() override {
    if (owned_) cuda::release_quietly(*context_, [&] { driver_api().stream_destroy(handle_); });
  }

  const std::shared_ptr<Context>& context() const noexcept { return context_; }
  cuda::StreamHandle handle() const noexcept { return handle_; }

 private:
  const std::shared_ptr<Context> context_;
  cuda::StreamHandle handle_ = nullptr;
  const bool owned_;
};

class CudaEvent final : public Event {
 public:
  explicit CudaEvent(std::shared_ptr<Context> context)
      : context_(std::move(context)), handle_(context_->take_event()) {}
  ~CudaEvent() override { context_->give_back_event(handle_); }

  void record(const CudaStream& stream) {
    // The driver records an event only in its own context; recorded for another device, it becomes an event of that
    // one.
    if (stream.context()->handle() != context_->handle()) {
      cuda::EventHandle other = stream.context()->take_event();
      context_->give_back_event(handle_);
      context_ = stream.context();
      handle_ = other;
    }
    check("cuEventRecord", driver_api().event_record(handle_, stream.handle()), context_->name());
    recorded_.store(true, std::memory_order_release);
  }

  bool recorded() const noexcept { return recorded_.load(std::memory_order_acquire); }
  const Context& context() const noexcept { return *context_; }
  cuda::EventHandle handle() const noexcept { return handle_; }

 private:
  std::shared_ptr<Context> context_;
  cuda::EventHandle handle_;
  // The driver takes an event that was never recorded for a complete one: a wait on it would order nothing, silently.
  std::atomic<bool> recorded_{false};
};

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int ordinal) : context_(std::make_shared<Context>(ordinal)) {}

  std::string name() const override { return context_->name(); }

  // No cache of what is current: the framework changes the thread's context behind our back, and the call is cheap.
  void attach_thread() override {
    check("cuCtxSetCurrent", driver_api().context_set_current(context_->handle()), context_->name());
  }

  std::unique_ptr<Stream> make_copy_stream(const char*) override { return std::make_unique<CudaStream>(context_); }

  std::unique_ptr<Stream> wrap_compute_stream(std::uintptr_t native) override {
    return std::make_unique<CudaStream>(context_, reinterpret_cast<cuda::StreamHandle>(native));
  }

  std::unique_ptr<Event> make_event() override { return std::make_unique<CudaEvent>(context_); }

  void record(Event& event, Stream& stream) override {
    const CudaStream& cuda_stream = own(stream, "record");
    auto* cuda_event = dynamic_cast<CudaEvent*>(&event);
    RP_REQUIRE(cuda_event != nullptr, foreign_event("record"));
    const ScopedContext scope(*cuda_stream.context());
    cuda_event->record(cuda_stream);
  }

  void wait(Stream& stream, const Event& event) override {
    const CudaStream& cuda_stream = own(stream, "wait");
    const CudaEvent& cuda_event = recorded(event, "wait");
    const ScopedContext scope(*cuda_stream.context());
    check("cuStreamWaitEvent", driver_api().stream_wait_event(cuda_stream.handle(), cuda_event.handle(), 0), name());
  }

  bool query(const Event& event) override {
    const CudaEvent& cuda_event = recorded(event, "query");
    const ScopedContext scope(cuda_event.context());
    const cuda::Result result = driver_api().event_query(cuda_event.handle());
    if (result == cuda::kNotReady) return false;
    check("cuEventQuery", result, cuda_event.context().name());
    return true;
  }

  void synchronize(const Event& event) override {
    const CudaEvent& cuda_event = recorded(event, "synchronize");
    const ScopedContext scope(cuda_event.context());
    check("cuEventSynchronize", driver_api().event_synchronize(cuda_event.handle()), cuda_event.context().name());
  }

  void copy(Stream& stream, Direction direction, void* dst, const void* src, std::size_t bytes) override {
    const CudaStream& cuda_stream = own(stream, "copy");
    if (bytes == 0) return;
    require_memory("copy", "dst", dst);
    require_memory("copy", "src", src);
    const ScopedContext scope(*cuda_stream.context());
    const bool up = direction == Direction::kHostToDevice;
    const cuda::Result result = up ? driver_api().copy_to_device(device_pointer(dst), src, bytes, cuda_stream.handle())
                                   : driver_api().copy_to_host(dst, device_pointer(src), bytes, cuda_stream.handle());
    if (result == cuda::kSuccess) return;
    cuda::throw_driver_error(up ? "cuMemcpyHtoDAsync_v2" : "cuMemcpyDtoHAsync_v2", result,
                             std::to_string(bytes) + " bytes, " + name());
  }

  void zero(Stream& stream, void* dst, std::size_t bytes) override {
    const CudaStream& cuda_stream = own(stream, "zero");
    if (bytes == 0) return;
    require_memory("zero", "dst", dst);
    const ScopedContext scope(*cuda_stream.context());
    const cuda::Result result = driver_api().set_bytes(device_pointer(dst), 0, bytes, cuda_stream.handle());
    if (result == cuda::kSuccess) return;
    cuda::throw_driver_error("cuMemsetD8Async", result, std::to_string(bytes) + " bytes, " + name());
  }

  void discard(Stream&, void*, std::size_t) override {}

  // The framework's allocator, from which leases come, enforces the memory caps of a GPU.
  void lease(void*, std::size_t) override {}
  void end_lease(void*) noexcept override {}
  std::size_t memory_limit_bytes() const override { return 0; }

  void declare(Stream&, Access, const void*, std::size_t, const char*) override {}

  const Context& context() const noexcept { return *context_; }

 private:
  static cuda::DevicePointer device_pointer(const void* pointer) {
    return static_cast<cuda::DevicePointer>(reinterpret_cast<std::uintptr_t>(pointer));
  }

  const CudaStream& own(const Stream& stream, const char* operation) const {
    const auto* cuda_stream = dynamic_cast<const CudaStream*>(&stream);
    RP_REQUIRE(cuda_stream != nullptr, std::string(operation) + ": the stream is not one of a GPU, but " + name() +
                                           " is one; use a stream made by a device of this backend");
    return *cuda_stream;
  }

  std::string foreign_event(const char* operation) const {
    return std::string(operation) + ": the event is not one of a GPU, but " + name() +
           " is one; use this backend's make_event()";
  }

  const CudaEvent& recorded(const Event& event, const char* operation) const {
    const auto* cuda_event = dynamic_cast<const CudaEvent*>(&event);
    RP_REQUIRE(cuda_event != nullptr, foreign_event(operation));
    RP_REQUIRE(cuda_event->recorded(), std::string(operation) + ": the event on " + name() +
                                           " was never recorded; record() it first, a wait on it would order nothing");
    return *cuda_event;
  }

  const std::shared_ptr<Context> context_;
};

class CudaBackend final : public Backend {
 public:
  explicit CudaBackend(const std::vector<int>& ordinals) {
    for (int ordinal : ordinals) devices_.push_back(std::make_unique<CudaDevice>(ordinal));
  }

  std::size_t device_count() const override { return devices_.size(); }

  Device& device(std::size_t index) override {
    RP_REQUIRE(index < devices_.size(), "device: index " + std::to_string(index) + " asked, the backend has " +
                                            std::to_string(devices_.size()) + " GPUs");
    return *devices_[index];
  }

  // Portable registration serves every context, so any device's will do.
  void register_host(void* base, std::size_t bytes) override {
    require_registrable(base, bytes);
    const ScopedContext scope(devices_.front()->context());
    const cuda::Result result = driver_api().host_register(base, bytes, cuda::kHostRegisterPortable);
    if (result == cuda::kSuccess) return;
    const std::string context = std::to_string(bytes) + " bytes to page-lock";
    if (result == cuda::kOutOfMemory) {
      throw HostOutOfMemory(cuda::describe_error(driver_api(), "cuMemHostRegister_v2", result, context), bytes);
    }
    cuda::throw_driver_error("cuMemHostRegister_v2", result, context);
  }

  void unregister_host(void* base) noexcept override {
    cuda::release_quietly(devices_.front()->context(), [&] { driver_api().host_unregister(base); });
  }

  bool page_locked(const void* address) override {
    const ScopedContext scope(devices_.front()->context());
    unsigned type = 0;
    // Memory that the driver does not know at all is an "invalid value" to it, which is an answer and no failure.
    return driver_api().pointer_get_attribute(&type, cuda::kPointerAttributeMemoryType,
                                              reinterpret_cast<cuda::DevicePointer>(address)) == cuda::kSuccess &&
           type == cuda::kMemoryTypeHost;
  }

  HappensBefore* checker() noexcept override { return nullptr; }

 private:
  std::vector<std::unique_ptr<CudaDevice>> devices_;
};

}  // namespace

std::unique_ptr<Backend> make_cuda_backend(const std::vector<int>& ordinals) {
  RP_REQUIRE(!ordinals.empty(), "make_cuda_backend: no ordinal given, at least one GPU is needed");
  return std::make_unique<CudaBackend>(ordinals);
}

bool cuda_driver_available(std::string* why_not) noexcept {
  try {
    driver_api();
    return true;
  } catch (const std::exception& error) {
    if (why_not != nullptr) *why_not = error.what();
    return false;
  }
}

}  // namespace roundpipe
