#define RP_TARGET
#include "cpu/update_isas.h"
#include "cpu/update_loops.h"
#include "cpu/vector_portable.h"

namespace roundpipe::cpu::portable {

const UpdateKernels kUpdate = update_row<Portable>("portable");

}  // namespace roundpipe::cpu::portable
