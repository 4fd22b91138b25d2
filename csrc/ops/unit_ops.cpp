// unit_*, ticket_*: weights that move together, and the order of those who touch them.
#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "core/errors.h"
#include "ops/checks.h"
#include "ops/claim.h"
#include "ops/guard.h"
#include "ops/unit.h"

namespace roundpipe::ops {
namespace {

constexpr std::int64_t kImageAlignment = 256;

// The segments in the order of their offsets, neighbours joined where the host memory is packed like the image. Memory
// of a claim is cut where its kind changes; the claim refuses nothing, so what lies outside it is pageable.
std::vector<HostSegment> pack_segments(const std::vector<DeviceBytes>& ranges, const std::vector<std::int64_t>& offsets,
                                       std::int64_t weight_bytes, const HostClaim* claim) {
  std::vector<std::size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return offsets[a] < offsets[b]; });
  std::vector<HostSegment> segments;
  std::size_t end = 0;
  for (const std::size_t i : order) {
    const std::size_t bytes = ranges[i].bytes;
    const auto limit = static_cast<std::size_t>(weight_bytes);
    if (offsets[i] < 0 || static_cast<std::size_t>(offsets[i]) > limit ||
        bytes > limit - static_cast<std::size_t>(offsets[i])) {
      refuse(at("offsets", i), "a place inside the " + std::to_string(weight_bytes) + " bytes of the image",
             std::to_string(offsets[i]) + " for " + std::to_string(bytes) + " bytes");
    }
    if (bytes == 0) continue;
    const auto offset = static_cast<std::size_t>(offsets[i]);
    if (offset < end) {
      refuse(at("offsets", i), "weights that do not overlap, so " + std::to_string(end) + " or more",
             std::to_string(offset));
    }
    if (claim != nullptr) {
      std::size_t inside = offset;
      for (const HostPiece& piece : claim->pieces(ranges[i].data, bytes)) {
        segments.push_back({piece.base, inside, piece.bytes, piece.memory});
        inside += piece.bytes;
      }
    } else if (!segments.empty() && offset == end &&
               static_cast<char*>(segments.back().host) + segments.back().bytes == ranges[i].data) {
      segments.back().bytes += bytes;
    } else {
      segments.push_back({ranges[i].data, offset, bytes});
    }
    end = offset + bytes;
  }
  return segments;
}

std::atomic<std::uint64_t> next_unit_id{1};

std::int64_t unit_open(std::int64_t engine, std::vector<Tensor> weights, std::vector<std::int64_t> offsets,
                       std::int64_t weight_bytes, std::int64_t gradient_bytes, std::int64_t claim_handle) {
  EngineUse use(engine, "engine");
  std::shared_ptr<HostClaim> claim;
  if (claim_handle != 0) {
    const auto found = HandleRegistry::global().get<Claim>(claim_handle, "claim");
    found->require_engine(use.share(), "claim");
    claim = found->body;
  }
  require_same_length("offsets", offsets.size(), "weights", weights.size());
  for (const auto& [name, bytes] : {std::pair{"weight_bytes", weight_bytes}, {"gradient_bytes", gradient_bytes}}) {
    if (bytes < 0 || bytes % kImageAlignment != 0) {
      refuse(name, "a multiple of 256 that is 0 or more", std::to_string(bytes));
    }
  }
  HeldTensors held = hold(weights, "weights", Place{});
  auto body = std::make_shared<UnitBody>(use->backend());
  body->tensors = std::move(*held.tensors);
  body->unit.id = next_unit_id++;
  body->unit.weight_bytes = static_cast<std::size_t>(weight_bytes);
  body->unit.gradient_bytes = static_cast<std::size_t>(gradient_bytes);
  body->unit.weights = pack_segments(held.ranges, offsets, weight_bytes, claim.get());
  body->claim = std::move(claim);
  body->unit.clock.set_observer([pokes = use->pokes()] { pokes->poke(); });
  auto unit = std::make_shared<Unit>(use.share());
  unit->body = std::move(body);
  return HandleRegistry::global().add(std::move(unit));
}

// The same weights may be opened as another unit, whose clock knows nothing of this one's uploads.
void unit_close(std::int64_t unit) {
  HandleRegistry::global().take<Unit>(unit, "unit")->unit().clock.acquire_finished();
}

std::vector<std::int64_t> unit_counters(std::int64_t unit) {
  const auto object = HandleRegistry::global().get<Unit>(unit, "unit");
  const LayerClock& clock = object->unit().clock;
  std::vector<std::int64_t> counters;
  for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
    counters.push_back(static_cast<std::int64_t>(clock.issued(static_cast<TicketKind>(kind))));
  }
  for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
    counters.push_back(static_cast<std::int64_t>(clock.completed(static_cast<TicketKind>(kind))));
  }
  return counters;
}

void unit_new_epoch(std::int64_t unit) { HandleRegistry::global().get<Unit>(unit, "unit")->unit().clock.new_epoch(); }

void unit_drop_rule(std::int64_t unit, std::int64_t rule) {
  const auto object = HandleRegistry::global().get<Unit>(unit, "unit");
  if (rule < 1 || rule > 5) refuse("rule", "1 to 5", std::to_string(rule));
  object->unit().clock.drop_rule_for_test(static_cast<int>(rule));
}

std::int64_t ticket_issue(std::int64_t unit, std::int64_t kind) {
  const auto object = HandleRegistry::global().get<Unit>(unit, "unit");
  const auto ticket_kind = static_cast<TicketKind>(require_index("kind", kind, kTicketKinds));
  auto handle = std::make_shared<TicketHandle>(object->engine());
  handle->body = object->body;
  handle->ticket = object->unit().clock.issue(ticket_kind);
  return HandleRegistry::global().add(std::move(handle));
}

std::int64_t ticket_wait(std::int64_t ticket, std::int64_t timeout_ms) {
  const auto handle = HandleRegistry::global().get<TicketHandle>(ticket, "ticket");
  return static_cast<std::int64_t>(handle->body->unit.clock.wait(handle->ticket, require_timeout(timeout_ms)));
}

void ticket_finish(std::int64_t ticket, bool poisoned) {
  const auto handle = HandleRegistry::global().get<TicketHandle>(ticket, "ticket");
  LayerClock& clock = handle->body->unit.clock;
  if (!poisoned && clock.state(handle->ticket) == TicketState::kWaiting) {
    refuse("ticket", "a ticket that ticket_wait has found ready, or poisoned=True", "one that still waits");
  }
  // Ended first: of two callers only one may finish it.
  HandleRegistry::global().take<TicketHandle>(ticket, "ticket");
  if (poisoned) {
    clock.poison(handle->ticket);
  } else {
    clock.complete(handle->ticket);
  }
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, unit_open);
  ROUNDPIPE_OP(library, unit_close);
  ROUNDPIPE_OP(library, unit_counters);
  ROUNDPIPE_OP(library, unit_new_epoch);
  ROUNDPIPE_OP(library, unit_drop_rule);
  ROUNDPIPE_OP(library, ticket_issue);
  ROUNDPIPE_OP(library, ticket_wait);
  ROUNDPIPE_OP(library, ticket_finish);
}
