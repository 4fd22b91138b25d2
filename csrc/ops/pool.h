// What a gradient pool's handle stands for.
#pragma once

#include <memory>

#include "core/gradient_pool.h"
#include "ops/engine.h"

namespace roundpipe::ops {

struct Pool : OfEngine {
  static constexpr HandleKind kHandleKind = HandleKind::kPool;
  using OfEngine::OfEngine;

  std::shared_ptr<GradientPool> body;  // jobs and places hold it too
};

}  // namespace roundpipe::ops
