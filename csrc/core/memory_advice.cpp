#include "core/memory_advice.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

#include "core/memory_limits.h"

namespace roundpipe {
namespace {

#ifdef MADV_COLD
constexpr int kCold = MADV_COLD;
#else
constexpr int kCold = 20;  // Linux 5.4; an older kernel answers EINVAL
#endif
#ifdef MADV_POPULATE_READ
constexpr int kPopulateRead = MADV_POPULATE_READ;
#else
constexpr int kPopulateRead = 22;  // Linux 5.14; an older kernel answers EINVAL
#endif

void advise(const void* base, std::size_t bytes, int advice, bool whole_pages_only) noexcept {
  const auto page = static_cast<std::uintptr_t>(page_bytes());
  std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(base), end = begin + bytes;
  // What lies beside the range may be needed sooner than the range itself.
  begin = whole_pages_only ? (begin + page - 1) / page * page : begin / page * page;
  if (whole_pages_only) end = end / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

// Of one call the kernel reads no more than the larger of the file's read-ahead window (128 KiB unless it was changed)
// and the disk's largest request, and says nothing about the rest.
void advise_read_ahead(const void* base, std::size_t bytes) noexcept {
  constexpr std::size_t kCall = std::size_t{128} << 10;
  const auto* at = static_cast<const char*>(base);
  for (std::size_t done = 0; done < bytes; done += kCall) {
    advise(at + done, std::min(kCall, bytes - done), MADV_WILLNEED, false);
  }
}

// Not MADV_DONTNEED, which would throw away what was written to a private mapping: cold pages only go first.
void advise_drop_behind(const void* base, std::size_t bytes) noexcept { advise(base, bytes, kCold, true); }

// One call waits for the pages and maps them all; the copy alone would fault in a few of them at a time.
void advise_read_now(const void* base, std::size_t bytes) noexcept { advise(base, bytes, kPopulateRead, false); }

}  // namespace roundpipe
