// GPUs through the CUDA driver API resolved at run time: needs neither nvcc nor a toolkit nor headers to build, and
// works with the drivers of CUDA 12 and 13.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"

namespace roundpipe {

// `ordinals` are the driver's device numbers after CUDA_VISIBLE_DEVICES. Throws DriverError with the failing call, its
// name and number, and the remedy; never limps on.
std::unique_ptr<Backend> make_cuda_backend(const std::vector<int>& ordinals);

// Whether a driver could be loaded at all; the reason if not. Never throws.
bool cuda_driver_available(std::string* why_not) noexcept;

}  // namespace roundpipe
