#include "core/host_backend.h"

#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/argument_checks.h"
#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_stream.h"

namespace roundpipe {
namespace {

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

class HostDevice final : public Device {
 public:
  HostDevice(std::shared_ptr<HostRuntime> runtime, std::size_t index, std::size_t limit_bytes)
      : runtime_(std::move(runtime)), name_("host:" + std::to_string(index)), limit_bytes_(limit_bytes) {}

  std::string name() const override { return name_; }
  void attach_thread() override {}

  std::unique_ptr<Stream> make_copy_stream(const char* label) override {
    return make_host_copy_stream(runtime_, name_ + "/" + (label == nullptr ? "copy" : label));
  }

  // Wrappers of one native stream are one stream, so they share the actor.
  std::unique_ptr<Stream> wrap_compute_stream(std::uintptr_t native) override {
    HappensBefore::Actor actor = 0;
    if (HappensBefore* checker = runtime_->checker()) {
      std::lock_guard lock(mutex_);
      auto it = compute_actors_.find(native);
      if (it == compute_actors_.end()) {
        const std::string suffix = native == 0 ? "" : "#" + std::to_string(native);
        it = compute_actors_.emplace(native, checker->add_actor(name_ + "/compute" + suffix)).first;
      }
      actor = it->second;
    }
    return make_host_compute_stream(runtime_, actor);
  }

  std::unique_ptr<Event> make_event() override { return std::make_unique<HostEvent>(); }

  void record(Event& event, Stream& stream) override {
    HostStream& host_stream = own(stream, "record");
    auto record = std::make_shared<EventRecord>(runtime_);
    host_stream.run([record, &host_stream] { record->complete(host_stream.actor(), host_stream.failure()); });
    own(event, "record").set(std::move(record));
  }

  void wait(Stream& stream, const Event& event) override {
    HostStream& host_stream = own(stream, "wait");
    host_stream.run([record = recorded(event, "wait"), &host_stream] {
      record->wait();
      if (host_stream.runtime()->checker() != nullptr) record->acquire(host_stream.actor());
    });
  }

  bool query(const Event& event) override {
    const std::shared_ptr<EventRecord> record = recorded(event, "query");
    if (!record->completed()) return false;
    seen(*record);
    return true;
  }

  void synchronize(const Event& event) override {
    const std::shared_ptr<EventRecord> record = recorded(event, "synchronize");
    record->wait();
    seen(*record);
  }

  void copy(Stream& stream, Direction direction, void* dst, const void* src, std::size_t bytes) override {
    HostStream& host_stream = own(stream, "copy");
    if (bytes == 0) return;
    require_memory("copy", "dst", dst);
    require_memory("copy", "src", src);
    RP_REQUIRE(address(dst) + bytes <= address(src) || address(src) + bytes <= address(dst),
               "copy: dst and src overlap (" + std::to_string(bytes) +
                   " bytes); host and device memory are separate, check the addresses");
    const bool fails = runtime_->count_copy();
    const char* what = direction == Direction::kHostToDevice ? "copy to device" : "copy to host";
    host_stream.run([=, this, &host_stream] {
      if (fails) {
        host_stream.fail(std::string(what) + " of " + std::to_string(bytes) + " bytes on " + name_ +
                         ": injected failure; the bytes were not copied");
        return;
      }
      host_stream.declare(Access::kRead, src, bytes, what);
      host_stream.declare(Access::kWrite, dst, bytes, what);
      std::memcpy(dst, src, bytes);
    });
  }

  void zero(Stream& stream, void* dst, std::size_t bytes) override {
    HostStream& host_stream = own(stream, "zero");
    if (bytes == 0) return;
    require_memory("zero", "dst", dst);
    host_stream.run([=, &host_stream] {
      host_stream.declare(Access::kWrite, dst, bytes, "zero fill");
      std::memset(dst, 0, bytes);
    });
  }

  void discard(Stream& stream, void* range, std::size_t bytes) override {
    HostStream& host_stream = own(stream, "discard");
    if (bytes == 0) return;
    require_memory("discard", "range", range);
    if (runtime_->checker() == nullptr) return;
    host_stream.run([=, &host_stream] {
      host_stream.declare(Access::kWrite, range, bytes, "discard");
      std::memset(range, 0xFF, bytes);
    });
  }

  void lease(void* base, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    RP_REQUIRE(!leases_.contains(base),
               "lease: this address is already leased on " + name_ + "; end_lease() it before leasing it again");
    if (limit_bytes_ != 0 && bytes > limit_bytes_ - leased_bytes_) {
      throw DeviceOutOfMemory(name_ + ": lease of " + std::to_string(bytes) + " bytes asked, " +
                                  std::to_string(leased_bytes_) + " of the limit of " + std::to_string(limit_bytes_) +
                                  " bytes are leased; use smaller stages or raise the device's limit",
                              bytes);
    }
    leases_.emplace(base, bytes);
    leased_bytes_ += bytes;
    if (HappensBefore* checker = runtime_->checker()) checker->fresh(base, bytes);
  }

  void end_lease(void* base) noexcept override {
    std::lock_guard lock(mutex_);
    const auto it = leases_.find(base);
    if (it == leases_.end()) return;
    leased_bytes_ -= it->second;
    // The framework may now give the memory to anyone, whose accesses have nothing to do with ours.
    if (HappensBefore* checker = runtime_->checker()) checker->fresh(base, it->second);
    leases_.erase(it);
  }

  std::size_t memory_limit_bytes() const override { return limit_bytes_; }

  bool compute_is_calling_thread() const noexcept override { return true; }

  void declare(Stream& stream, Access access, const void* range, std::size_t bytes, const char* what) override {
    HostStream& host_stream = own(stream, "declare");
    HappensBefore* checker = runtime_->checker();
    if (checker == nullptr) return;
    checker->join(host_stream.actor(), checker->this_thread());
    host_stream.declare(access, range, bytes, what);
  }

 private:
  HostStream& own(Stream& stream, const char* operation) const {
    auto* host_stream = dynamic_cast<HostStream*>(&stream);
    RP_REQUIRE(host_stream != nullptr && host_stream->runtime() == runtime_.get(),
               std::string(operation) + ": the stream was made by another backend than " + name_ +
                   "'s; use one made by a device of this backend");
    return *host_stream;
  }

  HostEvent& own(Event& event, const char* operation) const {
    auto* host_event = dynamic_cast<HostEvent*>(&event);
    RP_REQUIRE(host_event != nullptr, std::string(operation) + ": the event is not one of a simulated device, but " +
                                          name_ + " is; use this backend's make_event()");
    return *host_event;
  }

  std::shared_ptr<EventRecord> recorded(const Event& event, const char* operation) const {
    const auto* host_event = dynamic_cast<const HostEvent*>(&event);
    RP_REQUIRE(host_event != nullptr, std::string(operation) + ": the event is not one of a simulated device, but " +
                                          name_ + " is; use this backend's make_event()");
    std::shared_ptr<EventRecord> record = host_event->current();
    RP_REQUIRE(record != nullptr, std::string(operation) + ": the event on " + name_ +
                                      " was never recorded; record() it first, a wait on it would order nothing");
    RP_REQUIRE(record->runtime() == runtime_.get(),
               std::string(operation) + ": the event was recorded with another backend than " + name_ + "'s");
    return record;
  }

  // The host has seen the event complete.
  void seen(const EventRecord& record) const {
    if (HappensBefore* checker = runtime_->checker()) record.acquire(checker->this_thread());
    record.throw_failure_once();
  }

  const std::shared_ptr<HostRuntime> runtime_;
  const std::string name_;
  const std::size_t limit_bytes_;
  std::mutex mutex_;  // guards everything below; leases come from any thread
  std::map<void*, std::size_t> leases_;
  std::size_t leased_bytes_ = 0;
  std::map<std::uintptr_t, HappensBefore::Actor> compute_actors_;  // by native stream
};

}  // namespace

struct HostBackend::State {
  std::shared_ptr<HostRuntime> runtime;
  std::vector<std::unique_ptr<HostDevice>> devices;
  std::mutex mutex;  // guards everything below
  std::map<std::uintptr_t, std::size_t> registered;
  std::int64_t registrations_until_failure = -1;  // negative: none fails
  std::int64_t most_registrations = -1;           // negative: any number
};

HostBackend::HostBackend(const HostBackendOptions& options) : state_(std::make_unique<State>()) {
  RP_REQUIRE(options.devices > 0, "HostBackend: 0 devices asked, at least 1 is needed");
  state_->runtime = std::make_shared<HostRuntime>(options);
  for (std::size_t i = 0; i < options.devices; ++i) {
    state_->devices.push_back(std::make_unique<HostDevice>(state_->runtime, i, options.memory_limit_bytes));
  }
}

HostBackend::~HostBackend() = default;

std::size_t HostBackend::device_count() const { return state_->devices.size(); }

Device& HostBackend::device(std::size_t index) {
  RP_REQUIRE(index < state_->devices.size(), "device: index " + std::to_string(index) + " asked, the backend has " +
                                                 std::to_string(state_->devices.size()) + " simulated devices");
  return *state_->devices[index];
}

// As strict as the driver, so that mistakes show without a GPU.
void HostBackend::register_host(void* base, std::size_t bytes) {
  require_registrable(base, bytes);
  const std::uintptr_t begin = address(base);
  std::lock_guard lock(state_->mutex);
  if (state_->registrations_until_failure >= 0 && state_->registrations_until_failure-- == 0) {
    throw DriverError("register_host of " + std::to_string(bytes) + " bytes: injected failure; nothing was registered",
                      kInjectedFailure);
  }
  if (state_->most_registrations >= 0 &&
      state_->registered.size() >= static_cast<std::size_t>(state_->most_registrations)) {
    throw HostOutOfMemory("register_host of " + std::to_string(bytes) + " bytes: " +
                              std::to_string(state_->registered.size()) + " ranges are registered, and no more can be",
                          bytes);
  }
  const auto next = state_->registered.lower_bound(begin);
  const bool overlaps_next = next != state_->registered.end() && next->first < begin + bytes;
  const bool overlaps_previous =
      next != state_->registered.begin() && std::prev(next)->first + std::prev(next)->second > begin;
  if (overlaps_next || overlaps_previous) {
    throw DriverError(
        "register_host: a part of these " + std::to_string(bytes) + " bytes is registered already; unregister it first",
        712);
  }
  state_->registered.emplace(begin, bytes);
}

void HostBackend::unregister_host(void* base) noexcept {
  std::lock_guard lock(state_->mutex);
  const auto it = state_->registered.find(address(base));
  if (it == state_->registered.end()) return;
  // Registered memory is about to go back to the system: whatever appears at this address later is other memory.
  if (HappensBefore* checker = state_->runtime->checker()) checker->fresh(base, it->second);
  state_->registered.erase(it);
}

bool HostBackend::page_locked(const void* byte) {
  std::lock_guard lock(state_->mutex);
  const auto after = state_->registered.upper_bound(address(byte));
  if (after == state_->registered.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address(byte) - begin < bytes;
}

HappensBefore* HostBackend::checker() noexcept { return state_->runtime->checker(); }

void HostBackend::set_delays(std::uint64_t seed, std::uint32_t max_delay_us) {
  state_->runtime->set_delays(seed, max_delay_us);
}

void HostBackend::fail_copy_after(std::int64_t copies) { state_->runtime->fail_copy_after(copies); }

void HostBackend::fail_registration_after(std::int64_t registrations) {
  std::lock_guard lock(state_->mutex);
  state_->registrations_until_failure = registrations;
}

void HostBackend::limit_registrations(std::int64_t most) {
  std::lock_guard lock(state_->mutex);
  state_->most_registrations = most;
}

}  // namespace roundpipe
