// What every backend asks of its arguments before it acts.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"

namespace roundpipe {

inline constexpr std::size_t kMaxRegisteredBytes = std::size_t{64} << 30;

inline void require_registrable(const void* base, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(base);
  RP_REQUIRE(base != nullptr && bytes > 0 && bytes <= kMaxRegisteredBytes,
             "register_host: " + std::to_string(bytes) + " bytes at " + (base == nullptr ? "null" : "an address") +
                 "; pass memory of 1 byte to 64 GiB, larger ranges in pieces");
  RP_REQUIRE(begin % page == 0 && bytes % page == 0, "register_host: address modulo page size is " +
                                                         std::to_string(begin % page) + ", bytes modulo page size is " +
                                                         std::to_string(bytes % page) + "; both must be 0 (page size " +
                                                         std::to_string(page) + ")");
}

inline void require_memory(const char* operation, const char* argument, const void* range) {
  RP_REQUIRE(range != nullptr,
             std::string(operation) + ": " + argument + " is null but the size is not 0; pass memory of that size");
}

}  // namespace roundpipe
