// host_claim*, host_limits, host_file_bytes: host memory of others in which weights stay, and how much there is.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/host_claim.h"
#include "core/memory_limits.h"
#include "core/memory_map.h"
#include "core/pin_limits.h"
#include "ops/checks.h"
#include "ops/claim.h"
#include "ops/guard.h"

namespace roundpipe::ops {
namespace {

std::vector<std::int64_t> numbers(const HostClaimStats& stats) {
  return {static_cast<std::int64_t>(stats.registered_bytes), static_cast<std::int64_t>(stats.pinned_bytes),
          static_cast<std::int64_t>(stats.pageable_bytes), static_cast<std::int64_t>(stats.file_bytes),
          static_cast<std::int64_t>(stats.registrations)};
}

std::int64_t host_claim(std::int64_t engine, std::vector<Tensor> tensors, bool pin) {
  EngineUse use(engine, "engine");
  HeldTensors held = hold(tensors, "tensors", Place{});
  std::vector<HostRange> ranges;
  ranges.reserve(held.ranges.size());
  for (const DeviceBytes& range : held.ranges) ranges.push_back({range.data, range.bytes});
  HostClaimOptions options;
  options.pin = pin;
  auto claim = std::make_shared<Claim>(use.share());
  claim->body = std::make_shared<HostClaim>(use->backend(), std::move(ranges), options, std::move(held.tensors));
  return HandleRegistry::global().add(std::move(claim));
}

void host_claim_drop(std::int64_t claim) { HandleRegistry::global().take<Claim>(claim, "claim"); }

std::vector<std::int64_t> host_claim_stats(std::int64_t claim) {
  if (claim == 0) return numbers(HostClaim::total());
  return numbers(HandleRegistry::global().get<Claim>(claim, "claim")->body->stats());
}

std::int64_t host_file_bytes(std::vector<Tensor> tensors) {
  const MemoryMap map = MemoryMap::read();
  std::size_t bytes = 0;
  for (const DeviceBytes& range : hold(tensors, "tensors", Place{}).ranges) {
    bytes += map.file_bytes(range.data, range.bytes);
  }
  return static_cast<std::int64_t>(bytes);
}

std::vector<std::int64_t> host_limits() {
  const MemoryLimits limits = read_memory_limits();
  const PinLimits pins = read_pin_limits(limits);
  constexpr std::size_t kMost = std::size_t{1} << 62;
  std::vector<std::int64_t> values;
  for (const std::size_t value :
       {limits.total_bytes, limits.available_bytes, limits.cgroup_limit_bytes, limits.cgroup_used_bytes,
        limits.headroom_bytes(), pins.room_bytes(kMost), pins.memlock_bytes}) {
    values.push_back(static_cast<std::int64_t>(std::min(value, kMost)));
  }
  return values;
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, host_claim);
  ROUNDPIPE_OP(library, host_claim_drop);
  ROUNDPIPE_OP(library, host_claim_stats);
  ROUNDPIPE_OP(library, host_file_bytes);
  ROUNDPIPE_OP(library, host_limits);
}
