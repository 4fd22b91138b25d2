// What unit and ticket handles stand for.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "core/host_claim.h"
#include "core/layer_clock.h"
#include "core/weight_unit.h"
#include "ops/engine.h"

namespace roundpipe::ops {

// The core's unit with all that must live as long: the tensors whose memory it describes and the checker's owner. The
// unit is declared last, so that it goes first.
struct UnitBody {
  explicit UnitBody(std::shared_ptr<Backend> owner) : backend(std::move(owner)), unit(backend->checker()) {}

  std::shared_ptr<Backend> backend;
  std::vector<Tensor> tensors;
  std::shared_ptr<HostClaim> claim;  // null: all memory is pinned
  WeightUnit unit;
};

struct Unit : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kUnit;
  using OfEngine::OfEngine;

  std::shared_ptr<UnitBody> body;
  WeightUnit& unit() const { return body->unit; }
};

struct TicketHandle : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kTicket;
  using OfEngine::OfEngine;

  std::shared_ptr<UnitBody> body;
  Ticket ticket;
};

}  // namespace roundpipe::ops
