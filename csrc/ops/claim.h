// What a claim's handle stands for.
#pragma once

#include <memory>
#include <utility>

#include "core/host_claim.h"
#include "ops/engine.h"

namespace roundpipe::ops {

struct Claim : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kClaim;
  using OfEngine::OfEngine;

  std::shared_ptr<HostClaim> body;  // units hold it too: it ends with the last of them
};

}  // namespace roundpipe::ops
