// gradient_pool_*: host memory through which gradients pass on their way to their update.
#include <memory>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/guard.h"
#include "ops/pool.h"

namespace roundpipe::ops {
namespace {

std::int64_t gradient_pool_open(std::int64_t engine, Tensor memory) {
  EngineUse use(engine, "engine");
  require_bytes(memory, "memory", Place{});
  auto pool = std::make_shared<Pool>(use.share());
  pool->body = GradientPool::make(
      memory.mutable_data_ptr(), byte_count(memory), std::make_shared<Tensor>(detached(memory)),
      [pokes = use->pokes()] { pokes->poke(); }, use->checker());
  return HandleRegistry::global().add(std::move(pool));
}

void gradient_pool_close(std::int64_t pool) { HandleRegistry::global().take<Pool>(pool, "pool"); }

std::vector<std::int64_t> gradient_pool_stats(std::int64_t pool) {
  const GradientPoolStats stats = HandleRegistry::global().get<Pool>(pool, "pool")->body->stats();
  return {static_cast<std::int64_t>(stats.bytes), static_cast<std::int64_t>(stats.used_bytes),
          static_cast<std::int64_t>(stats.peak_bytes), static_cast<std::int64_t>(stats.taken),
          static_cast<std::int64_t>(stats.refused)};
}

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, gradient_pool_open);
  ROUNDPIPE_OP(library, gradient_pool_close);
  ROUNDPIPE_OP(library, gradient_pool_stats);
}
