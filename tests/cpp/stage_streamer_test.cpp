#include "core/stage_streamer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <future>
#include <random>

#include "streamer_rig.h"

namespace roundpipe {
namespace {

using std::chrono::milliseconds;
const std::vector<std::string> kSilent;

TEST(StageStreamer, BringsWeightsAndTakesGradientsBack) {
  StreamerRig rig(16384);
  auto a = rig.make_unit({100, 3, 0, 200}, 150), b = rig.make_unit({64}, 0);
  a->gradients.assign(150, 1000);
  for (const bool load : {false, true}) {
    const auto job = rig.streamer->enqueue({writes(*a, load), reads(*b)});
    const UnitPlace pa = rig.wait(job, 0), pb = rig.wait(job, 1);
    EXPECT_TRUE(a->matches(pa.weights));
    EXPECT_TRUE(b->matches(pb.weights));
    EXPECT_EQ(pb.gradients, nullptr);
    rig.add(pa, *a, 5);
    std::promise<std::exception_ptr> finished;
    rig.streamer->weights_done(job, 1, *rig.compute);
    rig.streamer->gradients_done(job, 0, *rig.compute,
                                 [&](const std::exception_ptr& e, const auto&) { finished.set_value(e); });
    EXPECT_EQ(finished.get_future().get(), nullptr);
    // The first sum starts from zeros whatever the host image held, the second from the first.
    for (Word i = 0; i < 150; ++i) EXPECT_EQ(a->gradients[i], (load ? 2 : 1) * (5 + i));
    rig.streamer->close(job, *rig.compute);
    EXPECT_TRUE(rig.streamer->wait_idle(kLong));
    EXPECT_EQ(rig.streamer->open_jobs(), 0u);
  }
  EXPECT_EQ(rig.engine->bytes(Direction::kHostToDevice, Traffic::kWeights), 2 * (303 + 64) * sizeof(Word));
  EXPECT_EQ(rig.engine->bytes(Direction::kHostToDevice, Traffic::kGradients), 150 * sizeof(Word));
  EXPECT_EQ(rig.engine->bytes(Direction::kDeviceToHost, Traffic::kGradients), 2 * 150 * sizeof(Word));
  EXPECT_TRUE(settled(*a));
  EXPECT_TRUE(settled(*b));
  EXPECT_EQ(rig.reports(), kSilent);
}

TEST(StageStreamer, PrefetchesAsFarAsPlacesAreFree) {
  StreamerRig rig(10 * 256);
  std::vector<std::unique_ptr<RigUnit>> units;
  for (int i = 0; i < 6; ++i) units.push_back(rig.make_unit({64 * 3}, 0));  // 768 bytes each
  const auto first = rig.streamer->enqueue({reads(*units[0]), reads(*units[1])});
  const auto second = rig.streamer->enqueue({reads(*units[2]), reads(*units[3])});  // its 2nd unit overlaps unit 1
  const auto third = rig.streamer->enqueue({reads(*units[4]), reads(*units[5])});
  EXPECT_TRUE(units[0]->matches(rig.wait(first, 0).weights));
  EXPECT_TRUE(units[1]->matches(rig.wait(first, 1).weights));
  EXPECT_TRUE(units[2]->matches(rig.wait(second, 0).weights));
  EXPECT_FALSE(rig.arrives(second, 1, milliseconds(20)));
  rig.streamer->weights_done(first, 0, *rig.compute);
  EXPECT_FALSE(rig.arrives(second, 1, milliseconds(20)));
  EXPECT_FALSE(rig.arrives(third, 0, kNow));  // free, but behind the second job
  rig.streamer->weights_done(first, 1, *rig.compute);
  EXPECT_TRUE(units[3]->matches(rig.wait(second, 1).weights));
  EXPECT_TRUE(units[4]->matches(rig.wait(third, 0).weights));
  EXPECT_FALSE(rig.arrives(third, 1, milliseconds(20)));
  rig.streamer->close(second, *rig.compute);
  EXPECT_TRUE(units[5]->matches(rig.wait(third, 1).weights));
  rig.streamer->close(first, *rig.compute);
  rig.streamer->close(third, *rig.compute);
  EXPECT_TRUE(rig.streamer->wait_idle(kLong));
  EXPECT_EQ(rig.reports(), kSilent);
}

// Random jobs, some as large as the region, several enqueued ahead, released in random order under random delays: every
// unit shows its own bytes as long as it is in use, and what was released is not read.
TEST(StageStreamer, ReuseNeverOvertakesAReader) {
  std::mt19937 random(11);
  for (std::uint64_t round = 0; round < 12; ++round) {
    const std::size_t region_pieces = 6 + random() % 10;
    StreamerRig rig(region_pieces * 256, {.devices = 1, .check = true, .seed = round, .max_delay_us = 30});
    std::vector<std::unique_ptr<RigUnit>> units;
    for (int i = 0; i < 12; ++i) {
      units.push_back(rig.make_unit({1 + random() % 100, random() % 60}, random() % 2 ? 1 + random() % 100 : 0));
    }
    struct Pending {
      std::uint64_t id;
      std::vector<RigUnit*> units;
    };
    std::deque<Pending> ahead;
    std::vector<Word> sums(units.size(), 0);
    int made = 0;
    while (made < 30 || !ahead.empty()) {
      while (made < 30 && ahead.size() < 3) {
        std::vector<UnitUse> uses;
        std::vector<RigUnit*> used;
        const std::size_t start = random() % units.size();
        for (std::size_t i = 0; i < units.size(); ++i) {
          RigUnit& unit = *units[(start + i) % units.size()];
          uses.push_back(unit.gradients.empty() ? reads(unit) : writes(unit, sums[unit.unit->id - 1] != 0));
          if (StageStreamer::job_bytes(uses) > rig.region_bytes()) {
            uses.pop_back();
            break;
          }
          used.push_back(&unit);
          if (!unit.gradients.empty()) ++sums[unit.unit->id - 1];
          if (random() % 4 == 0) break;
        }
        ahead.push_back({rig.streamer->enqueue(uses), used});
        ++made;
      }
      const Pending job = ahead.front();
      ahead.pop_front();
      std::vector<std::size_t> order(job.units.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::vector<UnitPlace> places;
      for (std::size_t i = 0; i < order.size(); ++i) places.push_back(rig.wait(job.id, i));
      std::shuffle(order.begin(), order.end(), random);
      for (const std::size_t i : order) {
        RigUnit& unit = *job.units[i];
        EXPECT_TRUE(unit.matches(places[i].weights));
        if (!unit.gradients.empty()) rig.add(places[i], unit, 1);
        if (random() % 3 != 0) rig.streamer->weights_done(job.id, i, *rig.compute);
        if (!unit.gradients.empty()) rig.streamer->gradients_done(job.id, i, *rig.compute);
      }
      rig.streamer->close(job.id, *rig.compute);
    }
    ASSERT_TRUE(rig.streamer->wait_idle(kLong));
    for (const auto& unit : units) {
      const Word uses = sums[unit->unit->id - 1];
      if (uses == 0) continue;
      for (Word i = 0; i < unit->gradients.size(); ++i) ASSERT_EQ(unit->gradients[i], uses * (1 + i));
    }
    EXPECT_EQ(rig.reports(), kSilent);
  }
}

TEST(StageStreamer, JobsAsLargeAsTheRegionFollowEachOther) {
  StreamerRig rig(4 * 256, {.devices = 1, .check = true, .seed = 1, .max_delay_us = 20});
  auto a = rig.make_unit({64}, 64), b = rig.make_unit({100}, 0);
  std::deque<std::uint64_t> jobs;
  for (int i = 0; i < 60; ++i) {
    jobs.push_back(rig.streamer->enqueue({writes(*a, i != 0), reads(*b)}));
    if (jobs.size() < 4) continue;
    const auto job = jobs.front();
    jobs.pop_front();
    rig.add(rig.wait(job, 0), *a, 1);
    EXPECT_TRUE(b->matches(rig.wait(job, 1).weights));
    rig.streamer->gradients_done(job, 0, *rig.compute);
    rig.streamer->close(job, *rig.compute);
  }
  for (const auto job : jobs) {
    rig.add(rig.wait(job, 0), *a, 1);
    rig.streamer->gradients_done(job, 0, *rig.compute);
    rig.streamer->close(job, *rig.compute);
  }
  ASSERT_TRUE(rig.streamer->wait_idle(kLong));
  for (Word i = 0; i < 64; ++i) EXPECT_EQ(a->gradients[i], 60 * (1 + i));
  EXPECT_EQ(rig.reports(), kSilent);
}

TEST(StageStreamer, TicketsHoldBackUploadsAndDownloads) {
  StreamerRig rig(16384);
  auto a = rig.make_unit({50}, 50);
  LayerClock& clock = a->unit->clock;
  HappensBefore& checker = *rig.backend.checker();
  const Ticket publish = clock.issue(TicketKind::kPublish);
  const Ticket take = clock.issue(TicketKind::kGradientTake);
  const auto job = rig.streamer->enqueue({writes(*a)});
  EXPECT_FALSE(rig.arrives(job, 0, milliseconds(20)));  // rule 2
  a->version = 1;
  a->fill();
  checker.access(checker.this_thread(), Access::kWrite, a->weights[0].data(), 50 * sizeof(Word), "publish");
  clock.complete(publish);
  const UnitPlace place = rig.wait(job, 0);
  EXPECT_TRUE(a->matches(place.weights));
  rig.add(place, *a, 3);
  std::atomic<bool> finished{false};
  rig.streamer->gradients_done(job, 0, *rig.compute, [&](const std::exception_ptr&, const auto&) { finished = true; });
  rig.streamer->close(job, *rig.compute);
  EXPECT_FALSE(rig.streamer->wait_idle(milliseconds(20)));  // rule 4
  EXPECT_FALSE(finished.load());
  EXPECT_EQ(a->gradients[0], 0u);
  checker.access(checker.this_thread(), Access::kRead, a->gradients.data(), 50 * sizeof(Word), "take");
  clock.complete(take);
  EXPECT_TRUE(rig.streamer->wait_idle(kLong));
  EXPECT_TRUE(finished.load());
  EXPECT_EQ(a->gradients[1], 4u);
  EXPECT_EQ(rig.reports(), kSilent);
}

TEST(StageStreamer, TheCheckerSeesAReadAfterWeightsDone) {
  StreamerRig rig(4096);
  auto a = rig.make_unit({50}, 0);
  const auto job = rig.streamer->enqueue({reads(*a)});
  const UnitPlace place = rig.wait(job, 0);
  rig.streamer->weights_done(job, 0, *rig.compute);
  rig.streamer->close(job, *rig.compute);
  rig.streamer->set_region(nullptr, 0);  // the place is filled with NaNs by then
  EXPECT_EQ(static_cast<const Word*>(place.weights)[0], 0xFFFFFFFFu);
  rig.streamer->set_region(rig.region.data(), rig.region_bytes());
  EXPECT_EQ(rig.reports(), kSilent);

  const auto again = rig.streamer->enqueue({reads(*a)});
  const UnitPlace other = rig.wait(again, 0);
  rig.streamer->weights_done(again, 0, *rig.compute);
  rig.backend.device(0).declare(*rig.compute, Access::kRead, other.weights, 4, "late reader");
  rig.streamer->close(again, *rig.compute);
  rig.streamer->set_region(nullptr, 0);
  EXPECT_NE(rig.reports(), kSilent);
}

TEST(StageStreamer, PoisonedTicketsFailTheirUnitAndEveryoneBehind) {
  StreamerRig rig(16384);
  auto a = rig.make_unit({50}, 50), b = rig.make_unit({50}, 0);
  const Ticket publish = a->unit->clock.issue(TicketKind::kPublish);
  const auto job = rig.streamer->enqueue({writes(*a), reads(*b)});
  const Ticket take = a->unit->clock.issue(TicketKind::kGradientTake);
  a->unit->clock.poison(publish);
  EXPECT_THROW(rig.wait(job, 0), Poisoned);
  EXPECT_TRUE(b->matches(rig.wait(job, 1).weights));
  EXPECT_THROW(rig.streamer->gradients_done(job, 0, *rig.compute), Poisoned);
  rig.streamer->abort(job, *rig.compute);
  EXPECT_EQ(a->unit->clock.wait(take, kLong), TicketState::kPoisoned);
  a->unit->clock.poison(take);
  ASSERT_TRUE(rig.streamer->wait_idle(kLong));
  ASSERT_TRUE(settled(*a));
  a->unit->clock.new_epoch();
  const auto next = rig.streamer->enqueue({writes(*a)});
  EXPECT_TRUE(a->matches(rig.wait(next, 0).weights));
  rig.streamer->gradients_done(next, 0, *rig.compute);
  rig.streamer->close(next, *rig.compute);
  EXPECT_TRUE(rig.streamer->wait_idle(kLong));
  EXPECT_EQ(rig.reports(), kSilent);
}

TEST(StageStreamer, RefusesWhatCannotWork) {
  StreamerRig rig(4 * 256);
  auto a = rig.make_unit({64}, 64), frozen = rig.make_unit({64}, 0), large = rig.make_unit({64 * 5}, 0);
  StageStreamer& streamer = *rig.streamer;
  try {
    streamer.enqueue({reads(*large)});
    ADD_FAILURE() << "a job above the region was taken";
  } catch (const DeviceOutOfMemory& error) {
    EXPECT_EQ(error.asked_bytes, 1280u);
    EXPECT_NE(std::string(error.what()).find("1280"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("1024"), std::string::npos);
  }
  EXPECT_THROW(streamer.enqueue({reads(*a), reads(*a)}), InvalidArgument);
  EXPECT_THROW(streamer.enqueue({writes(*frozen)}), InvalidArgument);
  EXPECT_THROW(streamer.enqueue({UnitUse{.unit = a->unit, .gradients = true}}), InvalidArgument);
  EXPECT_THROW(streamer.enqueue({UnitUse{}}), InvalidArgument);
  a->unit->weights[0].offset = 4;  // beyond the packed image
  EXPECT_THROW(streamer.enqueue({reads(*a)}), InvalidArgument);
  a->unit->weights[0].offset = 0;
  EXPECT_EQ(a->unit->clock.issued(TicketKind::kUpload), 0u);

  const auto job = streamer.enqueue({writes(*a)});
  EXPECT_THROW(streamer.set_region(rig.region.data(), 512), InvalidArgument);
  UnitPlace place;
  EXPECT_THROW(streamer.wait_unit(job, 1, *rig.compute, kNow, &place), InvalidArgument);
  EXPECT_THROW(streamer.wait_unit(job + 1, 0, *rig.compute, kNow, &place), InvalidArgument);
  EXPECT_THROW(streamer.gradients_done(job, 0, *rig.compute), InvalidArgument);  // never waited for
  EXPECT_THROW(streamer.close(job + 1, *rig.compute), InvalidArgument);
  EXPECT_THROW(streamer.abort(0, *rig.compute), InvalidArgument);
  rig.wait(job, 0);
  streamer.weights_done(job, 0, *rig.compute);
  streamer.weights_done(job, 0, *rig.compute);  // again: nothing
  streamer.gradients_done(job, 0, *rig.compute);
  EXPECT_THROW(streamer.gradients_done(job, 0, *rig.compute), InvalidArgument);
  streamer.close(job, *rig.compute);
  EXPECT_THROW(streamer.wait_unit(job, 0, *rig.compute, kNow, &place), InvalidArgument);
  ASSERT_TRUE(streamer.wait_idle(kLong));
  const auto aborted = streamer.enqueue({reads(*a)});
  streamer.abort(aborted, *rig.compute);
  EXPECT_THROW(streamer.wait_unit(aborted, 0, *rig.compute, kNow, &place), Poisoned);
  ASSERT_TRUE(streamer.wait_idle(kLong));
  EXPECT_TRUE(settled(*a));
}

TEST(StageStreamer, ARegionCanBeReplacedAndGivenUp) {
  StreamerRig rig(1024, {.devices = 1, .memory_limit_bytes = 4096, .check = true});
  auto a = rig.make_unit({300}, 0);
  EXPECT_THROW(rig.streamer->enqueue({reads(*a)}), DeviceOutOfMemory);
  std::vector<std::uint64_t> larger(4096 / 8), too_large(4104 / 8);
  EXPECT_THROW(rig.streamer->set_region(too_large.data(), 4104), DeviceOutOfMemory);
  EXPECT_EQ(rig.streamer->region_bytes(), 0u);
  rig.streamer->set_region(larger.data(), 4096);  // alone within the limit, not beside the old region
  EXPECT_EQ(rig.streamer->region_bytes(), 4096u);
  const auto job = rig.streamer->enqueue({reads(*a)});
  EXPECT_TRUE(a->matches(rig.wait(job, 0).weights));
  rig.streamer->close(job, *rig.compute);
  ASSERT_TRUE(rig.streamer->wait_idle(kLong));
  rig.streamer->set_region(nullptr, 0);
  EXPECT_THROW(rig.streamer->enqueue({reads(*a)}), DeviceOutOfMemory);
  EXPECT_THROW(rig.streamer->set_region(nullptr, 8), InvalidArgument);
}

}  // namespace
}  // namespace roundpipe
