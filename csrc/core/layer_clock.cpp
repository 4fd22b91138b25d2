#include "core/layer_clock.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/saturating_deadline.h"

namespace roundpipe {
namespace {

// What a ticket of kind `waiter` waits for, and the rule that says so (Note [The five rules]; 0: the order of additions
// within one sum, which no rule of the optimizer covers).
struct Need {
  TicketKind waiter;
  TicketKind needed;
  int rule;
};
constexpr Need kNeeds[] = {
    {TicketKind::kUpload, TicketKind::kPublish, 2},
    {TicketKind::kPublish, TicketKind::kUpload, 1},
    {TicketKind::kPublish, TicketKind::kPublish, 5},
    {TicketKind::kGradientLoad, TicketKind::kGradientWrite, 0},
    {TicketKind::kGradientWrite, TicketKind::kGradientTake, 4},
    {TicketKind::kGradientWrite, TicketKind::kGradientLoad, 4},
    {TicketKind::kGradientWrite, TicketKind::kGradientWrite, 0},
    {TicketKind::kGradientTake, TicketKind::kGradientWrite, 3},
    {TicketKind::kGradientTake, TicketKind::kGradientTake, 5},
};

constexpr const char* kKindNames[kTicketKinds] = {"upload", "publish", "gradient load", "gradient write",
                                                  "gradient take"};

std::size_t index_of(TicketKind kind) {
  const auto index = static_cast<std::size_t>(kind);
  RP_REQUIRE(index < kTicketKinds, "LayerClock: ticket kind " + std::to_string(index) +
                                       " does not exist, expected 0.." + std::to_string(kTicketKinds - 1));
  return index;
}

}  // namespace

LayerClock::LayerClock(HappensBefore* checker) : checker_(checker) {
  if (checker_ != nullptr) checker_->release(&epoch_, checker_->this_thread());
}

LayerClock::~LayerClock() {
  if (checker_ == nullptr) return;
  for (const Counter& counter : counters_) checker_->forget_token(&counter);
  checker_->forget_token(&epoch_);
}

Ticket LayerClock::issue(TicketKind kind) {
  const std::size_t own = index_of(kind);
  Ticket ticket;
  ticket.kind = kind;
  std::lock_guard lock(mutex_);
  ticket.epoch = epoch_;
  for (const Need& need : kNeeds) {
    if (need.waiter != kind || dropped_rules_[static_cast<std::size_t>(need.rule)]) continue;
    const auto needed = static_cast<std::size_t>(need.needed);
    ticket.waits[needed] = counters_[needed].issued;
  }
  ticket.number = ++counters_[own].issued;
  return ticket;
}

TicketState LayerClock::state_locked(const Ticket& ticket) const {
  if (ticket.epoch == epoch_) {
    for (const PoisonedTicket& poisoned : poisoned_) {
      if (poisoned.number <= ticket.waits[static_cast<std::size_t>(poisoned.kind)]) return TicketState::kPoisoned;
      if (poisoned.kind == ticket.kind && poisoned.number == ticket.number) return TicketState::kPoisoned;
    }
  }
  for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
    if (counters_[kind].prefix < ticket.waits[kind]) return TicketState::kWaiting;
  }
  return TicketState::kReady;
}

void LayerClock::acquire_waited(const Ticket& ticket) {
  if (checker_ == nullptr) return;
  const HappensBefore::Actor self = checker_->this_thread();
  checker_->acquire(&epoch_, self);
  for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
    if (ticket.waits[kind] != 0) checker_->acquire(&counters_[kind], self);
  }
}

TicketState LayerClock::state(const Ticket& ticket) {
  TicketState state;
  {
    std::lock_guard lock(mutex_);
    state = state_locked(ticket);
  }
  if (state == TicketState::kReady) acquire_waited(ticket);
  return state;
}

TicketState LayerClock::peek(const Ticket& ticket) const {
  std::lock_guard lock(mutex_);
  return state_locked(ticket);
}

TicketState LayerClock::wait(const Ticket& ticket, std::chrono::milliseconds timeout) {
  const auto deadline = saturating_deadline(timeout);
  TicketState state = TicketState::kWaiting;
  {
    std::unique_lock lock(mutex_);
    advanced_.wait_until(lock, deadline, [&] { return (state = state_locked(ticket)) != TicketState::kWaiting; });
  }
  if (state == TicketState::kReady) acquire_waited(ticket);
  return state;
}

void LayerClock::complete(const Ticket& ticket) { finish(ticket, /*poisoned=*/false); }
void LayerClock::poison(const Ticket& ticket) { finish(ticket, /*poisoned=*/true); }

void LayerClock::finish(const Ticket& ticket, bool poisoned) {
  Counter& counter = counters_[index_of(ticket.kind)];
  // Before the count can be seen, so that whoever finds the ticket finished also finds its clock in the token.
  if (checker_ != nullptr) checker_->release(&counter, checker_->this_thread());
  std::shared_ptr<const std::function<void()>> observer;
  {
    std::lock_guard lock(mutex_);
    const auto place = std::lower_bound(counter.early.begin(), counter.early.end(), ticket.number);
    const bool finished_early = place != counter.early.end() && *place == ticket.number;
    RP_REQUIRE(ticket.number > counter.prefix && ticket.number <= counter.issued && !finished_early,
               "LayerClock: " + std::string(kKindNames[static_cast<std::size_t>(ticket.kind)]) + " ticket " +
                   std::to_string(ticket.number) + " cannot finish: " + std::to_string(counter.issued) +
                   " issued, the first " + std::to_string(counter.prefix) +
                   " already finished; every issued ticket finishes exactly once");
    if (poisoned) poisoned_.push_back({ticket.kind, ticket.number});
    if (ticket.number != counter.prefix + 1) {
      counter.early.insert(place, ticket.number);
    } else {
      ++counter.prefix;
      auto joined = counter.early.begin();
      while (joined != counter.early.end() && *joined == counter.prefix + 1) {
        ++counter.prefix;
        ++joined;
      }
      counter.early.erase(counter.early.begin(), joined);
    }
    observer = observer_;
  }
  advanced_.notify_all();
  if (observer) (*observer)();
}

void LayerClock::new_epoch() {
  std::lock_guard lock(mutex_);
  for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
    const Counter& counter = counters_[kind];
    RP_REQUIRE(counter.prefix == counter.issued,
               "LayerClock: new_epoch() while " +
                   std::to_string(counter.issued - counter.prefix - counter.early.size()) + " of " +
                   std::to_string(counter.issued) + " " + kKindNames[kind] +
                   " tickets are outstanding; complete or poison every issued ticket first");
    if (checker_ != nullptr) checker_->acquire(&counter, checker_->this_thread());
  }
  if (checker_ != nullptr) checker_->release(&epoch_, checker_->this_thread());
  ++epoch_;
  poisoned_.clear();
}

void LayerClock::acquire_finished() {
  if (checker_ == nullptr) return;
  std::lock_guard lock(mutex_);  // as finish() does after its release: what it released has been seen finished
  for (const Counter& counter : counters_) checker_->acquire(&counter, checker_->this_thread());
}

std::uint64_t LayerClock::issued(TicketKind kind) const {
  const std::size_t index = index_of(kind);
  std::lock_guard lock(mutex_);
  return counters_[index].issued;
}

std::uint64_t LayerClock::completed(TicketKind kind) const {
  const std::size_t index = index_of(kind);
  std::lock_guard lock(mutex_);
  return counters_[index].prefix + counters_[index].early.size();
}

void LayerClock::set_observer(std::function<void()> observer) {
  auto shared = observer ? std::make_shared<const std::function<void()>>(std::move(observer)) : nullptr;
  std::lock_guard lock(mutex_);
  observer_.swap(shared);
}

void LayerClock::drop_rule_for_test(int rule) {
  RP_REQUIRE(rule >= 1 && rule <= 5,
             "LayerClock: there is no rule " + std::to_string(rule) + " to drop, expected 1..5");
  std::lock_guard lock(mutex_);
  dropped_rules_[static_cast<std::size_t>(rule)] = true;
}

}  // namespace roundpipe
