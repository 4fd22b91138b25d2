// The rows of the table of update_kernels.h, one translation unit each.
#pragma once

#include "cpu/update_kernels.h"

namespace roundpipe::cpu {

namespace avx512 {
extern const UpdateKernels kUpdate;
}
namespace avx2 {
extern const UpdateKernels kUpdate;
}
namespace portable {
extern const UpdateKernels kUpdate;
}

}  // namespace roundpipe::cpu
