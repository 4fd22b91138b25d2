#if defined(__x86_64__)

#define RP_TARGET __attribute__((target("avx2,fma,f16c")))
#include "cpu/update_isas.h"
#include "cpu/update_loops.h"
#include "cpu/vector_avx2.h"

namespace roundpipe::cpu::avx2 {

const UpdateKernels kUpdate = update_row<Avx2>("avx2");

}  // namespace roundpipe::cpu::avx2

#endif
