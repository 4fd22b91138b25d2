// Loads and stores of state_formats.h, and the loop over a tensor's elements, for one instruction set (vector.h).
//
// Formats are tested for every vector, not made template arguments: three gradient, four weight, four moment formats
// and three optimizers would be hundreds of loops, and the loop waits for memory, not for branches that always go the
// same way.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/state_formats.h"
#include "cpu/vector.h"

namespace roundpipe::cpu {
namespace {

inline const std::byte* element(const void* base, std::size_t at, std::size_t bytes) {
  return static_cast<const std::byte*>(base) + at * bytes;
}
inline std::byte* element(void* base, std::size_t at, std::size_t bytes) {
  return static_cast<std::byte*>(base) + at * bytes;
}

template <class Isa>
RP_INLINE typename Isa::Vec load_any(const void* base, DType dtype, std::size_t at) {
  switch (dtype) {
    case DType::kFloat32:
      return Isa::template load<DType::kFloat32>(element(base, at, 4));
    case DType::kBFloat16:
      return Isa::template load<DType::kBFloat16>(element(base, at, 2));
    default:
      return Isa::template load<DType::kFloat16>(element(base, at, 2));
  }
}

template <class Isa>
RP_INLINE void store_any(void* base, DType dtype, std::size_t at, typename Isa::Vec value) {
  switch (dtype) {
    case DType::kFloat32:
      return Isa::template store<DType::kFloat32>(element(base, at, 4), value);
    case DType::kBFloat16:
      return Isa::template store<DType::kBFloat16>(element(base, at, 2), value);
    default:
      return Isa::template store<DType::kFloat16>(element(base, at, 2), value);
  }
}

constexpr DType plain_dtype(MasterFormat format) {
  return format == MasterFormat::kFloat32    ? DType::kFloat32
         : format == MasterFormat::kBFloat16 ? DType::kBFloat16
                                             : DType::kFloat16;
}

template <class Isa>
RP_INLINE typename Isa::Vec load_weight(const WeightSpan& weight, std::size_t at) {
  if (weight.format == MasterFormat::kSplit) {
    return Isa::load_split(element(weight.upper, at, 2), element(weight.master, at, 2));
  }
  return load_any<Isa>(weight.before, plain_dtype(weight.format), at);
}

template <class Isa>
RP_INLINE void store_weight(const WeightSpan& weight, std::size_t at, typename Isa::Vec value) {
  if (weight.format == MasterFormat::kSplit) {
    return Isa::store_split(element(weight.published, at, 2), element(weight.master, at, 2), value);
  }
  store_any<Isa>(weight.master, plain_dtype(weight.format), at, value);
  if (weight.published == nullptr) return;
  if (!weight.ties_away || weight.published_dtype != DType::kBFloat16) {
    return store_any<Isa>(weight.published, weight.published_dtype, at, value);
  }
  alignas(64) std::byte low[kLanes * 2];
  Isa::store_split(element(weight.published, at, 2), low, value);
}

inline std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93U;
  x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93U;
  return x ^ (x >> 32);
}

// Note [Stochastic rounding]. Two keys, before and between the multiplications: with one, the random numbers of two
// steps would be the same sequence, shifted.
class RandomBits {
 public:
  RandomBits(const Rounding& rounding, std::uint64_t index_upper)
      : key_(scramble(scramble(scramble(rounding.seed) + rounding.step) + index_upper)) {}

  template <class Isa>
  RP_INLINE typename Isa::Bits at(std::uint32_t index) const {
    typename Isa::Bits x = Isa::exclusive_or(Isa::lane_numbers(index), static_cast<std::uint32_t>(key_));
    x = Isa::multiply(Isa::template fold<16>(x), 0x85EBCA6BU);
    x = Isa::exclusive_or(x, static_cast<std::uint32_t>(key_ >> 32));
    x = Isa::multiply(Isa::template fold<13>(x), 0xC2B2AE35U);
    return Isa::template fold<16>(x);
  }

 private:
  std::uint64_t key_;
};

template <class Isa>
RP_INLINE typename Isa::Vec load_moment(const MomentSpan& moment, std::size_t at) {
  return load_any<Isa>(moment.data, moment.dtype, at);
}

template <class Isa>
RP_INLINE void store_moment(const UpdateSpans& spans, std::size_t which, std::size_t at, typename Isa::Vec value,
                            typename Isa::Bits random) {
  const MomentSpan& moment = spans.moments[which];
  if (moment.dtype != DType::kBFloat16 || !spans.rounding.stochastic) {
    return store_any<Isa>(moment.data, moment.dtype, at, value);
  }
  Isa::store_stochastic(element(moment.data, at, 2), value, which == 0 ? random : Isa::upper_half(random));
}

// Note [Dynamic code], one block.
RP_INLINE void decode_block(float* to, const std::uint8_t* codes, float scale, std::size_t n, const DynamicCode& code) {
  for (std::size_t i = 0; i < n; ++i) to[i] = code.values[codes[i]] * scale;
}

RP_INLINE std::uint32_t nearest_magnitude(float x, const DynamicCode& code) {
  const std::uint32_t key = std::bit_cast<std::uint32_t>(x) >> 16;
  std::uint32_t index = key < DynamicCode::kFirstKey ? 0U : code.below[key - DynamicCode::kFirstKey];
  return index + (x > code.midpoints[index] ? 1U : 0U);
}

RP_INLINE void encode_block(std::uint8_t* codes, float* scale, const float* from, std::size_t n,
                            const DynamicCode& code) {
  float highest = 0, lowest = 0, difference = 0;
  for (std::size_t i = 0; i < n; ++i) {
    highest = from[i] > highest ? from[i] : highest;
    lowest = from[i] < lowest ? from[i] : lowest;
    difference += from[i] - from[i];  // NaN once a value is not finite
  }
  const float largest = -lowest > highest ? lowest : highest;
  *scale = largest + difference;
  const bool empty = largest == 0 || difference != 0;
  const float divisor = empty ? 1.0F : largest;
  for (std::size_t i = 0; i < n; ++i) {
    const float x = empty ? 0.0F : from[i] / divisor;
    const std::uint32_t index = nearest_magnitude(std::fabs(x), code);
    if (!code.is_signed) {
      codes[i] = static_cast<std::uint8_t>(index == 0 && x > 0 ? 1 : index);
    } else {
      codes[i] = static_cast<std::uint8_t>(x < 0 ? 127 - (index < 127 ? index : 127) : 127 + index);
    }
  }
}

inline const DynamicCode& code_of(std::size_t moment) { return moment == 0 ? signed_code() : unsigned_code(); }

// Fewer elements than a vector go through padded copies of all ranges, so that the same instructions compute them.
// Padding is zero, which no optimizer here turns into anything that traps.
class PaddedSpans {
 public:
  PaddedSpans(const UpdateSpans& spans, std::size_t at, std::size_t n) : spans_(spans), at_(at), n_(n) {
    const std::size_t master = spans.weight.format == MasterFormat::kFloat32 ? 4 : 2;
    take(padded_.weight.master, spans.weight.master, master);
    void* before = nullptr;
    take(before, const_cast<void*>(spans.weight.before), master);
    padded_.weight.before = before;
    padded_.weight.format = spans.weight.format;
    padded_.weight.ties_away = spans.weight.ties_away;
    padded_.weight.published_dtype = spans.weight.published_dtype;
    if (spans.weight.published != nullptr) {
      take(padded_.weight.published, spans.weight.published, published_bytes());
    }
    if (spans.weight.format == MasterFormat::kSplit) {
      void* upper = nullptr;
      take(upper, const_cast<void*>(spans.weight.upper), 2);
      padded_.weight.upper = upper;
    }
    void* gradient = nullptr;
    take(gradient, const_cast<void*>(spans.gradient), width(spans.gradient_dtype));
    padded_.gradient = gradient;
    padded_.gradient_dtype = spans.gradient_dtype;
    for (std::size_t i = 0; i < spans.moments.size(); ++i) {
      padded_.moments[i].dtype = spans.moments[i].dtype;
      if (spans.moments[i].data != nullptr) {
        take(padded_.moments[i].data, spans.moments[i].data, width(spans.moments[i].dtype));
      }
    }
    padded_.rounding = spans.rounding;
  }

  const UpdateSpans& padded() const { return padded_; }

  void give_back() const {
    const std::size_t master = spans_.weight.format == MasterFormat::kFloat32 ? 4 : 2;
    give(spans_.weight.master, padded_.weight.master, master);
    if (spans_.weight.published != nullptr) {
      give(spans_.weight.published, padded_.weight.published, published_bytes());
    }
    for (std::size_t i = 0; i < spans_.moments.size(); ++i) {
      if (spans_.moments[i].data != nullptr) {
        give(spans_.moments[i].data, padded_.moments[i].data, width(spans_.moments[i].dtype));
      }
    }
  }

 private:
  std::size_t published_bytes() const {
    return spans_.weight.format == MasterFormat::kSplit ? 2 : width(spans_.weight.published_dtype);
  }
  void take(void*& padded, void* from, std::size_t bytes) {
    padded = memory_[used_++];
    std::memcpy(padded, element(from, at_, bytes), n_ * bytes);
  }
  void give(void* to, const void* padded, std::size_t bytes) const {
    std::memcpy(element(to, at_, bytes), padded, n_ * bytes);
  }

  const UpdateSpans& spans_;
  std::size_t at_, n_;
  UpdateSpans padded_;
  alignas(64) std::byte memory_[8][kLanes * sizeof(float)] = {};
  std::size_t used_ = 0;
};

// The same tensor from element `at` on.
inline UpdateSpans spans_from(const UpdateSpans& spans, std::size_t at) {
  UpdateSpans rest = spans;
  const auto advance = [at](auto*& base, std::size_t bytes) {
    if (base != nullptr) base = element(base, at, bytes);
  };
  const std::size_t master = spans.weight.format == MasterFormat::kFloat32 ? 4 : 2;
  advance(rest.weight.master, master);
  advance(rest.weight.before, master);
  advance(rest.weight.upper, 2);
  advance(rest.weight.published, spans.weight.format == MasterFormat::kSplit ? 2 : width(spans.weight.published_dtype));
  advance(rest.gradient, width(spans.gradient_dtype));
  for (MomentSpan& moment : rest.moments) {
    advance(moment.data, moment.scales != nullptr ? 1 : width(moment.dtype));
    if (moment.scales != nullptr) moment.scales += at / kCodeBlock;
  }
  return rest;
}

// Eight-bit moments: each block is decoded into floats, updated as they are, and encoded again.
template <class Isa, class Algorithm>
RP_TARGET void update_blocks(const UpdateSpans& spans, const Algorithm& algorithm, std::size_t begin, std::size_t end) {
  for (; begin < end; begin += kCodeBlock) {
    const std::size_t n = end - begin < kCodeBlock ? end - begin : kCodeBlock;
    const UpdateSpans coded = spans_from(spans, begin);
    UpdateSpans block = coded;
    alignas(64) float decoded[3][kCodeBlock];
    for (std::size_t m = 0; m < 3; ++m) {
      if (coded.moments[m].scales == nullptr) continue;
      decode_block(decoded[m], static_cast<const std::uint8_t*>(coded.moments[m].data), *coded.moments[m].scales, n,
                   code_of(m));
      block.moments[m] = {decoded[m], DType::kFloat32, nullptr};
    }
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes) algorithm.step(block, i, typename Isa::Bits{});
    if (i < n) {
      PaddedSpans rest(block, i, n - i);
      algorithm.step(rest.padded(), 0, typename Isa::Bits{});
      rest.give_back();
    }
    for (std::size_t m = 0; m < 3; ++m) {
      if (coded.moments[m].scales == nullptr) continue;
      encode_block(static_cast<std::uint8_t*>(coded.moments[m].data), coded.moments[m].scales, decoded[m], n,
                   code_of(m));
    }
  }
}

// `Algorithm<Isa>` holds a step's numbers as vectors; its step(spans, at, random) updates the vector at `at`.
template <class Isa, template <class> class Algorithm, class Numbers>
RP_TARGET void update_loop(const UpdateSpans& given, const Numbers& numbers, std::size_t begin, std::size_t end) {
  UpdateSpans with_source = given;
  if (with_source.weight.before == nullptr) with_source.weight.before = with_source.weight.master;
  const UpdateSpans spans = with_source;  // a copy that no store can alias stays in registers
  const Algorithm<Isa> algorithm(numbers);
  for (const MomentSpan& moment : spans.moments) {
    if (moment.scales != nullptr) return update_blocks<Isa>(spans, algorithm, begin, end);
  }
  const bool stochastic = spans.rounding.stochastic;
  while (begin < end) {
    const std::size_t stop = end - 1 > (begin | 0xFFFFFFFFU) ? (begin | 0xFFFFFFFFU) + 1 : end;
    const RandomBits bits(spans.rounding, begin >> 32);
    std::size_t i = begin;
    for (; i + kLanes <= stop; i += kLanes) {
      algorithm.step(spans, i, stochastic ? bits.at<Isa>(static_cast<std::uint32_t>(i)) : typename Isa::Bits{});
    }
    if (i < stop) {
      PaddedSpans rest(spans, i, stop - i);
      algorithm.step(rest.padded(), 0, bits.at<Isa>(static_cast<std::uint32_t>(i)));
      rest.give_back();
    }
    begin = stop;
  }
}

}  // namespace
}  // namespace roundpipe::cpu
