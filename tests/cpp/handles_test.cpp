#include "ops/handles.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "ops/error_record.h"

namespace roundpipe::ops {
namespace {

struct Apple {
  static constexpr HandleKind kHandleKind = HandleKind::kUnit;
  explicit Apple(int value_, std::atomic<int>* living_ = nullptr) : value(value_), living(living_) {
    if (living) ++*living;
  }
  ~Apple() {
    if (living) --*living;
  }
  int value;
  std::atomic<int>* living;
};

struct Pear {
  static constexpr HandleKind kHandleKind = HandleKind::kJob;
};

template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST(Handles, AnObjectLivesFromAddToTake) {
  HandleRegistry registry;
  std::atomic<int> living{0};
  const auto handle = registry.add(std::make_shared<Apple>(7, &living));
  EXPECT_GT(handle, 0);
  EXPECT_EQ(registry.get<Apple>(handle, "unit")->value, 7);
  EXPECT_EQ(registry.all<Apple>().size(), 1U);
  EXPECT_TRUE(registry.all<Pear>().empty());
  EXPECT_EQ(registry.take<Apple>(handle, "unit")->value, 7);
  EXPECT_EQ(living, 0);
}

TEST(Handles, AnEndedHandleIsNullWhereThatIsAsked) {
  HandleRegistry registry;
  const auto handle = registry.add(std::make_shared<Apple>(7));
  const auto pear = registry.add(std::make_shared<Pear>());
  EXPECT_EQ(registry.get_if_live<Apple>(handle, "unit")->value, 7);
  EXPECT_EQ(registry.take_if_live<Apple>(handle, "unit")->value, 7);
  EXPECT_EQ(registry.take_if_live<Apple>(handle, "unit"), nullptr);
  EXPECT_EQ(registry.get_if_live<Apple>(handle, "unit"), nullptr);
  EXPECT_EQ(registry.add(std::make_shared<Apple>(8)) == handle, false);
  EXPECT_EQ(registry.get_if_live<Apple>(handle, "unit"), nullptr);
  EXPECT_NE(refusal([&] { registry.get_if_live<Apple>(pear, "unit"); }), "");
  EXPECT_NE(refusal([&] { registry.get_if_live<Apple>(17, "unit"); }), "");
}

TEST(Handles, EveryStrayNumberIsRefusedWithItsReason) {
  HandleRegistry registry;
  begin_op("fruit");
  const auto apple = registry.add(std::make_shared<Apple>(1));
  const auto pear = registry.add(std::make_shared<Pear>());
  EXPECT_NE(refusal([&] { registry.get<Apple>(pear, "unit"); }).find("live unit, got a handle of a job"),
            std::string::npos);
  EXPECT_NE(refusal([&] { registry.get<Apple>(0, "unit"); }).find("got 0, which is no handle"), std::string::npos);
  for (const std::int64_t stray : {std::int64_t{1}, std::int64_t{-1}, INT64_MIN, INT64_MAX}) {
    EXPECT_NE(refusal([&] { registry.get<Apple>(stray, "unit"); }).find(std::to_string(stray)), std::string::npos);
  }
  registry.take<Apple>(apple, "unit");
  const std::string stale = refusal([&] { registry.get<Apple>(apple, "unit"); });
  EXPECT_EQ(stale.find("roundpipe::fruit: argument 'unit'"), 0U);
  EXPECT_NE(stale.find("a stale handle: that unit has ended"), std::string::npos);
}

TEST(Handles, AReusedSlotDoesNotReviveAnOldHandle) {
  HandleRegistry registry;
  std::set<std::int64_t> seen;
  for (int i = 0; i < 1000; ++i) {
    const auto handle = registry.add(std::make_shared<Apple>(i));
    EXPECT_TRUE(seen.insert(handle).second);
    registry.forget_if_live(handle);
    registry.forget_if_live(handle);
    EXPECT_NE(refusal([&] { registry.get<Apple>(handle, "unit"); }), "");
  }
}

TEST(Handles, OfManyTakersOneWins) {
  HandleRegistry registry;
  std::atomic<int> living{0};
  for (int round = 0; round < 50; ++round) {
    const auto handle = registry.add(std::make_shared<Apple>(round, &living));
    std::atomic<int> winners{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        if (refusal([&] { registry.take<Apple>(handle, "unit"); }).empty()) ++winners;
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
  }
  EXPECT_EQ(living, 0);
}

#if !defined(__SANITIZE_THREAD__)  // no fork beside its background thread
TEST(Handles, AForkedChildHasARegistryOfItsOwn) {
  const auto inherited = HandleRegistry::global().add(std::make_shared<Apple>(1));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    auto& registry = HandleRegistry::global();
    const bool refused = !refusal([&] { registry.get<Apple>(inherited, "unit"); }).empty();
    const auto own = registry.add(std::make_shared<Apple>(2));
    _exit(refused && own != inherited && registry.get<Apple>(own, "unit")->value == 2 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(HandleRegistry::global().take<Apple>(inherited, "unit")->value, 1);
}
#endif

TEST(ErrorRecord, KeepsKindNumberAndMessageOfThisThread) {
  begin_op("fruit");
  EXPECT_THROW(
      {
        try {
          throw DriverError("it broke", 700);
        } catch (...) {
          fail_op();
        }
      },
      std::runtime_error);
  EXPECT_EQ(error_record().kind, "DriverError");
  EXPECT_EQ(error_record().number, 700);
  EXPECT_EQ(error_record().message, "roundpipe::fruit: it broke");
  std::thread([] { EXPECT_TRUE(error_record().kind.empty()); }).join();
  begin_op("fruit");
  EXPECT_TRUE(error_record().kind.empty());
}

}  // namespace
}  // namespace roundpipe::ops
