#include "core/host_claim.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <random>
#include <set>
#include <string>

#include "core/errors.h"
#include "core/host_backend.h"
#include "core/memory_limits.h"
#include "registering_backend.h"

namespace roundpipe {
namespace {

// Pages of this process at a known place.
class Pages {
 public:
  explicit Pages(std::size_t count) : bytes_(count * page_bytes()) {
    base_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Pages() { munmap(base_, bytes_); }
  char* at(std::size_t page, std::ptrdiff_t offset = 0) const {
    return static_cast<char*>(base_) + page * page_bytes() + offset;
  }

 private:
  std::size_t bytes_;
  void* base_;
};

class HostClaimTest : public testing::Test {
 protected:
  std::unique_ptr<HostClaim> claim(std::vector<HostRange> ranges, HostClaimOptions options = {.least_bytes = 1}) {
    return std::make_unique<HostClaim>(backend, std::move(ranges), options, nullptr);
  }
  std::size_t page = page_bytes();
  std::shared_ptr<RegisteringBackend> backend = std::make_shared<RegisteringBackend>();
};

TEST_F(HostClaimTest, OverlappingAndAdjacentRangesAreOneRegistration) {
  const Pages pages(16);
  {
    // Two slices that meet inside a page, one inside another, and one alone.
    const auto made =
        claim({{pages.at(1, 100), 2 * page}, {pages.at(3, 100), page}, {pages.at(2), 50}, {pages.at(9), 1}});
    EXPECT_EQ(backend->ranges.size(), 2U);
    EXPECT_EQ(backend->ranges.at(pages.at(1)), 4 * page);
    EXPECT_EQ(backend->ranges.at(pages.at(9)), page);
    EXPECT_EQ(made->stats().registered_bytes, 5 * page);
    EXPECT_EQ(made->stats().registrations, 2U);
    EXPECT_EQ(made->stats().pageable_bytes, 0U);
    const auto pieces = made->pieces(pages.at(1, 100), 2 * page);
    ASSERT_EQ(pieces.size(), 1U);
    EXPECT_EQ(pieces[0].memory, HostMemory::kPinned);
  }
  EXPECT_TRUE(backend->ranges.empty());
}

TEST_F(HostClaimTest, PiecesOfLimitedSizeAndCopiesCutAtTheirBorders) {
  const Pages pages(8);
  const auto made = claim({{pages.at(0), 7 * page}}, {.registration_bytes = 3 * page, .least_bytes = 1});
  EXPECT_EQ(backend->ranges.size(), 3U);
  EXPECT_EQ(backend->largest, 3 * page);
  const auto pieces = made->pieces(pages.at(1), 5 * page);
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_EQ(pieces[0].bytes, 2 * page);
  EXPECT_EQ(pieces[1].base, pages.at(3));
  EXPECT_EQ(pieces[1].bytes, 3 * page);
}

TEST_F(HostClaimTest, TinyRangesStayPageableAndTheLargestGetTheRegistrations) {
  const Pages pages(64);
  std::vector<HostRange> ranges{{pages.at(0), 0}, {nullptr, 0}};
  for (std::size_t i = 0; i < 16; ++i) ranges.push_back({pages.at(4 * i), (1 + i % 3) * page});
  const auto least = claim(ranges, {.least_bytes = 2 * page});
  EXPECT_EQ(backend->ranges.size(), 10U);
  EXPECT_EQ(least->pieces(pages.at(0), page)[0].memory, HostMemory::kPageable);
  EXPECT_EQ(least->pieces(pages.at(4), 2 * page)[0].memory, HostMemory::kPinned);
  EXPECT_EQ(least->stats().pageable_bytes, 6 * page);
  backend = std::make_shared<RegisteringBackend>();
  const auto most = claim(ranges, {.least_bytes = 1, .most_registrations = 7});
  EXPECT_EQ(backend->ranges.size(), 7U);
  std::size_t three = 0;
  for (const auto& [base, bytes] : backend->ranges) three += bytes == 3 * page;
  EXPECT_EQ(three, 5U);
}

TEST_F(HostClaimTest, ClaimsShareTheRegistrationsOfTheirBackend) {
  const Pages pages(64);
  std::vector<HostRange> first, second;
  for (std::size_t i = 0; i < 8; ++i) {
    first.push_back({pages.at(2 * i), page});
    second.push_back({pages.at(16 + 4 * i), (1 + i % 3) * page});
  }
  auto one = claim(first, {.least_bytes = 1, .most_registrations = 10});
  EXPECT_EQ(backend->ranges.size(), 8U);
  auto two = claim(second, {.least_bytes = 1, .most_registrations = 10});
  EXPECT_EQ(two->stats().registrations, 2U);
  EXPECT_EQ(two->stats().registered_bytes, 6 * page);  // the two of three pages
  auto three = claim({{pages.at(60), page}}, {.least_bytes = 1, .most_registrations = 10});
  EXPECT_EQ(three->stats().registrations, 0U);
  EXPECT_EQ(three->stats().pageable_bytes, page);
  one.reset();
  three = claim({{pages.at(60), page}}, {.least_bytes = 1, .most_registrations = 10});
  EXPECT_EQ(three->stats().registrations, 1U);
  std::shared_ptr<RegisteringBackend> other = std::make_shared<RegisteringBackend>();
  const HostClaim elsewhere(other, first, {.least_bytes = 1, .most_registrations = 10}, nullptr);
  EXPECT_EQ(other->ranges.size(), 8U);
}

TEST_F(HostClaimTest, ADriversLimitOnTheirNumberLeavesTheSmallestPageable) {
  constexpr std::size_t kRanges = 300;
  const Pages pages(4 * kRanges);
  std::vector<HostRange> ranges;
  for (std::size_t i = 0; i < kRanges; ++i) ranges.push_back({pages.at(4 * i), (1 + i % 3) * page});
  HostBackend limited({.check = true});
  const auto shared = std::shared_ptr<Backend>(&limited, [](Backend*) {});
  limited.limit_registrations(150);
  const HostClaimOptions options{.least_bytes = 1, .many_registrations = 100};
  {
    const HostClaim made(shared, ranges, options, nullptr);
    EXPECT_EQ(made.stats().registrations, 150U);
    EXPECT_EQ(made.stats().registered_bytes, (100 * 3 + 50 * 2) * page);
    EXPECT_EQ(made.stats().pageable_bytes, (50 * 2 + 100) * page);
    std::size_t bytes = 0;
    for (const HostRange& range : ranges) {
      for (const HostPiece& piece : made.pieces(range.base, range.bytes)) {
        bytes += piece.bytes;
        EXPECT_EQ(limited.page_locked(piece.base), piece.memory == HostMemory::kPinned);
      }
    }
    EXPECT_EQ(bytes, 600 * page);
    // Another claim finds the driver full at once.
    const HostClaim other(shared, {{pages.at(3), page}}, options, nullptr);
    EXPECT_EQ(other.stats().pageable_bytes, page);
  }
  limited.limit_registrations(99);  // refused before there were many: memory lacks
  EXPECT_THROW(HostClaim(shared, ranges, options, nullptr), HostOutOfMemory);
  for (const HostRange& range : ranges) EXPECT_FALSE(limited.page_locked(range.base));
  limited.limit_registrations(-1);
  EXPECT_EQ(HostClaim(shared, ranges, options, nullptr).stats().registrations, kRanges);
}

TEST_F(HostClaimTest, WhatIsPinnedAlreadyIsLeftAlone) {
  const Pages pages(8);
  backend->register_host(pages.at(2), 2 * page);
  {
    // Wholly pinned; beginning in a pinned page; not pinned.
    const auto made = claim({{pages.at(2, 8), page}, {pages.at(3, 8), 2 * page}, {pages.at(6), page}});
    EXPECT_EQ(made->stats().registered_bytes, 3 * page);  // pages 4, 5 and 6
    EXPECT_EQ(made->stats().pinned_bytes, page);
    const auto pieces = made->pieces(pages.at(3, 8), 2 * page);
    ASSERT_EQ(pieces.size(), 2U);
    EXPECT_EQ(pieces[0].bytes + pieces[1].bytes, 2 * page);
    EXPECT_EQ(pieces[1].memory, HostMemory::kPinned);
  }
  EXPECT_EQ(backend->ranges.size(), 1U);
  backend->unregister_host(pages.at(2));
}

TEST_F(HostClaimTest, ClaimsThatShareAPageDieInAnyOrder) {
  const Pages pages(8);
  for (const bool first_dies_first : {true, false}) {
    auto first = claim({{pages.at(0), 2 * page + 10}});
    auto second = claim({{pages.at(2, 10), 2 * page}});
    EXPECT_EQ(second->stats().pageable_bytes, page - 10);  // of the page that the first one has
    EXPECT_EQ(HostClaim::total().registered_bytes, 5 * page);
    (first_dies_first ? first : second).reset();
    EXPECT_EQ(backend->ranges.size(), 1U);
    (first_dies_first ? second : first).reset();
    EXPECT_TRUE(backend->ranges.empty());
    EXPECT_EQ(HostClaim::live(), 0U);
  }
}

TEST_F(HostClaimTest, AFailureHalfWayGivesEverythingBack) {
  const Pages pages(16);
  std::vector<HostRange> ranges;
  for (std::size_t i = 0; i < 8; ++i) ranges.push_back({pages.at(2 * i), page});
  for (int fail_at = 0; fail_at < 8; ++fail_at) {
    backend = std::make_shared<RegisteringBackend>();
    backend->fail_at = fail_at;
    EXPECT_THROW(claim(ranges), DriverError);
    EXPECT_TRUE(backend->ranges.empty());
    EXPECT_EQ(HostClaim::live(), 0U);
  }
}

TEST_F(HostClaimTest, WithoutPinningNothingIsRegistered) {
  const Pages pages(4);
  const auto made = claim({{pages.at(0), 4 * page}}, {.pin = false});
  EXPECT_TRUE(backend->ranges.empty());
  EXPECT_EQ(made->stats().pageable_bytes, 4 * page);
  EXPECT_EQ(made->pieces(pages.at(0, 3), 100)[0].memory, HostMemory::kPageable);
}

TEST_F(HostClaimTest, FilesAreKnownAndCountedBeforeTheyAreLocked) {
  const std::string path = testing::TempDir() + "/weights-" + std::to_string(getpid());
  const std::size_t bytes = 4 * page;
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  ASSERT_GE(file, 0);
  ASSERT_EQ(ftruncate(file, static_cast<off_t>(bytes)), 0);
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  // Larger than any memory, and never touched.
  const std::size_t huge = std::size_t{1} << 44;
  const int sparse = open((path + "-huge").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  const bool can_be_huge = ftruncate(sparse, static_cast<off_t>(huge)) == 0;
  void* too_large = can_be_huge ? mmap(nullptr, huge, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, sparse, 0) : MAP_FAILED;
  close(file);
  close(sparse);
  ASSERT_NE(mapped, MAP_FAILED);
  {
    const auto made = claim({{mapped, bytes}}, {.pin = false});
    EXPECT_EQ(made->stats().file_bytes, bytes);
    EXPECT_EQ(made->pieces(mapped, bytes)[0].memory, HostMemory::kFile);
    EXPECT_EQ(claim({{mapped, bytes}})->stats().registered_bytes, bytes);
  }
  if (too_large != MAP_FAILED) {
    EXPECT_THROW(claim({{too_large, huge}}), HostOutOfMemory);
    EXPECT_TRUE(backend->ranges.empty());
    const auto made = claim({{too_large, huge}}, {.pin = false});
    EXPECT_EQ(made->pieces(too_large, page)[0].memory, HostMemory::kFileOnce);
    munmap(too_large, huge);
  }
  munmap(mapped, bytes);
  std::remove(path.c_str());
  std::remove((path + "-huge").c_str());
}

// Against a model that knows every page: no page is locked twice or forgotten, pieces cover every byte once.
TEST_F(HostClaimTest, RandomClaims) {
  constexpr std::size_t kPages = 40;
  const Pages pages(kPages);
  std::mt19937 random(7);
  const auto below = [&](std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random); };
  std::vector<std::unique_ptr<HostClaim>> claims;
  for (int round = 0; round < 400; ++round) {
    if (claims.size() == 4 || (!claims.empty() && below(3) == 0)) {
      claims.erase(claims.begin() + static_cast<std::ptrdiff_t>(below(claims.size())));
    } else {
      std::vector<HostRange> ranges;
      for (std::size_t i = below(6); i-- > 0;) {
        const std::size_t begin = below(kPages * page), bytes = below(5 * page);
        ranges.push_back({pages.at(0) + begin, std::min(bytes, kPages * page - begin)});
      }
      claims.push_back(claim(ranges, {.registration_bytes = (1 + below(4)) * page, .least_bytes = 1}));
      for (const HostRange& range : ranges) {
        const char* expected = static_cast<const char*>(range.base);
        for (const HostPiece& piece : claims.back()->pieces(range.base, range.bytes)) {
          ASSERT_EQ(piece.base, expected);
          ASSERT_GT(piece.bytes, 0U);
          expected += piece.bytes;
          // Locked by whomsoever where it says so; the rest lies in pages that another claim has.
          const bool locked = backend->page_locked(piece.base);
          ASSERT_TRUE(locked || piece.memory != HostMemory::kPinned);
        }
        ASSERT_EQ(expected, static_cast<const char*>(range.base) + range.bytes);
      }
    }
    std::size_t bytes = 0;
    for (const auto& one : claims) bytes += one->stats().registered_bytes;
    ASSERT_EQ(bytes, backend->registered);  // the backend refuses overlaps by itself
  }
  claims.clear();
  EXPECT_EQ(backend->registered, 0U);
}

}  // namespace
}  // namespace roundpipe
