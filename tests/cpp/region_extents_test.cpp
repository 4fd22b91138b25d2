#include "core/region_extents.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "core/errors.h"

namespace roundpipe {
namespace {

std::size_t pieces(std::size_t bytes) { return (bytes + 255) / 256; }

TEST(RegionExtents, PlacesLikeAnArrayOfPieces) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const std::size_t region_pieces = 1 + random() % 40;
    RegionExtents extents(region_pieces * 256 + random() % 256, nullptr);
    // The model: for each job the pieces of the region it occupies, filled one by one from its end of the region.
    std::vector<char> previous(region_pieces, 0);
    std::size_t previous_size = 0;
    for (int job = 0; job < 20; ++job) {
      std::vector<RegionExtents::Sizes> units;
      std::size_t size = 0;
      while (true) {
        const RegionExtents::Sizes unit{random() % 1500, random() % 2 ? random() % 1500 : 0};
        const std::size_t more = pieces(unit.weights) + pieces(unit.gradients);
        if (size + more > region_pieces || units.size() > 6) break;
        size += more;
        units.push_back(unit);
      }
      EXPECT_EQ(RegionExtents::job_bytes(units), size * 256);
      const auto placed = extents.place(units);
      ASSERT_EQ(placed.size(), units.size());
      std::vector<char> now(region_pieces, 0);
      std::size_t filled = 0;
      for (std::size_t i = 0; i < units.size(); ++i) {
        const std::size_t weights = pieces(units[i].weights), gradients = pieces(units[i].gradients);
        const std::size_t first = job % 2 == 0 ? filled : region_pieces - filled - weights - gradients;
        EXPECT_EQ(placed[i].weights.begin, first * 256);
        EXPECT_EQ(placed[i].weights.end, (first + weights) * 256);
        EXPECT_EQ(placed[i].gradients.begin, (first + weights) * 256);
        EXPECT_EQ(placed[i].gradients.end, (first + weights + gradients) * 256);
        for (std::size_t p = first; p < first + weights + gradients; ++p) {
          EXPECT_EQ(now[p], 0) << "two units of one job share a piece";
          now[p] = 1;
        }
        filled += weights + gradients;
      }
      bool overlaps = false;
      for (std::size_t p = 0; p < region_pieces; ++p) overlaps |= now[p] && previous[p];
      EXPECT_EQ(overlaps, filled + previous_size > region_pieces);
      previous = now;
      previous_size = filled;
    }
  }
}

TEST(RegionExtents, ClaimsConflictWithEveryOverlappingUseThatIsNotSuperseded) {
  std::mt19937 random(8);
  for (int round = 0; round < 100; ++round) {
    RegionExtents extents(1 << 20, nullptr);
    std::vector<std::shared_ptr<Tenancy>> all;
    for (int i = 0; i < 60; ++i) {
      const std::size_t begin = random() % 100;
      const Extent extent{begin, begin + random() % 30};
      const auto claim = extents.claim(extent);
      std::vector<std::shared_ptr<Tenancy>> expected;
      for (const auto& earlier : all) {
        bool shares_a_byte = false;
        for (std::size_t byte = extent.begin; byte < extent.end; ++byte) {
          shares_a_byte |= earlier->extent.begin <= byte && byte < earlier->extent.end;
        }
        if (shares_a_byte && !earlier->superseded) expected.push_back(earlier);
      }
      EXPECT_EQ(claim.conflicts, expected);
      EXPECT_EQ(claim.tenancy->extent.begin, extent.begin);
      EXPECT_FALSE(claim.tenancy->released);
      all.push_back(claim.tenancy);
      if (random() % 2) all[random() % all.size()]->superseded = true;
    }
  }
}

TEST(RegionExtents, RefusesAJobAboveTheRegion) {
  RegionExtents extents(1000, nullptr);  // 3 whole pieces
  EXPECT_EQ(extents.usable_bytes(), 768u);
  EXPECT_THROW(extents.place({{512, 257}}), InvalidArgument);
  EXPECT_EQ(extents.place({{512, 256}}).size(), 1u);
}

}  // namespace
}  // namespace roundpipe
