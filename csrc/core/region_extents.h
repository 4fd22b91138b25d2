// Where in a region each job's units lie, and who must be gone before a new one may write there
// (Note [Two ends of one region]). Knows no device; not thread-safe: the streamer's lock guards it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "core/backend.h"

namespace roundpipe {

struct Extent {  // offsets inside the region
  std::size_t begin = 0, end = 0;
  std::size_t bytes() const noexcept { return end - begin; }
  bool overlaps(const Extent& other) const noexcept {
    return begin < other.end && other.begin < end && bytes() != 0 && other.bytes() != 0;
  }
};

// One use of an extent, from its placement until a successor's upload has been ordered after it.
struct Tenancy {
  Extent extent;
  bool released = false;             // the host has let go; what is still under way is covered by `last_use`
  bool superseded = false;           // the upload stream has waited for `last_use`: later uploads need not
  std::shared_ptr<Event> last_use;   // null: nothing to wait for
  HappensBefore* checker = nullptr;  // knows `this` as the token of the hand-over from who released to the uploads

  ~Tenancy();
};

class RegionExtents {
 public:
  static constexpr std::size_t kAlignment = 256;
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  RegionExtents(std::size_t bytes, HappensBefore* checker) : bytes_(bytes), checker_(checker) {}

  struct Sizes {
    std::size_t weights = 0, gradients = 0;  // gradients == 0: none
  };
  struct Placed {
    Extent weights, gradients;
  };
  static std::size_t job_bytes(const std::vector<Sizes>& units);
  // The next job's places, at the end of the region whose turn it is. Requires job_bytes(units) <= usable_bytes().
  std::vector<Placed> place(const std::vector<Sizes>& units);
  std::size_t usable_bytes() const noexcept { return bytes_ / kAlignment * kAlignment; }

  struct Claim {
    std::shared_ptr<Tenancy> tenancy;
    std::vector<std::shared_ptr<Tenancy>> conflicts;  // earlier uses of some of these bytes, not yet superseded
  };
  Claim claim(const Extent& extent);

 private:
  std::size_t bytes_;
  HappensBefore* checker_;
  bool from_end_ = false;
  std::vector<std::shared_ptr<Tenancy>> tenancies_;  // not superseded, oldest first
};

}  // namespace roundpipe
