#include "core/trace.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <thread>
#include <vector>

#include "core/errors.h"

namespace roundpipe {
namespace {

TEST(Trace, OffItKeepsNothing) {
  Trace& trace = Trace::global();
  static_cast<void>(trace.stop());
  EXPECT_FALSE(trace.on());
  trace.add(SpanKind::kJob, "lost", 1, 2, 3);
  {
    const ScopedSpan span(SpanKind::kCopy, "lost too");
  }
  trace.start(10);
  EXPECT_TRUE(trace.stop().empty());
  EXPECT_THROW(trace.start(0), InvalidArgument);
}

TEST(Trace, KeepsTheNewestOldestFirst) {
  Trace& trace = Trace::global();
  for (const std::size_t capacity : {1, 3, 7, 100}) {
    for (const std::uint64_t count : {0, 1, 3, 6, 7, 8, 40}) {
      trace.start(capacity);
      for (std::uint64_t i = 0; i < count; ++i) trace.add(SpanKind::kUpdate, "span", i, i + 1, i * 10);
      const std::vector<Span> spans = trace.stop();
      const std::uint64_t kept = std::min<std::uint64_t>(count, capacity);
      ASSERT_EQ(spans.size(), kept) << capacity << " " << count;
      for (std::uint64_t i = 0; i < kept; ++i) {
        EXPECT_EQ(spans[i].begin_ns, count - kept + i);
        EXPECT_EQ(spans[i].argument, (count - kept + i) * 10);
        EXPECT_EQ(spans[i].kind, SpanKind::kUpdate);
      }
    }
  }
}

TEST(Trace, StartDropsWhatWasRecorded) {
  Trace& trace = Trace::global();
  trace.start(4);
  trace.add(SpanKind::kJob, "old", 1, 2, 0);
  trace.start(4);
  trace.add(SpanKind::kJob, "new", 3, 4, 0);
  const std::vector<Span> spans = trace.stop();
  ASSERT_EQ(spans.size(), 1U);
  EXPECT_STREQ(spans[0].name, "new");
}

TEST(Trace, ScopedSpansAreTimedAndNested) {
  Trace& trace = Trace::global();
  trace.start(10);
  const std::uint64_t before = Trace::now_ns();
  {
    const ScopedSpan outer(SpanKind::kJob, "outer", 5);
    const ScopedSpan inner(SpanKind::kWait, "inner", 6);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  const std::uint64_t after = Trace::now_ns();
  const std::vector<Span> spans = trace.stop();
  ASSERT_EQ(spans.size(), 2U);  // the inner one ends, and is added, first
  EXPECT_STREQ(spans[0].name, "inner");
  EXPECT_EQ(spans[1].argument, 5U);
  EXPECT_LE(before, spans[1].begin_ns);
  EXPECT_LE(spans[1].begin_ns, spans[0].begin_ns);
  EXPECT_LE(spans[0].end_ns, spans[1].end_ns);
  EXPECT_LE(spans[1].end_ns, after);
  EXPECT_GE(spans[0].end_ns - spans[0].begin_ns, 2'000'000U);
}

TEST(Trace, EachThreadHasItsOwnTrack) {
  Trace& trace = Trace::global();
  trace.start(100);
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&trace, t] {
      for (int i = 0; i < 3; ++i) trace.add(SpanKind::kCopy, "span", 0, 1, t);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::pair<std::uint64_t, std::uint32_t>> pairs;
  std::set<std::uint32_t> tracks;
  for (const Span& span : trace.stop()) {
    pairs.emplace(span.argument, span.track);
    tracks.insert(span.track);
  }
  EXPECT_EQ(pairs.size(), 4U);
  EXPECT_EQ(tracks.size(), 4U);
}

TEST(Trace, TracksKnowTheirThreads) {
  Trace& trace = Trace::global();
  trace.start(10);
  int tid = 0;
  std::thread([&] {
    pthread_setname_np(pthread_self(), "named-here");
    tid = gettid();
    trace.add(SpanKind::kCopy, "span", 0, 1, 0);
  }).join();
  const std::vector<Span> spans = trace.stop();
  ASSERT_EQ(spans.size(), 1U);
  const std::vector<TrackName> tracks = trace.tracks();
  ASSERT_LT(spans[0].track, tracks.size());
  EXPECT_EQ(tracks[spans[0].track].track, spans[0].track);
  EXPECT_EQ(tracks[spans[0].track].thread, tid);
  EXPECT_EQ(tracks[spans[0].track].name, "named-here");
}

TEST(Trace, ThreadsMayAddWhileItStartsAndStops) {
  Trace& trace = Trace::global();
  std::atomic<bool> done{false};
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      std::uint64_t last = 0;
      while (!done) {
        const ScopedSpan span(SpanKind::kJob, "job", ++last);
        trace.add(SpanKind::kCopy, "copy", last, last + 1, last);
      }
    });
  }
  std::size_t seen = 0;
  for (int round = 0; round < 100 || seen == 0; ++round) {
    const std::size_t capacity = 1 + static_cast<std::size_t>(round % 50);
    trace.start(capacity);
    std::this_thread::yield();
    const std::vector<Span> spans = trace.stop();
    ASSERT_LE(spans.size(), capacity);
    for (const Span& span : spans) ASSERT_LE(span.begin_ns, span.end_ns);
    seen += spans.size();
  }
  done = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace roundpipe
