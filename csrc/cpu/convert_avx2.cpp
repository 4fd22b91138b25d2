#if defined(__x86_64__)

#define RP_TARGET __attribute__((target("avx2,fma,f16c")))
#include "cpu/convert_isas.h"
#include "cpu/convert_loops.h"
#include "cpu/vector_avx2.h"

namespace roundpipe::cpu {

namespace avx2 {
const ConvertKernels kConvert{"avx2", Avx2::supported, Loops<Avx2>::convert, Loops<Avx2>::convert_checked,
                              Loops<Avx2>::accumulate};
}  // namespace avx2

}  // namespace roundpipe::cpu

#endif
