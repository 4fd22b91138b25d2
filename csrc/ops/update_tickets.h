// Ticket handles that become the tickets of a queued update, which ends them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/optimizer_queue.h"
#include "ops/engine.h"

namespace roundpipe::ops {

// All or none: InvalidArgument, with every handle still valid, when one is stale or belongs to another engine.
void give_tickets(const EngineUse& use, const std::vector<std::int64_t>& tickets, const char* argument, Update& update);

}  // namespace roundpipe::ops
