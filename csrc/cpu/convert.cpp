#include "cpu/convert.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>
#include <string_view>

#include "core/errors.h"
#include "cpu/convert_isas.h"

namespace roundpipe::cpu {
namespace {

// Set by force_isa(), read by every thread that converts; null: automatic.
std::atomic<const ConvertKernels*> forced{nullptr};

const ConvertKernels& find_supported(std::string_view isa, const char* who) {
  std::string supported;
  for (const ConvertKernels& kernels : convert_kernels()) {
    if (!kernels.supported()) continue;
    if (isa == kernels.isa) return kernels;
    supported += (supported.empty() ? "" : ", ") + std::string(kernels.isa);
  }
  throw InvalidArgument(std::string(who) + ": instruction set \"" + std::string(isa) +
                        "\" is unknown or this processor lacks it, expected one of: " + supported);
}

const ConvertKernels& detect() {
  const char* named = std::getenv("ROUNDPIPE_ISA");
  if (named != nullptr && *named != '\0') return find_supported(named, "ROUNDPIPE_ISA");
  for (const ConvertKernels& kernels : convert_kernels()) {
    if (kernels.supported()) return kernels;
  }
  return portable::kConvert;
}

}  // namespace

std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

std::span<const ConvertKernels> convert_kernels() {
  // Copies made at first use: the rows are constants of other translation units.
  static const std::array table{
#if defined(__x86_64__)
      avx512::kConvert, avx2::kConvert,
#endif
      portable::kConvert};
  return table;
}

const ConvertKernels& active_convert_kernels() {
  if (const ConvertKernels* kernels = forced.load(std::memory_order_acquire)) return *kernels;
  static const ConvertKernels& detected = detect();
  return detected;
}

void force_isa(const char* isa) {
  forced.store(isa == nullptr ? nullptr : &find_supported(isa, "force_isa"), std::memory_order_release);
}

}  // namespace roundpipe::cpu
