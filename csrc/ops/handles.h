// Integers that Python holds in place of our objects. A handle packs a type tag, a generation and an index, so a handle
// of another kind, one that has ended, one of another process and any stray number are all refused with a reason.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace roundpipe::ops {

enum class HandleKind : std::uint8_t {
  kEngine = 1,
  kUnit,
  kTicket,
  kJob,
  kRecord,
  kFetch,
  kRecompute,
  kTransit,
  kClaim,
  kPool
};
const char* handle_kind_name(HandleKind kind);

class HandleRegistry {
 public:
  HandleRegistry();
  static HandleRegistry& global();

  // Every T here has a member `static constexpr HandleKind kHandleKind`.
  template <class T>
  std::int64_t add(std::shared_ptr<T> object) {
    return add_erased(T::kHandleKind, std::move(object));
  }
  // Both throw InvalidArgument naming the argument, the kind expected and what came. `take` also ends the handle.
  template <class T>
  std::shared_ptr<T> get(std::int64_t handle, const char* argument) {
    return std::static_pointer_cast<T>(find_erased(T::kHandleKind, handle, argument, false));
  }
  template <class T>
  std::shared_ptr<T> take(std::int64_t handle, const char* argument) {
    return std::static_pointer_cast<T>(find_erased(T::kHandleKind, handle, argument, true));
  }
  // Null where a T has ended; still refuses what was never a handle of a T.
  template <class T>
  std::shared_ptr<T> get_if_live(std::int64_t handle, const char* argument) {
    return std::static_pointer_cast<T>(find_erased(T::kHandleKind, handle, argument, false, /*stale_is_null=*/true));
  }
  template <class T>
  std::shared_ptr<T> take_if_live(std::int64_t handle, const char* argument) {
    return std::static_pointer_cast<T>(find_erased(T::kHandleKind, handle, argument, true, /*stale_is_null=*/true));
  }
  template <class T>
  std::vector<std::shared_ptr<T>> all() {
    std::vector<std::shared_ptr<T>> objects;
    for (auto& object : all_erased(T::kHandleKind)) objects.push_back(std::static_pointer_cast<T>(object));
    return objects;
  }
  void forget_if_live(std::int64_t handle) noexcept;

 private:
  struct Slot {
    HandleKind kind{};
    std::uint32_t generation = 0;  // of the present object, or of the next one while empty
    std::shared_ptr<void> object;
  };
  std::int64_t add_erased(HandleKind kind, std::shared_ptr<void> object);
  std::shared_ptr<void> find_erased(HandleKind kind, std::int64_t handle, const char* argument, bool end,
                                    bool stale_is_null = false);
  std::vector<std::shared_ptr<void>> all_erased(HandleKind kind);
  std::shared_ptr<void> end_locked(std::uint32_t index);

  std::mutex mutex_;  // guards everything below; never held while an object dies
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_;
  const std::uint32_t first_generation_;  // differs in a forked child, so that inherited handles are stale there
};

}  // namespace roundpipe::ops
