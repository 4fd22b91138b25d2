// The consistency protocol between GPUs (reading weights, writing gradients) and the optimizer (reading gradients,
// writing weights), one clock for each unit of weights that is always moved together.
//
// Note [The five rules]
//   1. weights are overwritten (published) only after every upload that must still see the old ones has finished;
//   2. an upload starts only when the weights it must see are complete;
//   3. the optimizer takes gradients only when they are complete on the host;
//   4. gradients are overwritten only after the optimizer has taken them and after any load of the old sum;
//   5. publishes, and takes, of one unit run in the order in which they were issued.
// Counters only grow. A ticket is issued on the caller's thread in program order and captures the counts it must wait
// for, so nothing is ever computed from an iteration number. After a failure outstanding tickets are completed as
// poisoned, never reset: whoever waits for one in the same epoch gets kPoisoned; new_epoch(), called once all is
// drained, ends the effect.
//
// Note [Where an epoch begins]
//   A unit that is opened, or drained after a failure, comes from the hands of the thread that does it: what that
//   thread knows to be over happens before every ticket of the epoch. Uploads of the same memory under an earlier
//   clock, which the new one has never heard of, are ordered that way: acquire_finished() when the earlier unit is
//   closed, then the new clock.
//
// Note [Finished prefixes]
//   Tickets of one kind may finish out of order: uploads of one unit run on several devices, and an abort poisons
//   tickets long before their turn. A bare count of completions would then let a late ticket stand in for an early one:
//   a publish that waits for upload 1 could start because upload 2, issued after it, was aborted. So each kind keeps
//   its *finished prefix*, the largest n such that tickets 1..n have all finished, and `waits[k]` is compared with
//   that.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace roundpipe {

class HappensBefore;

enum class TicketKind : std::uint8_t { kUpload, kPublish, kGradientLoad, kGradientWrite, kGradientTake };
inline constexpr std::size_t kTicketKinds = 5;

struct Ticket {
  TicketKind kind{};
  std::uint64_t number = 0;  // 1-based within its kind
  std::uint64_t epoch = 0;
  std::array<std::uint64_t, kTicketKinds> waits{};  // of each kind, tickets 1..waits must have finished
};

enum class TicketState : std::uint8_t { kWaiting, kReady, kPoisoned };

class LayerClock {
 public:
  explicit LayerClock(HappensBefore* checker = nullptr);
  ~LayerClock();
  LayerClock(const LayerClock&) = delete;
  LayerClock& operator=(const LayerClock&) = delete;

  // upload waits for all issued publishes (2). publish waits for all issued uploads (1) and publishes (5).
  // gradient load waits for all issued gradient writes. gradient write waits for all issued takes and loads (4) and
  // writes (the layers that share a unit write the same image). take waits for all issued writes (3) and takes (5).
  Ticket issue(TicketKind kind);

  // kReady also makes the calling thread acquire what it waited for. kPoisoned comes as soon as one needed ticket, or
  // this one, is poisoned: other needed tickets may still be at work.
  TicketState state(const Ticket& ticket);
  TicketState peek(const Ticket& ticket) const;  // as state(), but makes nobody acquire anything
  TicketState wait(const Ticket& ticket, std::chrono::milliseconds timeout);  // kWaiting: timed out
  // Each ticket finishes exactly once; a second time, or a ticket never issued, is InvalidArgument.
  void complete(const Ticket& ticket);
  void poison(const Ticket& ticket);
  void new_epoch();  // requires that every issued ticket is complete or poisoned; acquires them all
  // The calling thread acquires every ticket that has finished, of whatever kind; Note [Where an epoch begins].
  void acquire_finished();

  std::uint64_t issued(TicketKind kind) const;
  std::uint64_t completed(TicketKind kind) const;  // finished in any order, poisoned ones too

  // Called after every completion, outside the lock; used to wake transfer lanes. Set before the first ticket. An
  // observer that is replaced may still be called once by a completion under way.
  void set_observer(std::function<void()> observer);

  // Tests only: rule 1..5 no longer waits, so that the checker can be seen to notice.
  void drop_rule_for_test(int rule);

 private:
  struct Counter {
    std::uint64_t issued = 0;
    std::uint64_t prefix = 0;          // Note [Finished prefixes]
    std::vector<std::uint64_t> early;  // finished numbers beyond the prefix, ascending; nearly always empty
  };
  struct PoisonedTicket {
    TicketKind kind;
    std::uint64_t number;
  };
  TicketState state_locked(const Ticket& ticket) const;
  void acquire_waited(const Ticket& ticket);
  void finish(const Ticket& ticket, bool poisoned);

  mutable std::mutex mutex_;          // guards everything below but checker_, which never changes
  std::condition_variable advanced_;  // some ticket finished: waiters look again
  std::array<Counter, kTicketKinds> counters_{};
  std::uint64_t epoch_ = 0;               // its address is the token of what came before the epoch
  std::vector<PoisonedTicket> poisoned_;  // of the current epoch
  std::array<bool, 6> dropped_rules_{};
  std::shared_ptr<const std::function<void()>> observer_;  // shared, so that it is called without the lock
  HappensBefore* checker_;
};

}  // namespace roundpipe
