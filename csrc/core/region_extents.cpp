#include "core/region_extents.h"

#include <string>

#include "core/errors.h"
#include "core/happens_before.h"

namespace roundpipe {

Tenancy::~Tenancy() {
  if (checker != nullptr) checker->forget_token(this);
}

std::size_t RegionExtents::job_bytes(const std::vector<Sizes>& units) {
  std::size_t bytes = 0;
  for (const Sizes& unit : units) bytes += aligned(unit.weights) + aligned(unit.gradients);
  return bytes;
}

std::vector<RegionExtents::Placed> RegionExtents::place(const std::vector<Sizes>& units) {
  const std::size_t total = job_bytes(units);
  RP_REQUIRE(total <= usable_bytes(), "region: a job of " + std::to_string(total) + " bytes does not fit into " +
                                          std::to_string(usable_bytes()) + "; plan smaller stages");
  std::vector<Placed> placed;
  placed.reserve(units.size());
  std::size_t edge = from_end_ ? usable_bytes() : 0;
  for (const Sizes& unit : units) {
    const std::size_t weights = aligned(unit.weights);
    const std::size_t both = weights + aligned(unit.gradients);
    if (from_end_) edge -= both;
    placed.push_back({{edge, edge + weights}, {edge + weights, edge + both}});
    if (!from_end_) edge += both;
  }
  from_end_ = !from_end_;
  return placed;
}

RegionExtents::Claim RegionExtents::claim(const Extent& extent) {
  std::erase_if(tenancies_, [](const auto& tenancy) { return tenancy->superseded; });
  Claim claim{std::make_shared<Tenancy>(), {}};
  claim.tenancy->extent = extent;
  claim.tenancy->checker = checker_;
  if (extent.bytes() == 0) return claim;
  for (const auto& earlier : tenancies_) {
    if (earlier->extent.overlaps(extent)) claim.conflicts.push_back(earlier);
  }
  tenancies_.push_back(claim.tenancy);
  return claim;
}

}  // namespace roundpipe
