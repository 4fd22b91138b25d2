#include "core/happens_before.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <sstream>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "core/byte_intervals.h"
#include "core/errors.h"

namespace roundpipe {
namespace {

constexpr std::size_t kMaxReports = 100;

// Component i is how much of actor i's past is known.
using Clock = std::vector<std::uint64_t>;

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// One access, told apart by its actor's own time: the epoch of FastTrack. time 0: none.
struct Epoch {
  HappensBefore::Actor actor = 0;
  std::uint64_t time = 0;
  std::uintptr_t begin = 0, end = 0;  // of the whole access, for the report
  const std::string* what = nullptr;  // interned

  bool before(const Clock& clock) const { return time == 0 || (actor < clock.size() && time <= clock[actor]); }
  friend bool operator==(const Epoch&, const Epoch&) = default;
};

// What a byte remembers: its last write, and the reads since which are not ordered before a later read. Whoever is
// ordered after those is ordered after all.
struct History {
  Epoch write;
  std::vector<Epoch> reads;
  friend bool operator==(const History&, const History&) = default;
};

// The operating system reuses thread ids, and a new thread must not inherit a dead one's clock.
std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> next{0};
  thread_local const std::uint64_t number = next.fetch_add(1, std::memory_order_relaxed);
  return number;
}

}  // namespace

struct HappensBefore::State {
  struct ActorState {
    std::string name;
    Clock clock;
  };

  std::mutex mutex;  // guards everything below: every call changes clocks or histories
  std::vector<ActorState> actors;
  std::unordered_map<std::uint64_t, Actor> threads;  // by thread_number()
  std::unordered_map<const void*, Clock> tokens;
  ByteIntervals<History> memory;
  std::set<std::string, std::less<>> names;  // interned `what`s; nodes never move
  std::set<std::tuple<const std::string*, const std::string*, std::uintptr_t>> reported;
  std::vector<std::string> reports;

  Actor add(std::string name) {
    const Actor actor = static_cast<Actor>(actors.size());
    Clock clock(actor + std::size_t{1}, 0);
    clock[actor] = 1;
    actors.push_back({std::move(name), std::move(clock)});
    return actor;
  }

  ActorState& at(Actor actor) {
    RP_REQUIRE(actor < actors.size(), "happens-before checker: actor " + std::to_string(actor) + " does not exist (" +
                                          std::to_string(actors.size()) + " were added); use add_actor()'s result");
    return actors[actor];
  }

  // What `actor` does from now on is not part of what it just gave away.
  void advance(Actor actor) { ++actors[actor].clock[actor]; }

  const std::string* intern(const char* what) {
    const std::string_view view = what == nullptr ? "unnamed" : what;
    auto it = names.find(view);
    if (it == names.end()) it = names.emplace(view).first;
    return &*it;
  }

  void describe(std::ostream& out, const Epoch& epoch, bool write) const {
    out << '"' << *epoch.what << "\" (" << (write ? "write" : "read") << " by " << actors[epoch.actor].name << " of "
        << (epoch.end - epoch.begin) << " bytes [0x" << std::hex << epoch.begin << ", 0x" << epoch.end << std::dec
        << "))";
  }

  void report(const Epoch& earlier, bool earlier_writes, const Epoch& later, bool later_writes) {
    if (reports.size() >= kMaxReports) return;
    const auto [low, high] = std::minmax(earlier.what, later.what);
    if (!reported.emplace(low, high, later.begin).second) return;
    std::ostringstream out;
    out << "race: ";
    describe(out, later, later_writes);
    out << " is not ordered after ";
    describe(out, earlier, earlier_writes);
    out << "; an event, ticket or wait between them is missing";
    reports.push_back(std::move(out).str());
  }
};

HappensBefore::HappensBefore() : state_(std::make_unique<State>()) {}
HappensBefore::~HappensBefore() = default;

HappensBefore::Actor HappensBefore::add_actor(std::string name) {
  std::lock_guard lock(state_->mutex);
  return state_->add(std::move(name));
}

HappensBefore::Actor HappensBefore::this_thread() {
  const std::uint64_t number = thread_number();
  std::lock_guard lock(state_->mutex);
  auto it = state_->threads.find(number);
  if (it == state_->threads.end()) {
    it = state_->threads.emplace(number, state_->add("thread " + std::to_string(number))).first;
  }
  return it->second;
}

void HappensBefore::join(Actor into, Actor from) {
  std::lock_guard lock(state_->mutex);
  Clock& target = state_->at(into).clock;
  if (into == from) return;
  merge(target, state_->at(from).clock);
  state_->advance(from);
}

void HappensBefore::release(const void* token, Actor from) {
  std::lock_guard lock(state_->mutex);
  merge(state_->tokens[token], state_->at(from).clock);
  state_->advance(from);
}

void HappensBefore::acquire(const void* token, Actor into) {
  std::lock_guard lock(state_->mutex);
  Clock& target = state_->at(into).clock;
  if (auto it = state_->tokens.find(token); it != state_->tokens.end()) merge(target, it->second);
}

void HappensBefore::forget_token(const void* token) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->tokens.erase(token);
}

void HappensBefore::access(Actor who, Access access, const void* range, std::size_t bytes, const char* what) {
  if (bytes == 0) return;
  std::lock_guard lock(state_->mutex);
  State& state = *state_;
  const Clock& now = state.at(who).clock;
  const auto begin = reinterpret_cast<std::uintptr_t>(range);
  const bool writes = access == Access::kWrite;
  const Epoch epoch{who, now[who], begin, begin + bytes, state.intern(what)};
  state.memory.update(begin, begin + bytes, [&](History& history) {
    if (!history.write.before(now)) state.report(history.write, true, epoch, writes);
    if (writes) {
      for (const Epoch& read : history.reads) {
        if (!read.before(now)) state.report(read, false, epoch, true);
      }
      history.write = epoch;
      history.reads.clear();
    } else {
      std::erase_if(history.reads, [&](const Epoch& read) { return read.before(now); });
      history.reads.push_back(epoch);
    }
  });
}

void HappensBefore::fresh(const void* range, std::size_t bytes) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(range);
  std::lock_guard lock(state_->mutex);
  state_->memory.erase(begin, begin + bytes);
}

std::vector<std::string> HappensBefore::take_reports() {
  std::lock_guard lock(state_->mutex);
  return std::exchange(state_->reports, {});
}

}  // namespace roundpipe
