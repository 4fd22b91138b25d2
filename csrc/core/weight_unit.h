// A unit: the weights that always move together, because exactly the same layers use them. A layer's own weights form
// one unit; weights shared by a set of layers form another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "core/layer_clock.h"

namespace roundpipe {

struct HostSegment {
  void* host;
  std::size_t offset;  // inside the packed device image
  std::size_t bytes;
  HostMemory memory = HostMemory::kPinned;
};

struct WeightUnit {
  std::uint64_t id = 0;
  std::size_t weight_bytes = 0;      // of the packed device image, a multiple of 256
  std::vector<HostSegment> weights;  // one segment when the host memory is packed the same way
  std::size_t gradient_bytes = 0;    // of the packed gradient image; 0: all frozen
  LayerClock clock;

  explicit WeightUnit(HappensBefore* checker) : clock(checker) {}
};

}  // namespace roundpipe
