// One stretch of the process's address space: mapped, backed by pages, page-locked; given back by the destructor.
#pragma once

#include <cstddef>
#include <functional>

#include "core/backend.h"

namespace roundpipe {

// Calls body(begin, end) on disjoint pieces of [0, bytes), cut at 2 MiB, from a few threads when it is large.
void for_pieces_in_parallel(std::size_t bytes, const std::function<void(std::size_t, std::size_t)>& body);

class HostMapping {
 public:
  HostMapping() = default;
  // Anonymous zeroed memory at a 2 MiB boundary, exactly `bytes` long (a multiple of the page size), invisible to
  // forked children, and registered with `backend` (may be null) in pieces of at most `registration_bytes`. Throws
  // HostOutOfMemory, or what register_host threw; then nothing is left behind.
  HostMapping(Backend* backend, std::size_t bytes, bool huge_pages, std::size_t registration_bytes);
  HostMapping(HostMapping&& other) noexcept;
  HostMapping& operator=(HostMapping&& other) noexcept;
  ~HostMapping();

  std::byte* base() const noexcept { return base_; }
  std::size_t bytes() const noexcept { return bytes_; }
  std::size_t registered_bytes() const noexcept { return registered_bytes_; }
  // Gives up ownership for ever: for memory that a copy may still touch and nobody is left to ask.
  void leak() noexcept;

 private:
  void map(bool huge_pages);
  void populate();

  Backend* backend_ = nullptr;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t registration_bytes_ = 0;
  std::size_t registered_bytes_ = 0;
};

}  // namespace roundpipe
