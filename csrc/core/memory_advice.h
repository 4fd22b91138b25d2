// What the kernel is told about mapped memory. Advice: its refusal changes nothing.
#pragma once

#include <cstddef>

namespace roundpipe {

void advise_read_ahead(const void* base, std::size_t bytes) noexcept;   // will be read soon
void advise_read_now(const void* base, std::size_t bytes) noexcept;     // is read at once
void advise_drop_behind(const void* base, std::size_t bytes) noexcept;  // will not be read again

}  // namespace roundpipe
