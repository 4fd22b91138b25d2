#if defined(__x86_64__)

// g++ 12 takes the undefined pass-through operand of its own unmasked intrinsics for an uninitialised variable.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define RP_TARGET __attribute__((target("avx512f")))
#include "cpu/convert_isas.h"
#include "cpu/convert_loops.h"
#include "cpu/vector_avx512.h"

namespace roundpipe::cpu {

namespace avx512 {
const ConvertKernels kConvert{"avx512", Avx512::supported, Loops<Avx512>::convert, Loops<Avx512>::convert_checked,
                              Loops<Avx512>::accumulate};
}  // namespace avx512

}  // namespace roundpipe::cpu

#endif
