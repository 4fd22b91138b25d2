// The small interface through which the core sees a device: streams, events, copies, host registration.
// Two implementations: cuda_backend (driver API resolved at run time) and host_backend (simulated devices).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace roundpipe {

class HappensBefore;

enum class Direction : std::uint8_t { kHostToDevice, kDeviceToHost };
enum class Access : std::uint8_t { kRead, kWrite };

// What the host's end of a copy is. All but kPinned goes through bounce buffers.
enum class HostMemory : std::uint8_t {
  kPinned,
  kPageable,
  kFile,      // mapped from a file: read ahead of the copies
  kFileOnce,  // and too large to stay in memory: what was copied may be dropped first
};

// Move-only owners made by a Device; a null Stream or Event does not exist.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;
};

class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;
};

// Every method may be called from any thread, and leaves the device that is current there as it was: the framework
// takes a thread's current context for its current device, so a call on behalf of another GPU must not move its user to
// it.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual std::string name() const = 0;  // "cuda:0", "host:1"
  // Makes the device's context current for good, which saves its changing at each call. For threads of the engine's own
  // that serve one device; never on a thread that is the framework's or the user's.
  virtual void attach_thread() = 0;

  // A FIFO for copies that never synchronises implicitly with any other stream.
  virtual std::unique_ptr<Stream> make_copy_stream(const char* label) = 0;
  // A non-owning wrapper of the stream on which the framework launches compute. `native` is a CUstream; simulated
  // devices ignore it, because their compute stream is whatever thread calls.
  virtual std::unique_ptr<Stream> wrap_compute_stream(std::uintptr_t native) = 0;

  virtual std::unique_ptr<Event> make_event() = 0;
  virtual void record(Event& event, Stream& stream) = 0;
  // `event` must have been recorded before this is called, else it throws: a wait on an unrecorded CUDA event is a
  // silent no-op. May be called with an event and a stream of two different devices of one backend.
  virtual void wait(Stream& stream, const Event& event) = 0;
  virtual bool query(const Event& event) = 0;        // has everything before the record finished?
  virtual void synchronize(const Event& event) = 0;  // blocks the calling thread until it has

  virtual void copy(Stream& stream, Direction direction, void* dst, const void* src, std::size_t bytes) = 0;
  virtual void zero(Stream& stream, void* dst, std::size_t bytes) = 0;
  // The contents of this device range are dead from here on (in stream order). Simulated devices fill it with 0xFF
  // bytes (NaN in every float type) when checking is on; a GPU does nothing.
  virtual void discard(Stream& stream, void* range, std::size_t bytes) = 0;

  // Memory the engine may use on this device: taken from the framework's allocator and leased to the core.
  virtual void lease(void* base, std::size_t bytes) = 0;  // throws DeviceOutOfMemory above the device's limit
  virtual void end_lease(void* base) noexcept = 0;
  virtual std::size_t memory_limit_bytes() const = 0;  // 0: no limit of our own

  // Compute runs on the calling thread and waits block it, as on simulated devices: whoever waits for a copy there can
  // learn of its failure before it computes on the target. (On a GPU a failed copy makes every later call fail.)
  virtual bool compute_is_calling_thread() const noexcept { return false; }

  // Tells the happens-before checker that compute launched on `stream` reads or writes a range. No-op on a GPU and
  // when checking is off.
  virtual void declare(Stream& stream, Access access, const void* range, std::size_t bytes, const char* what) = 0;
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  virtual std::size_t device_count() const = 0;
  virtual Device& device(std::size_t index) = 0;  // throws InvalidArgument when out of range
  // Page-locks host memory for every device. Both ends of the range must be page-aligned; at most 64 GiB.
  virtual void register_host(void* base, std::size_t bytes) = 0;
  virtual void unregister_host(void* base) noexcept = 0;
  // Whether this byte is page-locked already, by whomsoever.
  virtual bool page_locked(const void* address) = 0;
  virtual HappensBefore* checker() noexcept = 0;  // null: not checking
};

}  // namespace roundpipe
