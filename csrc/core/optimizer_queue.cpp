#include "core/optimizer_queue.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/saturating_deadline.h"
#include "core/slice_pool.h"
#include "core/trace.h"

namespace roundpipe {
namespace {

constexpr std::size_t kMaxFailures = 4096;
// Clocks whose observers do not poke are looked at so often.
constexpr std::chrono::milliseconds kLookAgain{10};

std::size_t processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) {
    return static_cast<std::size_t>(CPU_COUNT(&set));
  }
  return std::max(1U, std::thread::hardware_concurrency());
}

// The threads that launch layers share cores, caches and memory with these.
std::size_t default_threads(std::size_t processors) {
  return std::max<std::size_t>(processors - std::min(processors, std::max<std::size_t>(2, processors / 4)), 1);
}

std::size_t choose_threads(std::size_t asked) {
  if (asked != 0) return asked;
  const char* text = std::getenv("ROUNDPIPE_OPTIMIZER_THREADS");
  if (text == nullptr || *text == '\0') return default_threads(processors());
  std::size_t threads = 0;
  const char* end = text + std::strlen(text);
  const auto parsed = std::from_chars(text, end, threads);
  RP_REQUIRE(parsed.ec == std::errc() && parsed.ptr == end && threads >= 1 && threads <= 1024,
             "ROUNDPIPE_OPTIMIZER_THREADS is \"" + std::string(text) +
                 "\", expected a number of threads from 1 to 1024; unset it for the default");
  return threads;
}

}  // namespace

struct OptimizerQueue::State {
  struct Pending {
    std::uint64_t number;
    Update update;
  };

  State(std::size_t threads, HappensBefore* checker_) : checker(checker_), pool(threads, checker_) {}
  ~State() {
    if (checker == nullptr) return;
    for (const char& token : ended_tokens) checker->forget_token(&token);
  }

  void dispatch();
  std::unique_ptr<Pending> take_next();  // null: the queue has ended
  std::deque<std::unique_ptr<Pending>>::iterator first_ready();
  void execute(Pending& pending);
  void run_body(Pending& pending);
  void end(std::uint64_t number, std::exception_ptr failure);
  void remember(std::uint64_t number, std::exception_ptr failure);

  HappensBefore* const checker;
  SlicePool pool;
  const pid_t owner = getpid();
  std::thread dispatcher;

  std::mutex mutex;                   // guards everything below; taken before the lock of a clock
  std::condition_variable wakes;      // to the dispatcher: an update, a poke, or stop
  std::condition_variable ended_one;  // to wait(): an update has ended
  // By address, because each is the token through which its update comes after what its submitter did.
  std::deque<std::unique_ptr<Pending>> pending;
  std::uint64_t issued = 0;
  std::set<std::uint64_t> open;      // numbers of updates that have not ended
  std::set<std::uint64_t> reserved;  // of these, not submitted
  std::uint64_t generation = 0;      // counts what may make an update ready
  bool stop = false;
  std::map<std::uint64_t, std::exception_ptr> failures;  // not thrown yet
  // Tokens of the ends of the last updates, by number modulo their count: whoever waits for one is ordered after it
  // and, in the checker's eyes, not after those that happen to have ended since. (After one that ended out of turn, a
  // waiter may be ordered after more than it waited for.)
  std::array<char, 256> ended_tokens{};
};

OptimizerQueue::OptimizerQueue(std::size_t threads, HappensBefore* checker)
    : state_(std::make_shared<State>(choose_threads(threads), checker)) {
  state_->dispatcher = std::thread([state = state_] { state->dispatch(); });
}

OptimizerQueue::~OptimizerQueue() {
  if (getpid() != state_->owner) {
    // A forked child does not have the threads: neither they nor what pending updates hold may be touched.
    static_cast<void>(new std::shared_ptr<State>(state_));
    return;
  }
  shutdown();
}

namespace {

void check(const Update& update) {
  RP_REQUIRE(update.elements == 0 || update.body,
             "OptimizerQueue: an update of " + std::to_string(update.elements) + " elements needs a body");
  for (const UpdateTicket& one : update.tickets) {
    RP_REQUIRE(one.unit, "OptimizerQueue: an update with a ticket needs the unit that issued it");
  }
}

}  // namespace

std::uint64_t OptimizerQueue::submit(Update update) {
  check(update);
  const std::uint64_t number = reserve();
  submit(number, std::move(update));
  return number;
}

std::uint64_t OptimizerQueue::reserve() {
  std::lock_guard lock(state_->mutex);
  if (state_->stop) throw Error("OptimizerQueue: submit() after shutdown; open a new engine");
  state_->open.insert(++state_->issued);
  state_->reserved.insert(state_->issued);
  return state_->issued;
}

void OptimizerQueue::submit(std::uint64_t reserved, Update update) {
  check(update);
  State& state = *state_;
  auto pending = std::make_unique<State::Pending>(State::Pending{reserved, std::move(update)});
  if (state.checker != nullptr) state.checker->release(pending.get(), state.checker->this_thread());
  {
    std::lock_guard lock(state.mutex);
    if (!state.reserved.contains(reserved)) {
      if (state.checker != nullptr) state.checker->forget_token(pending.get());
      if (state.stop) throw Error("OptimizerQueue: submit() after shutdown; open a new engine");
      throw InvalidArgument("OptimizerQueue: update " + std::to_string(reserved) +
                            " was not reserved, or submitted or given up before");
    }
    state.reserved.erase(reserved);
    state.pending.push_back(std::move(pending));
    ++state.generation;
  }
  state.wakes.notify_one();
}

void OptimizerQueue::give_up(std::uint64_t reserved, std::exception_ptr failure) {
  {
    std::lock_guard lock(state_->mutex);
    if (state_->reserved.erase(reserved) == 0) return;  // shutdown was first
  }
  state_->end(reserved, std::move(failure));
}

void OptimizerQueue::poke() {
  {
    std::lock_guard lock(state_->mutex);
    ++state_->generation;
    if (state_->pending.empty()) return;
  }
  state_->wakes.notify_one();
}

bool OptimizerQueue::wait(std::uint64_t number, std::chrono::milliseconds timeout) {
  State& state = *state_;
  std::exception_ptr failure;
  {
    std::unique_lock lock(state.mutex);
    RP_REQUIRE(number >= 1 && number <= state.issued, "OptimizerQueue: wait for update " + std::to_string(number) +
                                                          ", but 1.." + std::to_string(state.issued) +
                                                          " were submitted");
    const auto deadline = saturating_deadline(timeout);
    if (!state.ended_one.wait_until(lock, deadline, [&] { return !state.open.contains(number); })) return false;
    const auto found = state.failures.find(number);
    if (found != state.failures.end()) {
      failure = found->second;
      state.failures.erase(found);
    }
  }
  if (state.checker != nullptr) {
    state.checker->acquire(&state.ended_tokens[number % state.ended_tokens.size()], state.checker->this_thread());
  }
  if (failure) std::rethrow_exception(failure);
  return true;
}

std::exception_ptr OptimizerQueue::take_failure() {
  std::lock_guard lock(state_->mutex);
  if (state_->failures.empty()) return nullptr;
  const auto first = state_->failures.begin();
  std::exception_ptr failure = first->second;
  state_->failures.erase(first);
  return failure;
}

std::size_t OptimizerQueue::threads() const { return state_->pool.threads(); }

void OptimizerQueue::shutdown() noexcept {
  if (getpid() != state_->owner) return;
  std::thread dispatcher;
  std::set<std::uint64_t> reserved;
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
    dispatcher.swap(state_->dispatcher);  // of concurrent calls one joins
    reserved.swap(state_->reserved);
  }
  state_->wakes.notify_all();
  for (const std::uint64_t number : reserved) {
    state_->end(number, std::make_exception_ptr(Poisoned("optimizer update " + std::to_string(number) +
                                                         " did not run: the queue was shut down")));
  }
  if (!dispatcher.joinable()) return;
  if (dispatcher.get_id() == std::this_thread::get_id()) {
    dispatcher.detach();  // the last owner died with an update's body; the dispatcher holds the state until it ends
  } else {
    dispatcher.join();
  }
}

void OptimizerQueue::State::dispatch() {
  pthread_setname_np(pthread_self(), "rp-optimizer");
  while (const std::unique_ptr<Pending> next = take_next()) {
    if (checker != nullptr) {
      checker->acquire(next.get(), checker->this_thread());
      checker->forget_token(next.get());
    }
    execute(*next);
  }
}

std::unique_ptr<OptimizerQueue::State::Pending> OptimizerQueue::State::take_next() {
  std::optional<ScopedSpan> waiting;
  std::unique_lock lock(mutex);
  for (;;) {
    wakes.wait(lock, [this] { return stop || !pending.empty(); });
    if (pending.empty()) return nullptr;
    const std::uint64_t asked_at = generation;
    const auto found = stop ? pending.begin() : first_ready();
    if (found != pending.end()) {
      std::unique_ptr<Pending> next = std::move(*found);
      pending.erase(found);
      return next;
    }
    if (!waiting) {
      waiting.emplace(SpanKind::kWait, "update ticket", pending.front()->update.tickets.front().unit->id);
    }
    wakes.wait_for(lock, kLookAgain, [&] { return stop || generation != asked_at; });
  }
}

namespace {

// Whether two updates touch one unit and were submitted in the order of their tickets, as far as these tell.
bool must_follow(const Update& update, const Update& earlier) {
  bool same_unit = false;
  for (const UpdateTicket& one : update.tickets) {
    for (const UpdateTicket& other : earlier.tickets) {
      if (one.unit != other.unit) continue;
      if (one.ticket.kind == other.ticket.kind && one.ticket.number < other.ticket.number) return false;
      same_unit = true;
    }
  }
  return same_unit;
}

}  // namespace

// A poisoned one counts: it ends at once.
std::deque<std::unique_ptr<OptimizerQueue::State::Pending>>::iterator OptimizerQueue::State::first_ready() {
  for (auto at = pending.begin(); at != pending.end(); ++at) {
    const Update& update = (*at)->update;
    bool waits = update.tickets.empty() && at != pending.begin(), poisoned = false;
    for (const UpdateTicket& one : update.tickets) {
      const TicketState state = one.unit->clock.peek(one.ticket);
      waits |= state == TicketState::kWaiting;
      poisoned |= state == TicketState::kPoisoned;
    }
    if (!waits && !poisoned) {
      waits = std::any_of(pending.begin(), at, [&](const auto& before) { return must_follow(update, before->update); });
    }
    if (poisoned || !waits) return at;
  }
  return pending.end();
}

void OptimizerQueue::State::execute(Pending& pending) {
  Update& update = pending.update;
  std::exception_ptr failure;
  try {
    run_body(pending);
  } catch (...) {
    failure = std::current_exception();
  }
  for (const UpdateTicket& one : update.tickets) {
    try {
      failure ? one.unit->clock.poison(one.ticket) : one.unit->clock.complete(one.ticket);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  update = Update();
  if (checker != nullptr) {
    const char* token = &ended_tokens[pending.number % ended_tokens.size()];
    checker->forget_token(token);
    checker->release(token, checker->this_thread());
  }
  end(pending.number, std::move(failure));
}

void OptimizerQueue::State::end(std::uint64_t number, std::exception_ptr failure) {
  {
    std::lock_guard lock(mutex);
    if (failure) remember(number, std::move(failure));
    open.erase(number);
  }
  ended_one.notify_all();
}

void OptimizerQueue::State::run_body(Pending& pending) {
  Update& update = pending.update;
  const auto poisoned = [&](const char* why) {
    return Poisoned("optimizer update " + std::to_string(pending.number) +
                    (update.tickets.empty() ? "" : " of unit " + std::to_string(update.tickets.front().unit->id)) +
                    " did not run: " + why);
  };
  for (const UpdateTicket& one : update.tickets) {
    if (one.unit->clock.peek(one.ticket) == TicketState::kPoisoned) {
      throw poisoned("a transfer or an update that it waits for has failed");
    }
  }
  {
    std::lock_guard lock(mutex);
    if (stop) throw poisoned("the queue was shut down");
  }
  for (const UpdateTicket& one : update.tickets) one.unit->clock.state(one.ticket);  // acquires what it waited for
  if (checker != nullptr) {
    const HappensBefore::Actor self = checker->this_thread();
    for (const HostAccess& access : update.accesses) {
      checker->access(self, access.access, access.range, access.bytes, access.what);
    }
  }
  const ScopedSpan span(SpanKind::kUpdate, "update",
                        update.tickets.empty() ? pending.number : update.tickets.front().unit->id);
  pool.run(update.elements, update.grain, update.body);
}

void OptimizerQueue::State::remember(std::uint64_t number, std::exception_ptr failure) {
  failures.emplace(number, std::move(failure));
  // The first is the likeliest cause of all others.
  if (failures.size() > kMaxFailures) failures.erase(std::next(failures.begin()));
}

}  // namespace roundpipe
