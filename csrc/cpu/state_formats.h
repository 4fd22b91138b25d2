// Where an optimizer's numbers stand in memory, in which format, and how they are rounded on their way there. All
// arithmetic is float32.
//
// Note [Split master]
// The exact float32 weight in two halves: a bfloat16, which is what the devices compute with, and beside it an int16:
//   bits of the float32 = (bits of the bfloat16 << 16) + sign-extended int16     (modulo 2^32)
// The bfloat16 is the float32 rounded to nearest, ties away from zero, not its cut-off upper half: the published weight
// carries no bias, and the master costs two bytes instead of four. Every float32 but NaN comes back bit for bit, -0,
// subnormal numbers, infinities and those that round to infinity included. A NaN becomes the NaN 0x7FC0, 0: with a
// payload of its own its rounded half could be an infinity or a zero.
//
// Note [Stochastic rounding]
// A bfloat16 moment has 8 digits, fewer than a decay of 0.999 moves: rounded to nearest it would stand still. So it is
// rounded up with a probability equal to the discarded part. The random bits are a hash of (seed, step, index of the
// element), nothing else: the result does not depend on threads, slices or instruction sets' vector lengths. The first
// moment takes the hash's low half, all others the high half, so that a maximum of second moments equals the one it is
// the maximum of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "cpu/convert.h"
#include "cpu/dynamic_code.h"

namespace roundpipe::cpu {

// Slices of one tensor begin at multiples of this, so that no vector straddles the 2^32 of an index's hash, and no
// block of eight-bit moments two slices.
inline constexpr std::size_t kUpdateAlignment = 256;
static_assert(kUpdateAlignment % kCodeBlock == 0);

enum class MasterFormat : std::uint8_t { kFloat32, kBFloat16, kFloat16, kSplit };

struct WeightSpan {
  MasterFormat format = MasterFormat::kFloat32;
  void* master = nullptr;       // what the update reads and writes; of a split master, the int16
  const void* upper = nullptr;  // split only: the bfloat16 that is read; may be `published`
  // Not split: where the master is read, when what is written must not replace it; null: at `master`.
  const void* before = nullptr;
  // The weight, written only; null: none. Of a split master: the bfloat16 that is written.
  void* published = nullptr;
  DType published_dtype = DType::kBFloat16;
  // A published bfloat16 is rounded as that of a split master, so that both train alike; else to nearest even.
  bool ties_away = false;
};

struct MomentSpan {
  void* data = nullptr;  // null: this moment does not exist
  DType dtype = DType::kFloat32;
  float* scales = nullptr;  // one for kCodeBlock elements: `data` are eight-bit codes (the first moment's are signed)
};

struct Rounding {
  bool stochastic = false;  // of bfloat16 moments: Note [Stochastic rounding]; else to nearest even
  std::uint64_t seed = 0;   // one for each tensor
  std::uint64_t step = 0;
};

// One tensor. No alignment needed; the ranges do not overlap (but for `upper`).
struct UpdateSpans {
  WeightSpan weight;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFloat32;
  std::array<MomentSpan, 3> moments;
  Rounding rounding;
};

}  // namespace roundpipe::cpu
