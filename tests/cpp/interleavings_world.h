// Simulated devices with their workers, an optimizer thread and units whose content tells which version it is: runs
// random programs of a trainer and checks every value that anybody sees.
//
// The main thread plays the caller: it issues jobs, takes and publishes in program order and computes what each must
// see. Workers and the optimizer thread only compare. A doomed job is aborted by its worker; what depends on it must
// then be poisoned, and whatever is not poisoned must still see exactly the values of program order.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/region_extents.h"
#include "interleavings_actor.h"
#include "streamer_rig.h"
#include "worker_rooms.h"

namespace roundpipe {

class InterleavingsWorld {
 public:
  InterleavingsWorld(std::size_t devices, std::uint64_t seed);
  ~InterleavingsWorld();

  // Runs one random program; false and problems() if anything was not as program order says.
  bool run_scenario(std::uint64_t seed);
  std::vector<std::string> problems();
  std::uint64_t jobs() const { return jobs_run_.load(); }
  std::uint64_t poisoned() const { return poisoned_.load(); }

 private:
  struct Unit {
    std::shared_ptr<WeightUnit> unit;
    std::vector<Word> weights, gradients;
    // Of the main thread: what program order says.
    Word version = 0;
    Word window_sum = 0, window_jobs = 0;
    bool deferred_publish = false;
    // Of the optimizer thread, read by the main thread when all is idle.
    Word published = 0;

    static Word word(std::uint64_t id, Word version, std::size_t i) {
      return static_cast<Word>(version * 4096 + id * 64 + i % 64);
    }
  };
  struct Use {
    Unit* unit;
    Word expected_version;
    bool gradients;
    Word contribution;
  };
  void problem(const std::string& what);
  void dispatch(const std::vector<Unit*>& units, bool gradients);
  void call(bool gradients);
  void step();
  void publish(Unit& unit);
  void run_job(WorkerRoom& room, std::uint64_t job, const std::vector<Use>& uses, int doomed_at, std::uint64_t seed);
  bool settle();

  HostBackend backend_;
  WorkerRooms rooms_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Actor> optimizer_;
  std::mt19937_64 random_;
  std::size_t next_device_ = 0;
  double doom_ = 0;  // probability of a job of this scenario to be aborted
  std::atomic<std::uint64_t> jobs_run_{0}, poisoned_{0};
  std::mutex problems_mutex_;  // guards problems_
  std::vector<std::string> problems_;
};

inline InterleavingsWorld::InterleavingsWorld(std::size_t devices, std::uint64_t seed)
    : backend_({.devices = devices, .check = true, .seed = seed}), random_(seed) {
  constexpr std::size_t kRegionBytes = 12 * 256;
  HappensBefore& checker = *backend_.checker();
  rooms_ = make_worker_rooms(backend_, devices, kRegionBytes);
  const std::size_t count = 1 + random_() % 4;
  for (std::size_t u = 0; u < count; ++u) {
    auto unit = std::make_unique<Unit>();
    unit->unit = std::make_shared<WeightUnit>(&checker);
    unit->unit->id = u + 1;
    unit->weights.resize(1 + random_() % 120);
    unit->gradients.resize(random_() % 4 == 0 ? 0 : 1 + random_() % 120);
    for (std::size_t i = 0; i < unit->weights.size(); ++i) unit->weights[i] = Unit::word(u + 1, 0, i);
    // Two segments, of which one may be empty.
    const std::size_t cut = random_() % (unit->weights.size() + 1);
    unit->unit->weights = {
        {unit->weights.data(), 0, cut * sizeof(Word)},
        {unit->weights.data() + cut, cut * sizeof(Word), (unit->weights.size() - cut) * sizeof(Word)}};
    unit->unit->weight_bytes = RegionExtents::aligned(unit->weights.size() * sizeof(Word));
    unit->unit->gradient_bytes = unit->gradients.size() * sizeof(Word);
    unit->unit->clock.set_observer([this] {
      for (const auto& room : rooms_) room->engine->poke();
    });
    checker.fresh(unit->weights.data(), unit->weights.size() * sizeof(Word));
    checker.fresh(unit->gradients.data(), unit->gradients.size() * sizeof(Word));
    units_.push_back(std::move(unit));
  }
  optimizer_ = std::make_unique<Actor>();
}

inline InterleavingsWorld::~InterleavingsWorld() {
  optimizer_.reset();
  for (const auto& room : rooms_) room->worker.reset();
  for (const auto& room : rooms_) room->streamer.reset();
  for (const auto& room : rooms_) room->engine->shutdown();
}

inline void InterleavingsWorld::problem(const std::string& what) {
  std::lock_guard lock(problems_mutex_);
  problems_.push_back(what);
}

inline std::vector<std::string> InterleavingsWorld::problems() {
  std::lock_guard lock(problems_mutex_);
  return problems_;
}

inline void InterleavingsWorld::dispatch(const std::vector<Unit*>& units, bool gradients) {
  std::vector<UnitUse> uses;
  std::vector<Use> expected;
  for (Unit* unit : units) {
    Use use{unit, unit->version, gradients && !unit->gradients.empty(), static_cast<Word>(random_() % 50)};
    UnitUse unit_use{.unit = unit->unit};
    if (use.gradients) {
      unit_use.gradients = true;
      unit_use.gradient_store = unit->gradients.data();
      unit_use.gradient_load = unit->window_jobs != 0 ? unit->gradients.data() : nullptr;
      unit->window_sum += use.contribution;
      ++unit->window_jobs;
    }
    uses.push_back(unit_use);
    expected.push_back(use);
  }
  WorkerRoom& room = *rooms_[next_device_++ % rooms_.size()];
  const bool doomed = std::uniform_real_distribution<>(0, 1)(random_) < doom_;
  const int doomed_at = doomed ? static_cast<int>(random_() % (units.size() + 1)) : -1;
  const std::uint64_t job = room.streamer->enqueue(std::move(uses));
  room.worker->post(
      [this, &room, job, expected, doomed_at, seed = random_()] { run_job(room, job, expected, doomed_at, seed); });
}

inline void InterleavingsWorld::run_job(WorkerRoom& room, std::uint64_t job, const std::vector<Use>& uses,
                                        int doomed_at, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  StageStreamer& streamer = *room.streamer;
  ++jobs_run_;
  try {
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (doomed_at == static_cast<int>(i)) return streamer.abort(job, *room.compute);
      const Use& use = uses[i];
      UnitPlace place;
      if (streamer.wait_unit(job, i, *room.compute, kLong, &place) != WaitResult::kDone) {
        problem("a wait for a unit timed out");
        return streamer.abort(job, *room.compute);
      }
      const auto* weights = static_cast<const Word*>(place.weights);
      for (std::size_t w = 0; w < use.unit->weights.size(); ++w) {
        const Word wanted = Unit::word(use.unit->unit->id, use.expected_version, w);
        if (weights[w] == wanted) continue;
        problem("unit " + std::to_string(use.unit->unit->id) + " word " + std::to_string(w) + " is " +
                std::to_string(weights[w]) + " instead of " + std::to_string(wanted));
        break;
      }
      if (use.gradients) {
        auto* gradients = static_cast<Word*>(place.gradients);
        for (std::size_t g = 0; g < use.unit->gradients.size(); ++g) {
          gradients[g] += use.contribution + static_cast<Word>(g);
        }
      }
      const bool weights_first = random() % 2 == 0;
      if (weights_first) streamer.weights_done(job, i, *room.compute);
      if (use.gradients) streamer.gradients_done(job, i, *room.compute);
      if (!weights_first && random() % 2 == 0) streamer.weights_done(job, i, *room.compute);
    }
    if (doomed_at >= 0) return streamer.abort(job, *room.compute);
    streamer.close(job, *room.compute);
  } catch (const Poisoned& error) {
    ++poisoned_;
    if (doom_ == 0) problem(std::string("poisoned without a reason: ") + error.what());
    streamer.abort(job, *room.compute);
  } catch (const std::exception& error) {
    problem(error.what());
    streamer.abort(job, *room.compute);
  }
}

// One call: consecutive units form stages; a unit used at two places is in two of them. Training goes over the stages
// again in reverse, with a plan of its own.
inline void InterleavingsWorld::call(bool gradients) {
  std::vector<Unit*> order;
  for (const auto& unit : units_) order.push_back(unit.get());
  if (random_() % 3 == 0) order.push_back(units_[random_() % units_.size()].get());  // shared with the last layer
  const auto pass = [&](bool backward) {
    std::vector<Unit*> stage;
    const auto flush = [&] {
      if (!stage.empty()) dispatch(stage, backward && gradients);
      stage.clear();
    };
    for (std::size_t i = 0; i < order.size(); ++i) {
      Unit* unit = order[backward ? order.size() - 1 - i : i];
      if (stage.size() == 3 || random_() % 2 == 0 || std::count(stage.begin(), stage.end(), unit) != 0) flush();
      stage.push_back(unit);
    }
    flush();
  };
  pass(false);
  if (gradients) pass(true);
}

inline void InterleavingsWorld::publish(Unit& unit) {
  const Ticket ticket = unit.unit->clock.issue(TicketKind::kPublish);
  const Word version = ++unit.version;
  optimizer_->post([this, &unit, ticket, version] {
    const TicketState state = unit.unit->clock.wait(ticket, kLong);
    if (state != TicketState::kReady) {
      if (state == TicketState::kWaiting || doom_ == 0) problem("a publish did not become ready");
      return unit.unit->clock.poison(ticket);
    }
    HappensBefore& checker = *backend_.checker();
    checker.access(checker.this_thread(), Access::kWrite, unit.weights.data(), unit.weights.size() * sizeof(Word),
                   "publish");
    for (std::size_t i = 0; i < unit.weights.size(); ++i) {
      unit.weights[i] = Unit::word(unit.unit->id, version, i);
    }
    unit.published = version;
    unit.unit->clock.complete(ticket);
  });
}

// The optimizer takes what the window holds; weights are published at once, or, asynchronously, after the next call.
inline void InterleavingsWorld::step() {
  for (const auto& owned : units_) {
    Unit& unit = *owned;
    if (unit.window_jobs == 0 || random_() % 5 == 0) continue;  // left to accumulate
    const Ticket ticket = unit.unit->clock.issue(TicketKind::kGradientTake);
    optimizer_->post([this, &unit, ticket, sum = unit.window_sum, jobs = unit.window_jobs] {
      const TicketState state = unit.unit->clock.wait(ticket, kLong);
      if (state != TicketState::kReady) {
        if (state == TicketState::kWaiting || doom_ == 0) problem("a take did not become ready");
        return unit.unit->clock.poison(ticket);
      }
      HappensBefore& checker = *backend_.checker();
      checker.access(checker.this_thread(), Access::kRead, unit.gradients.data(), unit.gradients.size() * sizeof(Word),
                     "take");
      for (std::size_t i = 0; i < unit.gradients.size(); ++i) {
        const Word wanted = sum + jobs * static_cast<Word>(i);
        if (unit.gradients[i] == wanted) continue;
        problem("gradient " + std::to_string(i) + " of unit " + std::to_string(unit.unit->id) + " is " +
                std::to_string(unit.gradients[i]) + " instead of " + std::to_string(wanted));
        break;
      }
      unit.unit->clock.complete(ticket);
    });
    unit.window_sum = unit.window_jobs = 0;
    if (random_() % 2 == 0) {
      publish(unit);
    } else {
      unit.deferred_publish = true;
    }
  }
}

inline bool InterleavingsWorld::settle() {
  bool idle = optimizer_->wait_idle(kLong);
  idle &= wait_idle(rooms_, kLong);
  if (!idle) {
    problem("not idle after all was done");
    return false;
  }
  for (const auto& owned : units_) {
    Unit& unit = *owned;
    for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
      const auto ticket_kind = static_cast<TicketKind>(kind);
      if (unit.unit->clock.issued(ticket_kind) != unit.unit->clock.completed(ticket_kind)) {
        problem("tickets of kind " + std::to_string(kind) + " stay open");
        return false;
      }
    }
    if (doom_ == 0 && unit.published != unit.version) problem("a publish is missing");
    if (doom_ == 0) continue;
    unit.unit->clock.new_epoch();
    unit.version = unit.published;  // what was poisoned never happened; the caller drops the gradients
    unit.window_sum = unit.window_jobs = 0;
    unit.deferred_publish = false;
  }
  for (const std::string& report : backend_.checker()->take_reports()) problem(report);
  return problems().empty();
}

inline bool InterleavingsWorld::run_scenario(std::uint64_t seed) {
  random_.seed(seed);
  backend_.set_delays(seed, random_() % 8 == 0 ? static_cast<std::uint32_t>(random_() % 20) : 0);
  doom_ = random_() % 5 == 0 ? 0.2 : 0;
  for (std::uint64_t steps = random_() % 3 == 0 ? 2 : 1; steps > 0; --steps) {
    if (random_() % 4 == 0) call(false);
    for (std::uint64_t calls = random_() % 6 == 0 ? 2 + random_() % 2 : 1; calls > 0; --calls) {
      call(true);
      for (const auto& unit : units_) {
        if (std::exchange(unit->deferred_publish, false)) publish(*unit);
      }
    }
    step();
  }
  for (const auto& unit : units_) {
    if (std::exchange(unit->deferred_publish, false)) publish(*unit);
  }
  return settle();
}

}  // namespace roundpipe
