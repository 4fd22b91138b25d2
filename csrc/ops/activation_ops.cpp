// stash, record_*, fetch_*, recompute_*, declare_access: activations that wait on the host.
#include <algorithm>
#include <string>
#include <utility>

#include "core/errors.h"
#include "ops/arenas.h"
#include "ops/checks.h"
#include "ops/engine.h"
#include "ops/guard.h"

namespace roundpipe::ops {
namespace {

struct Described {
  std::vector<std::int64_t> sizes;
  ScalarType dtype;
};

struct RecordHandle : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kRecord;
  using OfEngine::OfEngine;
  std::shared_ptr<Record> record;
  std::vector<Described> tensors;
  std::int64_t seed = 0;
};

struct Fetch : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kFetch;
  using OfEngine::OfEngine;
  std::size_t device = 0;
  std::vector<DeviceBytes> targets;
  std::shared_ptr<std::vector<Tensor>> held;  // the targets, as the copy's request holds them
  std::shared_ptr<Handover> handover;
};

struct Recompute : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kRecompute;
  using OfEngine::OfEngine;
  std::shared_ptr<Fetch> fetch;
  std::int64_t record = 0;  // the handle that ends with the recompute
  std::int64_t seed = 0;
};

std::vector<Described> describe_all(const std::vector<Tensor>& tensors) {
  std::vector<Described> all;
  for (const Tensor& tensor : tensors) {
    all.push_back({{tensor.sizes().begin(), tensor.sizes().end()}, tensor.scalar_type()});
  }
  return all;
}

std::shared_ptr<RecordHandle> get_record(std::int64_t record) {
  return HandleRegistry::global().get<RecordHandle>(record, "record");
}

std::int64_t stash(std::int64_t engine, std::int64_t device, std::vector<Tensor> tensors, std::int64_t traffic,
                   std::int64_t seed) {
  EngineUse use(engine, "engine");
  DeviceRoom& room = use->room(device);
  const Traffic kind = require_traffic(traffic);
  HeldTensors held = hold(tensors, "tensors", room.place);
  auto handle = std::make_shared<RecordHandle>(use.share());
  handle->tensors = describe_all(tensors);
  handle->seed = seed;
  handle->record =
      use->store().stash(*room.device, *room.transfers, *room.compute, held.ranges, kind, std::move(held.tensors));
  return HandleRegistry::global().add(std::move(handle));
}

std::int64_t stash_host(std::int64_t engine, std::vector<Tensor> tensors) {
  EngineUse use(engine, "engine");
  const HeldTensors held = hold(tensors, "tensors", Place{});
  auto handle = std::make_shared<RecordHandle>(use.share());
  handle->tensors = describe_all(tensors);
  handle->record = use->store().from_host(held.ranges);
  return HandleRegistry::global().add(std::move(handle));
}

bool record_order_after_read(std::int64_t record, std::int64_t device, std::int64_t timeout_ms) {
  const auto handle = get_record(record);
  EngineUse use(handle->engine());
  DeviceRoom& room = use->room(device);
  return use->store().order_after_read(*handle->record, *room.compute, require_timeout(timeout_ms));
}

bool record_wait(std::int64_t record, std::int64_t timeout_ms) {
  return get_record(record)->record->wait_host(require_timeout(timeout_ms));
}

std::vector<Tensor> record_memory(std::int64_t record) {
  const auto handle = get_record(record);
  std::vector<Tensor> tensors;
  for (std::size_t i = 0; i < handle->tensors.size(); ++i) {
    const Described& described = handle->tensors[i];
    tensors.push_back(owned_host_tensor(handle->record->host(i), described.sizes, described.dtype, handle->record));
  }
  return tensors;
}

std::vector<Tensor> record_host(std::int64_t record) {
  if (!get_record(record)->record->wait_host(std::chrono::milliseconds(0))) {
    refuse("record", "a record whose bytes are on the host", "one still being copied; call record_wait first");
  }
  return record_memory(record);
}

void record_drop(std::int64_t record) { HandleRegistry::global().take<RecordHandle>(record, "record"); }

std::shared_ptr<Fetch> start_fetch(EngineUse& use, std::int64_t device, const RecordHandle& record,
                                   const std::vector<Tensor>& targets, Traffic traffic) {
  DeviceRoom& room = use->room(device);
  record.require_engine(use.share(), "record");
  require_same_length("targets", targets.size(), "the record's tensors", record.tensors.size());
  HeldTensors held = hold(targets, "targets", room.place);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (held.ranges[i].bytes != record.record->bytes(i)) {
      refuse(at("targets", i), std::to_string(record.record->bytes(i)) + " bytes, as the record's tensor",
             std::to_string(held.ranges[i].bytes) + " bytes (" + describe(targets[i]) + ")");
    }
  }
  auto fetch = std::make_shared<Fetch>(use.share());
  fetch->device = static_cast<std::size_t>(device);
  fetch->targets = held.ranges;
  fetch->held = std::move(held.tensors);
  fetch->handover = use->store().fetch(*room.device, *room.transfers, *room.compute, record.record, held.ranges,
                                       traffic, fetch->held);
  return fetch;
}

// From here on whoever gets the targets' memory next is ordered after the copy, so the request lets go of it. It would
// hold it until the host sees the copy complete: a host that runs ahead of a busy GPU had as many fetched tensors alive
// as it was layers ahead.
bool wait_fetch(const Fetch& fetch, std::int64_t timeout_ms) {
  EngineUse use(fetch.engine());
  DeviceRoom& room = use->room(static_cast<std::int64_t>(fetch.device));
  if (!use->store().fetch_wait(*room.device, *fetch.handover, *room.compute, fetch.targets,
                               require_timeout(timeout_ms))) {
    return false;
  }
  fetch.held->clear();
  return true;
}

std::int64_t fetch_start(std::int64_t engine, std::int64_t device, std::int64_t record, std::vector<Tensor> targets,
                         std::int64_t traffic) {
  EngineUse use(engine, "engine");
  const Traffic kind = require_traffic(traffic);
  return HandleRegistry::global().add(start_fetch(use, device, *get_record(record), targets, kind));
}

bool fetch_wait(std::int64_t fetch, std::int64_t timeout_ms) {
  const auto object = HandleRegistry::global().get<Fetch>(fetch, "fetch");
  if (!wait_fetch(*object, timeout_ms)) return false;
  HandleRegistry::global().forget_if_live(fetch);
  return true;
}

void fetch_cancel(std::int64_t fetch) { HandleRegistry::global().take<Fetch>(fetch, "fetch"); }

std::int64_t recompute_begin(std::int64_t engine, std::int64_t device, std::int64_t record,
                             std::vector<Tensor> targets) {
  EngineUse use(engine, "engine");
  const auto handle = get_record(record);
  auto recompute = std::make_shared<Recompute>(use.share());
  recompute->fetch = start_fetch(use, device, *handle, targets, Traffic::kActivations);
  recompute->record = record;
  recompute->seed = handle->seed;
  return HandleRegistry::global().add(std::move(recompute));
}

std::vector<std::int64_t> recompute_end(std::int64_t recompute, std::int64_t timeout_ms) {
  const auto object = HandleRegistry::global().get<Recompute>(recompute, "recompute");
  if (!wait_fetch(*object->fetch, timeout_ms)) return {0, 0};
  HandleRegistry::global().forget_if_live(object->record);
  HandleRegistry::global().forget_if_live(recompute);
  return {1, object->seed};
}

void declare_access(std::int64_t engine, std::int64_t device, Tensor tensor, bool write) {
  EngineUse use(engine, "engine");
  DeviceRoom& room = use->room(device);
  require_contiguous(tensor, "tensor", room.place);
  room.device->declare(*room.compute, write ? Access::kWrite : Access::kRead, tensor.mutable_data_ptr(),
                       byte_count(tensor), write ? "compute writes" : "compute reads");
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, stash);
  ROUNDPIPE_OP(library, stash_host);
  ROUNDPIPE_OP(library, record_order_after_read);
  ROUNDPIPE_OP(library, record_wait);
  ROUNDPIPE_OP(library, record_host);
  ROUNDPIPE_OP(library, record_memory);
  ROUNDPIPE_OP(library, record_drop);
  ROUNDPIPE_OP(library, fetch_start);
  ROUNDPIPE_OP(library, fetch_wait);
  ROUNDPIPE_OP(library, fetch_cancel);
  ROUNDPIPE_OP(library, recompute_begin);
  ROUNDPIPE_OP(library, recompute_end);
  ROUNDPIPE_OP(library, declare_access);
}
