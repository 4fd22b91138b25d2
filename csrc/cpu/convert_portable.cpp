#define RP_TARGET
#include "cpu/convert_isas.h"
#include "cpu/convert_loops.h"
#include "cpu/vector_portable.h"

namespace roundpipe::cpu {

namespace portable {
const ConvertKernels kConvert{"portable", Portable::supported, Loops<Portable>::convert,
                              Loops<Portable>::convert_checked, Loops<Portable>::accumulate};
}  // namespace portable

}  // namespace roundpipe::cpu
