#include "core/activation_store.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/saturating_deadline.h"
#include "core/stored_record.h"

namespace roundpipe {
namespace {

StoredRecord& stored(Record& record) {
  auto* own = dynamic_cast<StoredRecord*>(&record);
  RP_REQUIRE(own != nullptr, "activation store: the record was not made by an activation store");
  return *own;
}

void check_ranges(const char* call, const std::vector<DeviceBytes>& ranges) {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    RP_REQUIRE(ranges[i].data != nullptr || ranges[i].bytes == 0, std::string(call) + ": tensor " + std::to_string(i) +
                                                                      " has " + std::to_string(ranges[i].bytes) +
                                                                      " bytes at a null address");
  }
}

// What a download holds. It is over before anything is let go: the framework hands the memory to another tensor at
// once.
struct Held {
  Held(std::shared_ptr<void> tensors_, std::shared_ptr<Record> record_)
      : tensors(std::move(tensors_)), record(std::move(record_)) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { over->store(true); }

  const std::shared_ptr<std::atomic<bool>> over = std::make_shared<std::atomic<bool>>(false);
  const std::shared_ptr<void> tensors;
  const std::shared_ptr<Record> record;
};

}  // namespace

struct ActivationStore::State {
  State(std::shared_ptr<HostArena> arena_, HappensBefore* checker_, std::size_t max_outstanding_bytes_)
      : arena(std::move(arena_)), checker(checker_), max_outstanding_bytes(max_outstanding_bytes_) {}

  const std::shared_ptr<HostArena> arena;
  HappensBefore* const checker;
  const std::size_t max_outstanding_bytes;
  const std::shared_ptr<RecordAccounting> accounting = std::make_shared<RecordAccounting>();

  std::shared_ptr<StoredRecord> make_record(const std::vector<DeviceBytes>& sources) {
    return std::make_shared<StoredRecord>(*arena, accounting, checker, sources);
  }

  // The framework hands the same addresses out again and again without our seeing it, in the order of its compute
  // stream: what was done to them before belongs to other tensors. Except where a download still reads: it holds its
  // tensors, so these bytes live on, and a second tensor there is a view of the first.
  void begin_life(Device& device, Stream& compute, const std::vector<DeviceBytes>& ranges, const char* what) {
    if (checker == nullptr) return;
    std::lock_guard lock(reading_mutex);
    std::erase_if(reading, [](const Reading& read) { return read.over->load(); });
    for (const DeviceBytes& range : ranges) {
      char* at = static_cast<char*>(range.data);
      char* const end = at + range.bytes;
      for (const Reading& read : reading) {  // ascending
        if (read.end <= at || read.begin >= end) continue;
        live_from(device, compute, at, read.begin, what);
        at = read.end;
      }
      live_from(device, compute, at, end, what);
    }
  }

  void reads(const std::vector<DeviceBytes>& sources, const std::shared_ptr<std::atomic<bool>>& over) {
    if (checker == nullptr) return;
    std::lock_guard lock(reading_mutex);
    for (const DeviceBytes& source : sources) {
      char* const begin = static_cast<char*>(source.data);
      const auto place =
          std::find_if(reading.begin(), reading.end(), [&](const Reading& r) { return r.begin > begin; });
      reading.insert(place, {begin, begin + source.bytes, over});
    }
  }

 private:
  struct Reading {
    char* begin;
    char* end;
    std::shared_ptr<std::atomic<bool>> over;
  };

  void live_from(Device& device, Stream& compute, char* begin, char* end, const char* what) {
    if (begin >= end) return;
    const auto bytes = static_cast<std::size_t>(end - begin);
    checker->fresh(begin, bytes);
    device.declare(compute, Access::kWrite, begin, bytes, what);
  }

  std::mutex reading_mutex;      // guards `reading`: devices' workers stash at the same time
  std::vector<Reading> reading;  // sources of downloads under way, by address; only with a checker
};

ActivationStore::ActivationStore(std::shared_ptr<HostArena> arena, HappensBefore* checker,
                                 std::size_t max_outstanding_bytes)
    : state_(std::make_shared<State>(std::move(arena), checker, max_outstanding_bytes)) {
  RP_REQUIRE(state_->arena != nullptr, "activation store: the arena is null");
  RP_REQUIRE(max_outstanding_bytes > 0, "activation store: max_outstanding_bytes must be at least 1");
}

ActivationStore::~ActivationStore() = default;

std::shared_ptr<Record> ActivationStore::stash(Device& device, TransferEngine& engine, Stream& compute,
                                               const std::vector<DeviceBytes>& sources, Traffic traffic,
                                               std::shared_ptr<void> keep_alive) {
  check_ranges("stash", sources);
  const std::shared_ptr<StoredRecord> record = state_->make_record(sources);
  state_->begin_life(device, compute, sources, "compute writes a stashed tensor");
  const std::shared_ptr<Event> computed = engine.take_event();
  device.record(*computed, compute);

  TransferRequest request;
  request.direction = Direction::kDeviceToHost;
  request.lane = Lane::kActivations;
  request.traffic = traffic;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    request.segments.push_back({record->host(i), sources[i].data, sources[i].bytes});
  }
  request.before = [&device, computed](Stream& download) { device.wait(download, *computed); };
  auto held = std::make_shared<Held>(std::move(keep_alive), record);
  state_->reads(sources, held->over);
  request.keep_alive = std::move(held);
  record->set_download(engine.submit(std::move(request), state_->max_outstanding_bytes));
  return record;
}

bool ActivationStore::order_after_read(Record& record, Stream& compute, std::chrono::milliseconds timeout) {
  Handover* const down = stored(record).download();
  if (down == nullptr) return true;  // copied by its maker's thread
  if (!down->wait_issued(timeout)) return false;
  down->order_after(compute);
  return true;
}

std::shared_ptr<Record> ActivationStore::from_host(const std::vector<DeviceBytes>& sources) {
  check_ranges("from_host", sources);
  const std::shared_ptr<StoredRecord> record = state_->make_record(sources);
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (sources[i].bytes != 0) std::memcpy(record->host(i), sources[i].data, sources[i].bytes);
  }
  record->made_by_this_thread();
  return record;
}

std::shared_ptr<Handover> ActivationStore::fetch(Device& device, TransferEngine& engine, Stream& compute,
                                                 std::shared_ptr<Record> record,
                                                 const std::vector<DeviceBytes>& targets, Traffic traffic,
                                                 std::shared_ptr<void> keep_alive) {
  RP_REQUIRE(record != nullptr, "fetch: the record is null");
  const StoredRecord& source = stored(*record);
  check_ranges("fetch", targets);
  RP_REQUIRE(targets.size() == source.size(), "fetch: " + std::to_string(targets.size()) + " targets for a record of " +
                                                  std::to_string(source.size()) + " tensors");
  TransferRequest request;
  request.direction = Direction::kHostToDevice;
  request.lane = Lane::kActivations;
  request.traffic = traffic;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    RP_REQUIRE(targets[i].bytes == source.bytes(i), "fetch: target " + std::to_string(i) + " has " +
                                                        std::to_string(targets[i].bytes) + " bytes, the record's has " +
                                                        std::to_string(source.bytes(i)));
    request.segments.push_back({targets[i].data, source.host(i), targets[i].bytes});
  }
  state_->begin_life(device, compute, targets, "compute owns the targets of a fetch");
  const std::shared_ptr<Event> owned = engine.take_event();
  device.record(*owned, compute);

  Handover* const down = source.download();
  if (down != nullptr) {
    // Its failure is this fetch's failure, with the same reason: the wait throws it.
    request.ready = [down] {
      return down->wait_issued(std::chrono::milliseconds(0)) ? Readiness::kReady : Readiness::kNotYet;
    };
  }
  request.before = [&device, owned, record, down](Stream& upload) {
    device.wait(upload, *owned);
    if (down != nullptr) {
      down->order_after(device, upload);
    } else {
      record->wait_host(std::chrono::milliseconds(0));
    }
  };
  request.keep_alive =
      std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<Record>>>(std::move(keep_alive), record);
  std::shared_ptr<Handover> up = engine.submit(std::move(request));
  if (down == nullptr) return up;
  down->on_issued(engine.poker());
  return std::make_shared<FetchHandover>(std::move(up), std::move(record), *down);
}

std::shared_ptr<Handover> ActivationStore::upload(Device& device, TransferEngine& engine, Stream& compute,
                                                  const void* source, DeviceBytes target, Traffic traffic,
                                                  std::shared_ptr<void> keep_alive) {
  check_ranges("upload", {target});
  RP_REQUIRE(source != nullptr || target.bytes == 0,
             "upload: " + std::to_string(target.bytes) + " bytes from a null address");
  TransferRequest request;
  request.direction = Direction::kHostToDevice;
  request.lane = Lane::kActivations;
  request.traffic = traffic;
  request.segments.push_back({target.data, source, target.bytes});
  state_->begin_life(device, compute, {target}, "compute owns the target of an upload");
  const std::shared_ptr<Event> owned = engine.take_event();
  device.record(*owned, compute);
  request.before = [&device, owned](Stream& stream) { device.wait(stream, *owned); };
  request.keep_alive = std::move(keep_alive);
  return engine.submit(std::move(request));
}

bool ActivationStore::fetch_wait(Device& device, Handover& handover, Stream& compute,
                                 const std::vector<DeviceBytes>& targets, std::chrono::milliseconds timeout) {
  const auto deadline = saturating_deadline(timeout);
  if (!handover.wait_issued(timeout)) return false;
  if (device.compute_is_calling_thread() && !handover.wait_settled(left_until(deadline))) return false;
  handover.order_after(device, compute);
  for (const DeviceBytes& target : targets) {
    device.declare(compute, Access::kRead, target.data, target.bytes, "compute reads a fetched tensor");
  }
  return true;
}

std::size_t ActivationStore::live_bytes() const { return state_->accounting->bytes(); }
std::size_t ActivationStore::peak_bytes() const { return state_->accounting->peak(); }
std::size_t ActivationStore::live_records() const { return state_->accounting->records(); }

}  // namespace roundpipe
