// The rows of the table of convert.h, one translation unit each.
#pragma once

#include "cpu/convert.h"

namespace roundpipe::cpu {

namespace avx512 {
extern const ConvertKernels kConvert;
}
namespace avx2 {
extern const ConvertKernels kConvert;
}
namespace portable {
extern const ConvertKernels kConvert;
}

}  // namespace roundpipe::cpu
