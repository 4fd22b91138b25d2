// What the vector types share. Each is included once by every translation unit that defines RP_TARGET, the attribute
// that lets its functions use the instructions, so that no build system needs flags for single files. All is in unnamed
// namespaces: the linker must never merge code of two instruction sets.
//
// An instruction set is a struct with `Vec`, sixteen floats, `Bits`, sixteen 32-bit integers, and static functions:
//   load<DType>, store<DType>, stream<DType> (a store past the caches, to a multiple of the vector's own size), fence;
//   add, subtract, multiply, multiply_add (a * b + c), divide, square_root, broadcast;
//   maximum (NaN if either is), sign (-1, 0, 1; NaN stays), as torch's functions of these names but for sign's NaN;
//   load_split, store_split: Note [Split master] in state_formats.h;
//   Squares, sixteen doubles, with no_squares, add_squares (of floats: exact products), store_squares;
//   lane_numbers, exclusive_or, multiply, fold, upper_half: what a hash takes; store_stochastic: bfloat16, rounded up
//   in magnitude when the discarded half plus the low half of `random` carries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/convert.h"

#ifndef RP_TARGET
#error "define RP_TARGET before this header"
#endif
#define RP_INLINE __attribute__((always_inline)) inline RP_TARGET

namespace roundpipe::cpu {
namespace {

constexpr std::size_t kLanes = 16;

constexpr std::size_t width(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace
}  // namespace roundpipe::cpu
