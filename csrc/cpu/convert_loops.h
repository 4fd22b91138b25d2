// The loops of convert.h over one instruction set (vector.h), included once by each translation unit of convert.
#pragma once

#include <array>

#include "cpu/vector.h"

namespace roundpipe::cpu {
namespace {

constexpr std::size_t kStreamAlignment = 64;
// Results of at least this many bytes go past the caches: nobody reads them soon, and a cached store would first fetch
// the line that it overwrites. On a server of 2023 with AVX-512 that is 1.15 times (bfloat16 from float32) to 1.6 times
// (float32 from bfloat16) as fast, on one core and on twelve.
constexpr std::size_t kStreamBytes = std::size_t{1} << 20;

// Fewer elements than a vector go through a padded copy, so that they are rounded by the same instructions.
template <class Isa, DType D, DType S, bool kAdd>
RP_INLINE void part_of_vector(std::byte* dst, const std::byte* src, std::size_t n) {
  alignas(64) std::byte from[kLanes * width(S)] = {};
  alignas(64) std::byte to[kLanes * width(D)] = {};
  std::memcpy(from, src, n * width(S));
  typename Isa::Vec value = Isa::template load<S>(from);
  if constexpr (kAdd) {
    std::memcpy(to, dst, n * width(D));
    value = Isa::add(Isa::template load<D>(to), value);
  }
  Isa::template store<D>(to, value);
  std::memcpy(dst, to, n * width(D));
}

template <class Isa, DType D, DType S>
RP_TARGET void convert_loop(void* dst_pointer, const void* src_pointer, std::size_t n) {
  auto* dst = static_cast<std::byte*>(dst_pointer);
  const auto* src = static_cast<const std::byte*>(src_pointer);
  if constexpr (D == S) {
    std::memcpy(dst, src, n * width(D));
    return;
  }
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(dst) % kStreamAlignment;
  const bool stream = n * width(D) >= kStreamBytes && misaligned % width(D) == 0;
  std::size_t i = 0;
  if (stream) {
    if (misaligned != 0) {
      i = (kStreamAlignment - misaligned) / width(D);
      for (std::size_t done = 0; done < i; done += kLanes) {
        part_of_vector<Isa, D, S, false>(dst + done * width(D), src + done * width(S),
                                         i - done < kLanes ? i - done : kLanes);
      }
    }
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      const auto first = Isa::template load<S>(src + i * width(S));
      const auto second = Isa::template load<S>(src + (i + kLanes) * width(S));
      Isa::template stream<D>(dst + i * width(D), first);
      Isa::template stream<D>(dst + (i + kLanes) * width(D), second);
    }
    Isa::fence();
  } else {
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      const auto first = Isa::template load<S>(src + i * width(S));
      const auto second = Isa::template load<S>(src + (i + kLanes) * width(S));
      Isa::template store<D>(dst + i * width(D), first);
      Isa::template store<D>(dst + (i + kLanes) * width(D), second);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    Isa::template store<D>(dst + i * width(D), Isa::template load<S>(src + i * width(S)));
  }
  if (i < n) part_of_vector<Isa, D, S, false>(dst + i * width(D), src + i * width(S), n - i);
}

template <class Isa, DType D, DType S>
RP_TARGET void accumulate_loop(void* dst_pointer, const void* src_pointer, std::size_t n) {
  auto* dst = static_cast<std::byte*>(dst_pointer);
  const auto* src = static_cast<const std::byte*>(src_pointer);
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
    part_of_vector<Isa, D, S, true>(dst + i * width(D), src + i * width(S), n - i < kLanes ? n - i : kLanes);
  }
}

using Loop = void (*)(void*, const void*, std::size_t);
using LoopTable = std::array<std::array<Loop, 3>, 3>;  // by destination, then source

template <class Isa>
struct Loops {
  static constexpr DType F = DType::kFloat32, B = DType::kBFloat16, H = DType::kFloat16;
  static constexpr LoopTable kConvert{{{convert_loop<Isa, F, F>, convert_loop<Isa, F, B>, convert_loop<Isa, F, H>},
                                       {convert_loop<Isa, B, F>, convert_loop<Isa, B, B>, convert_loop<Isa, B, H>},
                                       {convert_loop<Isa, H, F>, convert_loop<Isa, H, B>, convert_loop<Isa, H, H>}}};
  static constexpr LoopTable kAccumulate{
      {{accumulate_loop<Isa, F, F>, accumulate_loop<Isa, F, B>, accumulate_loop<Isa, F, H>},
       {accumulate_loop<Isa, B, F>, accumulate_loop<Isa, B, B>, accumulate_loop<Isa, B, H>},
       {accumulate_loop<Isa, H, F>, accumulate_loop<Isa, H, B>, accumulate_loop<Isa, H, H>}}};

  static void convert(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n) {
    if (n != 0) kConvert[static_cast<std::size_t>(dst_dtype)][static_cast<std::size_t>(src_dtype)](dst, src, n);
  }
  static void accumulate(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t n) {
    kAccumulate[static_cast<std::size_t>(dst_dtype)][static_cast<std::size_t>(src_dtype)](dst, src, n);
  }
};

}  // namespace
}  // namespace roundpipe::cpu
