#include "ops/update_tickets.h"

#include <memory>

#include "ops/handles.h"
#include "ops/unit.h"

namespace roundpipe::ops {

void give_tickets(const EngineUse& use, const std::vector<std::int64_t>& tickets, const char* argument,
                  Update& update) {
  for (const std::int64_t ticket : tickets) {
    HandleRegistry::global().get<TicketHandle>(ticket, argument)->require_engine(use.share(), argument);
  }
  for (const std::int64_t ticket : tickets) {
    const auto handle = HandleRegistry::global().take<TicketHandle>(ticket, argument);
    update.tickets.push_back({std::shared_ptr<WeightUnit>(handle->body, &handle->body->unit), handle->ticket});
  }
}

}  // namespace roundpipe::ops
