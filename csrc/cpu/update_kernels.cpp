#include "cpu/update_kernels.h"

#include <array>
#include <string_view>

#include "cpu/convert.h"
#include "cpu/update_isas.h"

namespace roundpipe::cpu {

std::span<const UpdateKernels> update_kernels() {
  // Copies made at first use: the rows are constants of other translation units.
  static const std::array table{
#if defined(__x86_64__)
      avx512::kUpdate, avx2::kUpdate,
#endif
      portable::kUpdate};
  return table;
}

const UpdateKernels& active_update_kernels() {
  const std::string_view isa = active_convert_kernels().isa;
  for (const UpdateKernels& kernels : update_kernels()) {
    if (isa == kernels.isa) return kernels;
  }
  return update_kernels().back();  // not reached: both tables have the same rows
}

}  // namespace roundpipe::cpu
