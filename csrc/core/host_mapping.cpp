#include "core/host_mapping.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/memory_limits.h"
#include "core/pin_limits.h"

namespace roundpipe {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kBytesPerThread = std::size_t{32} << 20;  // below it a thread costs more than it saves
constexpr std::size_t kMaxThreads = 8;                          // page faults stop scaling about here
#ifdef MADV_POPULATE_WRITE
constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
constexpr int kPopulateWrite = 23;  // Linux 5.14; an older kernel answers EINVAL
#endif

}  // namespace

void for_pieces_in_parallel(std::size_t bytes, const std::function<void(std::size_t, std::size_t)>& body) {
  const std::size_t hardware = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t count = std::max<std::size_t>(1, std::min({kMaxThreads, hardware, bytes / kBytesPerThread}));
  const std::size_t piece = (bytes / count + kHugePage - 1) / kHugePage * kHugePage;
  std::size_t begin = 0;
  {
    std::vector<std::jthread> helpers;
    while (count > 1 && bytes - begin > piece) {
      try {
        helpers.emplace_back([&body, begin, piece] { body(begin, begin + piece); });
      } catch (const std::system_error&) {
        break;  // no more threads to be had: the caller does the rest
      }
      begin += piece;
    }
    body(begin, bytes);
  }
}

HostMapping::HostMapping(Backend* backend, std::size_t bytes, bool huge_pages, std::size_t registration_bytes)
    : HostMapping() {  // delegating, so that a throw below runs the destructor
  const std::size_t page = page_bytes();
  RP_REQUIRE(bytes != 0 && bytes % page == 0, "HostMapping: bytes is " + std::to_string(bytes) +
                                                  ", expected a positive multiple of the page size " +
                                                  std::to_string(page));
  RP_REQUIRE(registration_bytes != 0 && registration_bytes % page == 0,
             "HostMapping: registration_bytes is " + std::to_string(registration_bytes) +
                 ", expected a positive multiple of the page size " + std::to_string(page));
  bytes_ = bytes;
  backend_ = backend;
  registration_bytes_ = registration_bytes;
  map(huge_pages);
  // Registration would fault the pages in one by one on one thread; doing it first, in parallel and by huge pages,
  // halves the time. Without a backend it still makes the kernel's accounting true, so that the next check of available
  // memory sees what was promised already.
  populate();
  if (backend_ == nullptr) return;
  while (registered_bytes_ < bytes_) {
    const std::size_t piece = std::min(registration_bytes_, bytes_ - registered_bytes_);
    backend_->register_host(base_ + registered_bytes_, piece);
    registered_bytes_ += piece;
    note_locked(piece);
  }
}

void HostMapping::map(bool huge_pages) {
  // Over-reserve address space to find a 2 MiB boundary, then cut both ends off: the size itself stays exact.
  const std::size_t span = bytes_ + kHugePage;
  void* raw = span < bytes_
                  ? MAP_FAILED
                  : mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    const std::string reason = span < bytes_ ? "address space too small" : std::strerror(errno);
    throw HostOutOfMemory("host memory: mmap of " + format_bytes(bytes_) + " (" + std::to_string(bytes_) +
                              " bytes) failed: " + reason + "; " + read_memory_limits().describe() +
                              "; free memory, or look at `ulimit -v` and vm.overcommit_memory",
                          bytes_);
  }
  const auto start = reinterpret_cast<std::uintptr_t>(raw);
  const std::uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned != start) munmap(raw, aligned - start);
  const std::size_t tail = start + span - (aligned + bytes_);
  if (tail != 0) munmap(reinterpret_cast<void*>(aligned + bytes_), tail);
  base_ = reinterpret_cast<std::byte*>(aligned);
  // Both are improvements that a kernel may refuse (no THP, a sandbox); the memory works without.
  if (huge_pages) madvise(base_, bytes_, MADV_HUGEPAGE);
  // Otherwise fork() copies pinned pages at once: seconds, and the memory twice.
  madvise(base_, bytes_, MADV_DONTFORK);
}

void HostMapping::populate() {
  for_pieces_in_parallel(bytes_, [this](std::size_t begin, std::size_t end) {
    if (madvise(base_ + begin, end - begin, kPopulateWrite) == 0) return;
    const std::size_t page = page_bytes();
    for (std::size_t offset = begin; offset < end; offset += page) {
      *static_cast<volatile std::byte*>(base_ + offset) = std::byte{0};
    }
  });
}

HostMapping::HostMapping(HostMapping&& other) noexcept { *this = std::move(other); }

HostMapping& HostMapping::operator=(HostMapping&& other) noexcept {
  std::swap(backend_, other.backend_);
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  std::swap(registration_bytes_, other.registration_bytes_);
  std::swap(registered_bytes_, other.registered_bytes_);
  return *this;
}

HostMapping::~HostMapping() {
  if (base_ == nullptr) return;
  for (std::size_t offset = 0; offset < registered_bytes_; offset += registration_bytes_) {
    backend_->unregister_host(base_ + offset);
  }
  note_unlocked(registered_bytes_);
  munmap(base_, bytes_);
}

void HostMapping::leak() noexcept { base_ = nullptr; }

}  // namespace roundpipe
