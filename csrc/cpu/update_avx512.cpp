#if defined(__x86_64__)

// g++ 12 takes the undefined pass-through operand of its own unmasked intrinsics for an uninitialised variable.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define RP_TARGET __attribute__((target("avx512f")))
#include "cpu/update_isas.h"
#include "cpu/update_loops.h"
#include "cpu/vector_avx512.h"

namespace roundpipe::cpu::avx512 {

const UpdateKernels kUpdate = update_row<Avx512>("avx512");

}  // namespace roundpipe::cpu::avx512

#endif
