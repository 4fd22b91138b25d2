// The loops of convert.h over one instruction set (vector.h), included once by each translation unit of convert.
#pragma once

#include <array>
#include <type_traits>

#include "cpu/vector.h"

namespace roundpipe::cpu {
namespace {

constexpr std::size_t kStreamAlignment = 64;
// Results of at least this many bytes go past the caches: nobody reads them soon, and a cached store would first fetch
// the line that it overwrites. On a server of 2023 with AVX-512 that is 1.15 times (bfloat16 from float32) to 1.6 times
// (float32 from bfloat16) as fast, on one core and on twelve.
constexpr std::size_t kStreamBytes = std::size_t{1} << 20;

// x - x is 0 where x is finite and NaN where it is not: summed up, one test at the end finds any.
template <class Isa>
struct FinitenessCheck {
  typename Isa::Vec sum;

  RP_INLINE void begin() { sum = Isa::broadcast(0.0F); }  // no constructor: it would not be of this target
  RP_INLINE void see(const typename Isa::Vec& value) { sum = Isa::add(sum, Isa::subtract(value, value)); }
  RP_INLINE bool all_finite() const {
    alignas(64) std::byte bytes[kLanes * sizeof(float)];
    Isa::template store<DType::kFloat32>(bytes, sum);
    float lanes[kLanes];
    std::memcpy(lanes, bytes, sizeof lanes);
    bool finite = true;
    for (const float lane : lanes) finite = finite && lane == 0.0F;
    return finite;
  }
};

struct NoCheck {
  RP_INLINE void begin() {}
  template <class Vec>
  RP_INLINE void see(const Vec&) {}
  RP_INLINE bool all_finite() const { return true; }
};

// Fewer elements than a vector go through a padded copy, so that they are rounded by the same instructions.
template <class Isa, DType D, DType S, bool kAdd, class Check>
RP_INLINE void part_of_vector(std::byte* dst, const std::byte* src, std::size_t n, Check& check) {
  alignas(64) std::byte from[kLanes * width(S)] = {};
  alignas(64) std::byte to[kLanes * width(D)] = {};
  std::memcpy(from, src, n * width(S));
  typename Isa::Vec value = Isa::template load<S>(from);
  check.see(value);
  if constexpr (kAdd) {
    std::memcpy(to, dst, n * width(D));
    value = Isa::add(Isa::template load<D>(to), value);
  }
  Isa::template store<D>(to, value);
  std::memcpy(dst, to, n * width(D));
}

// Between equal dtypes bytes are copied, so that a NaN keeps its bits; what is checked is in the cache when it is.
template <class Isa, DType S, class Check>
RP_INLINE void copy_loop(std::byte* dst, const std::byte* src, std::size_t n, Check& check) {
  constexpr std::size_t kBlock = 2048;
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t end = n - begin < kBlock ? n : begin + kBlock;
    std::size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) check.see(Isa::template load<S>(src + i * width(S)));
    if (i < end) {
      alignas(64) std::byte rest[kLanes * width(S)] = {};
      std::memcpy(rest, src + i * width(S), (end - i) * width(S));
      check.see(Isa::template load<S>(rest));
    }
    std::memcpy(dst + begin * width(S), src + begin * width(S), (end - begin) * width(S));
  }
}

template <class Isa, DType D, DType S, class Check>
RP_TARGET bool convert_loop(void* dst_pointer, const void* src_pointer, std::size_t n) {
  auto* dst = static_cast<std::byte*>(dst_pointer);
  const auto* src = static_cast<const std::byte*>(src_pointer);
  Check check;
  check.begin();
  if constexpr (D == S) {
    if constexpr (std::is_same_v<Check, NoCheck>) {
      std::memcpy(dst, src, n * width(D));
    } else {
      copy_loop<Isa, S>(dst, src, n, check);
    }
    return check.all_finite();
  }
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(dst) % kStreamAlignment;
  const bool stream = n * width(D) >= kStreamBytes && misaligned % width(D) == 0;
  std::size_t i = 0;
  if (stream) {
    if (misaligned != 0) {
      i = (kStreamAlignment - misaligned) / width(D);
      for (std::size_t done = 0; done < i; done += kLanes) {
        part_of_vector<Isa, D, S, false>(dst + done * width(D), src + done * width(S),
                                         i - done < kLanes ? i - done : kLanes, check);
      }
    }
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      const auto first = Isa::template load<S>(src + i * width(S));
      const auto second = Isa::template load<S>(src + (i + kLanes) * width(S));
      check.see(first);
      check.see(second);
      Isa::template stream<D>(dst + i * width(D), first);
      Isa::template stream<D>(dst + (i + kLanes) * width(D), second);
    }
    Isa::fence();
  } else {
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      const auto first = Isa::template load<S>(src + i * width(S));
      const auto second = Isa::template load<S>(src + (i + kLanes) * width(S));
      check.see(first);
      check.see(second);
      Isa::template store<D>(dst + i * width(D), first);
      Isa::template store<D>(dst + (i + kLanes) * width(D), second);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const auto value = Isa::template load<S>(src + i * width(S));
    check.see(value);
    Isa::template store<D>(dst + i * width(D), value);
  }
  if (i < n) part_of_vector<Isa, D, S, false>(dst + i * width(D), src + i * width(S), n - i, check);
  return check.all_finite();
}

template <class Isa, DType D, DType S>
RP_TARGET void accumulate_loop(void* dst_pointer, const void* src_pointer, std::size_t n) {
  auto* dst = static_cast<std::byte*>(dst_pointer);
  const auto* src = static_cast<const std::byte*>(src_pointer);
  NoCheck none;
  std::size_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    std::byte* const to = dst + i * width(D);
    const std::byte* const from = src + i * width(S);
    const auto first = Isa::add(Isa::template load<D>(to), Isa::template load<S>(from));
    const auto second =
        Isa::add(Isa::template load<D>(to + kLanes * width(D)), Isa::template load<S>(from + kLanes * width(S)));
    Isa::template store<D>(to, first);
    Isa::template store<D>(to + kLanes * width(D), second);
  }
  for (; i < n; i += kLanes) {
    part_of_vector<Isa, D, S, true>(dst + i * width(D), src + i * width(S), n - i < kLanes ? n - i : kLanes, none);
  }
}

using ConvertLoop = bool (*)(void*, const void*, std::size_t);  // false: something is not finite, if that is checked
using AccumulateLoop = void (*)(void*, const void*, std::size_t);
template <class Loop>
using LoopTable = std::array<std::array<Loop, 3>, 3>;  // by destination, then source

template <class Isa>
struct Loops {
  static constexpr DType F = DType::kFloat32, B = DType::kBFloat16, H = DType::kFloat16;
  template <class Check>
  static constexpr LoopTable<ConvertLoop> kConvert{
      {{convert_loop<Isa, F, F, Check>, convert_loop<Isa, F, B, Check>, convert_loop<Isa, F, H, Check>},
       {convert_loop<Isa, B, F, Check>, convert_loop<Isa, B, B, Check>, convert_loop<Isa, B, H, Check>},
       {convert_loop<Isa, H, F, Check>, convert_loop<Isa, H, B, Check>, convert_loop<Isa, H, H, Check>}}};
  static constexpr LoopTable<AccumulateLoop> kAccumulate{
      {{accumulate_loop<Isa, F, F>, accumulate_loop<Isa, F, B>, accumulate_loop<Isa, F, H>},
       {accumulate_loop<Isa, B, F>, accumulate_loop<Isa, B, B>, accumulate_loop<Isa, B, H>},
       {accumulate_loop<Isa, H, F>, accumulate_loop<Isa, H, B>, accumulate_loop<Isa, H, H>}}};

  template <class Table>
  static auto at(const Table& table, DType dst, DType src) {
    return table[static_cast<std::size_t>(dst)][static_cast<std::size_t>(src)];
  }

  static void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n) {
    if (n != 0) at(kConvert<NoCheck>, dst_dtype, src_dtype)(dst, src, n);
  }
  static bool convert_checked(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n) {
    return n == 0 || at(kConvert<FinitenessCheck<Isa>>, dst_dtype, src_dtype)(dst, src, n);
  }
  static void accumulate(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n) {
    at(kAccumulate, dst_dtype, src_dtype)(dst, src, n);
  }
};

}  // namespace
}  // namespace roundpipe::cpu
