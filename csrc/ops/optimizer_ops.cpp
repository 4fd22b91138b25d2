// update_*, convert, isa_*: element-wise work on the host, queued behind tickets or done at once.
#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>

#include "core/errors.h"
#include "cpu/convert.h"
#include "ops/checks.h"
#include "ops/element_convert.h"
#include "ops/guard.h"
#include "ops/update_tickets.h"

namespace roundpipe::ops {
namespace {

constexpr std::int64_t kGrain = 1 << 16;  // elements: a slice outweighs the cost of handing it to a thread

// The pairs of one update laid end to end in one index space, which the queue cuts into slices.
struct Batch {
  std::vector<ElementConvert> pairs;
  std::vector<std::size_t> starts;  // of each pair, ascending
  std::vector<Tensor> held;
  std::vector<std::uint8_t*> flags;  // of each pair, where the source is checked; else empty

  void run(std::size_t begin, std::size_t end) const {
    auto next = std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin() - 1;
    for (auto i = static_cast<std::size_t>(next); i < pairs.size() && starts[i] < end; ++i) {
      const std::size_t first = std::max(begin, starts[i]) - starts[i];
      const std::size_t last = std::min(end - starts[i], pairs[i].elements);
      if (first >= last) continue;
      if (flags.empty()) {
        pairs[i].run(first, last);
      } else if (!pairs[i].run_checked(first, last)) {
        std::atomic_ref(*flags[i]).store(1, std::memory_order_relaxed);  // several slices may say so at once
      }
    }
  }
};

std::int64_t update_convert(std::int64_t engine, std::int64_t ticket, std::vector<Tensor> sources,
                            std::vector<Tensor> targets, std::vector<std::int64_t> accumulate,
                            std::optional<Tensor> non_finite) {
  EngineUse use(engine, "engine");
  require_same_length("targets", targets.size(), "sources", sources.size());
  require_same_length("accumulate", accumulate.size(), "sources", sources.size());
  auto batch = std::make_shared<Batch>();
  Update update;
  std::uint8_t* flags = nullptr;
  if (non_finite) {
    require_bytes(*non_finite, "non_finite", Place{});
    require_same_length("non_finite", static_cast<std::size_t>(non_finite->numel()), "sources", sources.size());
    flags = static_cast<std::uint8_t*>(non_finite->mutable_data_ptr());
    std::fill_n(flags, sources.size(), std::uint8_t{0});
    batch->held.push_back(detached(*non_finite));
  }
  for (std::size_t i = 0; i < sources.size(); ++i) {
    const ElementConvert pair =
        make_element_convert(sources[i], at("sources", i), targets[i], at("targets", i), accumulate[i] != 0);
    batch->held.push_back(detached(sources[i]));
    batch->held.push_back(detached(targets[i]));
    if (flags != nullptr && !pair.can_check()) {
      refuse(at("sources", i), "float32, bfloat16 or float16 to be converted to one of these, for 'non_finite'",
             describe(sources[i]) + " to " + describe(targets[i]));
    }
    if (pair.elements == 0) continue;
    if (flags != nullptr) batch->flags.push_back(flags + i);
    batch->starts.push_back(update.elements);
    batch->pairs.push_back(pair);
    update.elements += pair.elements;
    update.accesses.push_back({Access::kRead, pair.source, pair.source_bytes(), "update reads"});
    update.accesses.push_back({Access::kWrite, pair.target, pair.target_bytes(), "update writes"});
  }
  update.grain = static_cast<std::size_t>(kGrain);
  update.body = [batch](std::size_t begin, std::size_t end) { batch->run(begin, end); };
  if (ticket != 0) give_tickets(use, {ticket}, "ticket", update);
  return static_cast<std::int64_t>(use->queue().submit(std::move(update)));
}

bool update_wait(std::int64_t engine, std::int64_t update, std::int64_t timeout_ms) {
  EngineUse use(engine, "engine");
  if (update < 0) refuse("update", "a number that update_convert returned", std::to_string(update));
  return use->queue().wait(static_cast<std::uint64_t>(update), require_timeout(timeout_ms));
}

void convert(Tensor source, Tensor target, bool accumulate) {
  const ElementConvert pair = make_element_convert(source, "source", target, "target", accumulate);
  parallel_for(0, static_cast<std::int64_t>(pair.elements), kGrain, [&](std::int64_t begin, std::int64_t end) {
    pair.run(static_cast<std::size_t>(begin), static_cast<std::size_t>(end));
  });
}

std::string isa_names() {
  std::string names;
  for (const cpu::ConvertKernels& kernels : cpu::convert_kernels()) {
    if (kernels.supported()) names += (names.empty() ? "" : ",") + std::string(kernels.isa);
  }
  return names;
}

std::string isa_active() { return cpu::active_convert_kernels().isa; }

void isa_force(std::string name) { cpu::force_isa(name.empty() ? nullptr : name.c_str()); }

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, update_convert);
  ROUNDPIPE_OP(library, update_wait);
  ROUNDPIPE_OP(library, convert);
  ROUNDPIPE_OP(library, isa_names);
  ROUNDPIPE_OP(library, isa_active);
  ROUNDPIPE_OP(library, isa_force);
}
