// Simulated devices with their workers, a gradient pool and an optimizer queue: runs random iterations whose updates
// are submitted when their gradients have come down, and checks every value that anybody sees.
//
// The main thread plays the caller: it dispatches jobs, takes tickets in program order and computes what each must see.
// As in a model, backward begins when the forward of its iteration has ended. Units finish in random order inside a
// job. Some are written by two jobs, or their update is submitted at once, as that of an optimizer which takes
// gradients while they arrive: these have an image of their own.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/gradient_pool.h"
#include "core/optimizer_queue.h"
#include "core/region_extents.h"
#include "interleavings_actor.h"
#include "streamer_rig.h"
#include "worker_rooms.h"

namespace roundpipe {

class PooledWorld {
 public:
  PooledWorld(std::size_t devices, std::uint64_t seed);
  ~PooledWorld();

  bool run_scenario(std::uint64_t seed);  // false and problems(): something was not as program order says
  std::vector<std::string> problems();
  std::uint64_t poisoned() const { return poisoned_; }
  GradientPoolStats pool() const { return pool_->stats(); }

 private:
  struct Unit {
    std::shared_ptr<WeightUnit> unit;
    std::vector<Word> weights, gradients;  // gradients: used by those with an image of their own
    Word version = 0;                      // of the main thread: what program order says
    std::atomic<Word> published{0};        // by updates

    Word word(Word at_version, std::size_t i) const { return static_cast<Word>(at_version * 4096 + unit->id * 64 + i); }
  };
  struct Planned {  // the update of one unit in one iteration
    Unit* unit;
    std::uint64_t number;
    Ticket take, publish;
    Word sum, version, jobs;
  };
  struct Use {
    Unit* unit;
    Word expected_version;
    Word contribution = 0;  // 0: no gradients in this job
    bool pooled = false, loads = false, eager = false;
    std::shared_ptr<Planned> planned = nullptr;  // of the last job that writes the unit
  };
  void problem(const std::string& what);
  void poke();
  void iteration();
  // Forward jobs of the iteration that have not ended, for backward ones to wait for.
  using Left = std::shared_ptr<std::atomic<int>>;
  void dispatch(const std::vector<Use>& uses, const Left& forward, bool is_forward);
  void run_job(WorkerRoom& room, std::uint64_t job, const std::vector<Use>& uses, int doomed_at, std::uint64_t seed);
  void submit(const Planned& planned, std::shared_ptr<std::byte> place);  // null: from the unit's image
  void give_up(const Planned& planned, const std::exception_ptr& failure);
  bool settle();

  HostBackend backend_;
  WorkerRooms rooms_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::uint64_t> pool_memory_;
  std::shared_ptr<GradientPool> pool_;
  std::unique_ptr<OptimizerQueue> queue_;
  std::vector<std::uint64_t> numbers_;  // of the scenario's updates
  std::mt19937_64 random_;
  std::size_t next_device_ = 0;
  double doom_ = 0;
  std::uint64_t poisoned_ = 0;
  std::mutex problems_mutex_;  // guards problems_
  std::vector<std::string> problems_;
};

inline PooledWorld::PooledWorld(std::size_t devices, std::uint64_t seed)
    : backend_({.devices = devices, .check = true, .seed = seed}), random_(seed) {
  constexpr std::size_t kRegionBytes = 24 * 256;
  HappensBefore& checker = *backend_.checker();
  rooms_ = make_worker_rooms(backend_, devices, kRegionBytes);
  queue_ = std::make_unique<OptimizerQueue>(2, &checker);
  const std::size_t count = 2 + random_() % 5;
  std::size_t largest = 0, all = 0;
  for (std::size_t u = 0; u < count; ++u) {
    auto unit = std::make_unique<Unit>();
    unit->unit = std::make_shared<WeightUnit>(&checker);
    unit->unit->id = u + 1;
    unit->weights.resize(1 + random_() % 100);
    unit->gradients.resize(1 + random_() % 180);
    for (std::size_t i = 0; i < unit->weights.size(); ++i) unit->weights[i] = unit->word(0, i);
    unit->unit->weights = {{unit->weights.data(), 0, unit->weights.size() * sizeof(Word)}};
    unit->unit->weight_bytes = RegionExtents::aligned(unit->weights.size() * sizeof(Word));
    unit->unit->gradient_bytes = unit->gradients.size() * sizeof(Word);
    unit->unit->clock.set_observer([this] { poke(); });
    checker.fresh(unit->weights.data(), unit->weights.size() * sizeof(Word));
    checker.fresh(unit->gradients.data(), unit->gradients.size() * sizeof(Word));
    largest = std::max(largest, RegionExtents::aligned(unit->unit->gradient_bytes));
    all += RegionExtents::aligned(unit->unit->gradient_bytes);
    units_.push_back(std::move(unit));
  }
  // The smallest pool that is allowed, or something larger.
  pool_memory_.resize((random_() % 2 == 0 ? largest : largest + random_() % all) / sizeof(std::uint64_t));
  pool_ = GradientPool::make(
      pool_memory_.data(), pool_memory_.size() * sizeof(std::uint64_t), nullptr, [this] { poke(); }, &checker);
}

inline PooledWorld::~PooledWorld() {
  for (const auto& room : rooms_) room->worker.reset();
  for (const auto& room : rooms_) room->streamer.reset();
  queue_->shutdown();
  for (const auto& room : rooms_) room->engine->shutdown();
}

inline void PooledWorld::problem(const std::string& what) {
  std::lock_guard lock(problems_mutex_);
  problems_.push_back(what);
}

inline std::vector<std::string> PooledWorld::problems() {
  std::lock_guard lock(problems_mutex_);
  return problems_;
}

inline void PooledWorld::poke() {
  for (const auto& room : rooms_) room->engine->poke();
  queue_->poke();
}

// Forward jobs over all units, then backward jobs in reverse with gradients and the tickets of their updates.
inline void PooledWorld::iteration() {
  const std::size_t count = units_.size();
  const std::size_t shared = random_() % 2 == 0 ? random_() % count : count;  // also used by the first backward job
  const std::size_t eager = random_() % 2 == 0 ? random_() % count : count;   // its update is submitted at once
  const auto stages = [&](bool backward) {
    std::vector<std::vector<std::size_t>> cut(1);
    for (std::size_t i = 0; i < count; ++i) {
      if (cut.back().size() == 3 || (!cut.back().empty() && random_() % 2 == 0)) cut.emplace_back();
      cut.back().push_back(backward ? count - 1 - i : i);
    }
    if (shared < count && std::count(cut.front().begin(), cut.front().end(), shared) == 0) {
      cut.front().push_back(shared);
    }
    return cut;
  };
  const auto forward_stages = stages(false);
  const auto forward = std::make_shared<std::atomic<int>>(static_cast<int>(forward_stages.size()));
  for (const auto& stage : forward_stages) {
    std::vector<Use> uses;
    for (const std::size_t u : stage) uses.push_back({units_[u].get(), units_[u]->version});
    dispatch(uses, forward, true);
  }
  const auto backward = stages(true);
  std::vector<Word> jobs(count), sums(count), written(count);
  for (const auto& stage : backward) {
    for (const std::size_t u : stage) ++jobs[u];
  }
  for (const auto& stage : backward) {
    std::vector<Use> uses;
    for (const std::size_t u : stage) {
      Use use{units_[u].get(), units_[u]->version};
      use.contribution = 1 + static_cast<Word>(random_() % 50);
      use.eager = u == eager;
      use.pooled = jobs[u] == 1 && !use.eager;
      use.loads = written[u] != 0;
      sums[u] += use.contribution;
      if (++written[u] == jobs[u]) {
        use.planned = std::make_shared<Planned>(
            Planned{use.unit, queue_->reserve(), {}, {}, sums[u], ++use.unit->version, jobs[u]});
        numbers_.push_back(use.planned->number);
      }
      uses.push_back(use);
    }
    dispatch(uses, forward, false);
  }
}

inline void PooledWorld::dispatch(const std::vector<Use>& uses, const Left& forward, bool is_forward) {
  std::vector<UnitUse> unit_uses;
  for (const Use& use : uses) {
    UnitUse unit_use{.unit = use.unit->unit};
    unit_use.gradients = use.contribution != 0;
    if (use.pooled) {
      unit_use.gradient_pool = pool_;
    } else if (unit_use.gradients) {
      unit_use.gradient_store = use.unit->gradients.data();
      unit_use.gradient_load = use.loads ? use.unit->gradients.data() : nullptr;
    }
    unit_uses.push_back(std::move(unit_use));
  }
  WorkerRoom& room = *rooms_[next_device_++ % rooms_.size()];
  const bool doomed = std::uniform_real_distribution<>(0, 1)(random_) < doom_;
  const int doomed_at = doomed ? static_cast<int>(random_() % (2 * uses.size() + 1)) : -1;
  const std::uint64_t job = room.streamer->enqueue(std::move(unit_uses));
  for (const Use& use : uses) {
    if (use.planned == nullptr) continue;
    use.planned->take = use.unit->unit->clock.issue(TicketKind::kGradientTake);
    use.planned->publish = use.unit->unit->clock.issue(TicketKind::kPublish);
    if (use.eager) submit(*use.planned, nullptr);
  }
  room.worker->post([this, &room, job, uses, doomed_at, forward, is_forward, seed = random_()] {
    for (int left = *forward; !is_forward && left != 0; left = *forward) forward->wait(left);
    run_job(room, job, uses, doomed_at, seed);
    if (!is_forward) return;
    --*forward;
    forward->notify_all();
  });
}

inline void PooledWorld::run_job(WorkerRoom& room, std::uint64_t job, const std::vector<Use>& uses, int doomed_at,
                                 std::uint64_t seed) {
  std::mt19937_64 random(seed);
  StageStreamer& streamer = *room.streamer;
  std::vector<bool> handed(uses.size());
  int steps = 0;
  const auto abort = [&](const std::exception_ptr& failure) {
    streamer.abort(job, *room.compute);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (uses[i].planned && !uses[i].eager && !handed[i]) give_up(*uses[i].planned, failure);
    }
  };
  const auto doomed = std::make_exception_ptr(Poisoned("a doomed job"));
  try {
    for (std::size_t i = 0; i < uses.size(); ++i) {
      if (steps++ == doomed_at) return abort(doomed);
      const Use& use = uses[i];
      UnitPlace place;
      if (streamer.wait_unit(job, i, *room.compute, kLong, &place) != WaitResult::kDone) {
        problem("a wait for a unit timed out");
        return abort(doomed);
      }
      const auto* weights = static_cast<const Word*>(place.weights);
      for (std::size_t w = 0; w < use.unit->weights.size(); ++w) {
        const Word wanted = use.unit->word(use.expected_version, w);
        if (weights[w] == wanted) continue;
        problem("word " + std::to_string(w) + " of unit " + std::to_string(use.unit->unit->id) + " is " +
                std::to_string(weights[w]) + " instead of " + std::to_string(wanted));
        break;
      }
      auto* gradients = static_cast<Word*>(place.gradients);
      for (std::size_t g = 0; use.contribution != 0 && g < use.unit->gradients.size(); ++g) {
        gradients[g] += use.contribution + static_cast<Word>(g);
      }
    }
    std::vector<std::size_t> order(uses.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      if (steps++ == doomed_at) return abort(doomed);
      const Use& use = uses[i];
      if (use.contribution == 0) {
        streamer.weights_done(job, i, *room.compute);
        continue;
      }
      handed[i] = true;
      GradientsFinished finished;
      if (use.planned && !use.eager) {
        finished = [this, planned = use.planned](const std::exception_ptr& failure, std::shared_ptr<std::byte> place) {
          failure ? give_up(*planned, failure) : submit(*planned, std::move(place));
        };
      }
      try {
        streamer.gradients_done(job, i, *room.compute, std::move(finished));
      } catch (...) {
        handed[i] = false;
        throw;
      }
    }
    if (doomed_at >= 0) return abort(doomed);
    streamer.close(job, *room.compute);
  } catch (const Poisoned& error) {
    if (doom_ == 0) problem(std::string("poisoned without a reason: ") + error.what());
    abort(std::current_exception());
  } catch (const std::exception& error) {
    problem(error.what());
    abort(std::current_exception());
  }
}

inline void PooledWorld::submit(const Planned& planned, std::shared_ptr<std::byte> place) {
  Unit& unit = *planned.unit;
  const auto* gradients = place ? reinterpret_cast<const Word*>(place.get()) : unit.gradients.data();
  Update update;
  update.tickets = {{unit.unit, planned.take}, {unit.unit, planned.publish}};
  update.elements = 1;
  update.accesses = {
      {Access::kRead, gradients, unit.gradients.size() * sizeof(Word), "an update reads gradients"},
      {Access::kWrite, unit.weights.data(), unit.weights.size() * sizeof(Word), "an update writes weights"}};
  update.body = [this, planned, gradients, place = std::move(place)](std::size_t, std::size_t) {
    Unit& own = *planned.unit;
    for (std::size_t i = 0; i < own.gradients.size(); ++i) {
      const Word wanted = planned.sum + planned.jobs * static_cast<Word>(i);
      if (gradients[i] == wanted) continue;
      problem("gradient " + std::to_string(i) + " of unit " + std::to_string(own.unit->id) + " is " +
              std::to_string(gradients[i]) + " instead of " + std::to_string(wanted));
      break;
    }
    for (std::size_t w = 0; w < own.weights.size(); ++w) own.weights[w] = own.word(planned.version, w);
    own.published = planned.version;
  };
  queue_->submit(planned.number, std::move(update));
}

inline void PooledWorld::give_up(const Planned& planned, const std::exception_ptr& failure) {
  for (const Ticket& ticket : {planned.take, planned.publish}) planned.unit->unit->clock.poison(ticket);
  queue_->give_up(planned.number, failure);
}

inline bool PooledWorld::settle() {
  bool idle = true;
  for (const std::uint64_t number : std::exchange(numbers_, {})) {
    try {
      idle &= queue_->wait(number, kLong);
    } catch (const Poisoned& error) {
      ++poisoned_;
      if (doom_ == 0) problem(error.what());
    }
  }
  idle &= wait_idle(rooms_, kLong);
  if (!idle) {
    problem("not idle after all was done");
    return false;
  }
  if (pool_->stats().used_bytes != 0) problem("a place of the pool did not come back");
  for (const auto& owned : units_) {
    Unit& unit = *owned;
    for (std::size_t kind = 0; kind < kTicketKinds; ++kind) {
      const auto ticket_kind = static_cast<TicketKind>(kind);
      if (unit.unit->clock.issued(ticket_kind) == unit.unit->clock.completed(ticket_kind)) continue;
      problem("tickets of kind " + std::to_string(kind) + " stay open");
      return false;
    }
    if (doom_ == 0 && unit.published != unit.version) problem("an update is missing");
    if (doom_ != 0) unit.unit->clock.new_epoch();
    unit.version = unit.published;  // what was poisoned never happened
  }
  for (const std::string& report : backend_.checker()->take_reports()) problem(report);
  return problems().empty();
}

inline bool PooledWorld::run_scenario(std::uint64_t seed) {
  random_.seed(seed);
  backend_.set_delays(seed, random_() % 8 == 0 ? static_cast<std::uint32_t>(random_() % 20) : 0);
  doom_ = random_() % 5 == 0 ? 0.2 : 0;
  for (std::uint64_t iterations = 1 + random_() % 3; iterations > 0; --iterations) iteration();
  return settle();
}

}  // namespace roundpipe
