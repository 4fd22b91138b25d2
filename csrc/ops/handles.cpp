#include "ops/handles.h"

#include <utility>

#include "core/errors.h"
#include "ops/error_record.h"
#include "ops/process.h"

namespace roundpipe::ops {
namespace {

// 7 bits of kind, 24 of generation, 32 of index; the sign bit stays 0.
constexpr int kIndexBits = 32;
constexpr int kGenerationBits = 24;
constexpr std::uint32_t kLastGeneration = (1U << kGenerationBits) - 1;

std::int64_t pack(HandleKind kind, std::uint32_t generation, std::uint32_t index) {
  return static_cast<std::int64_t>((static_cast<std::uint64_t>(kind) << (kIndexBits + kGenerationBits)) |
                                   (static_cast<std::uint64_t>(generation) << kIndexBits) | index);
}

struct Unpacked {
  std::uint64_t kind;
  std::uint32_t generation;
  std::uint32_t index;
};

Unpacked unpack(std::int64_t handle) {
  const auto bits = static_cast<std::uint64_t>(handle);
  return {bits >> (kIndexBits + kGenerationBits), static_cast<std::uint32_t>(bits >> kIndexBits) & kLastGeneration,
          static_cast<std::uint32_t>(bits)};
}

[[noreturn]] void refuse(HandleKind expected, std::int64_t handle, const char* argument, bool stale) {
  std::string came;
  const std::uint64_t kind = unpack(handle).kind;
  const bool known =
      kind >= static_cast<std::uint64_t>(HandleKind::kEngine) && kind <= static_cast<std::uint64_t>(HandleKind::kPool);
  if (handle == 0) {
    came = "0, which is no handle";
  } else if (stale) {
    came = std::string("a stale handle: that ") + handle_kind_name(expected) +
           " has ended already, or belongs to the process that this one was forked from";
  } else if (known && kind != static_cast<std::uint64_t>(expected)) {
    came = std::string("a handle of a ") + handle_kind_name(static_cast<HandleKind>(kind));
  } else {
    came = "the number " + std::to_string(handle) + ", which no operator has returned";
  }
  throw InvalidArgument(std::string("roundpipe::") + current_op() + ": argument '" + argument +
                        "': expected the handle of a live " + handle_kind_name(expected) + ", got " + came +
                        "; pass what the operator that opened it returned, and not after it has ended");
}

}  // namespace

const char* handle_kind_name(HandleKind kind) {
  switch (kind) {
    case HandleKind::kEngine:
      return "engine";
    case HandleKind::kUnit:
      return "unit";
    case HandleKind::kTicket:
      return "ticket";
    case HandleKind::kJob:
      return "job";
    case HandleKind::kRecord:
      return "record";
    case HandleKind::kFetch:
      return "fetch";
    case HandleKind::kRecompute:
      return "recompute";
    case HandleKind::kTransit:
      return "data-plane copy";
    case HandleKind::kClaim:
      return "claim";
    case HandleKind::kPool:
      return "gradient pool";
  }
  return "unknown";
}

HandleRegistry::HandleRegistry() : first_generation_(1 + ((process_generation() % 64) << (kGenerationBits - 6))) {}

HandleRegistry& HandleRegistry::global() { return PerProcess<HandleRegistry>::get(); }

std::int64_t HandleRegistry::add_erased(HandleKind kind, std::shared_ptr<void> object) {
  std::lock_guard lock(mutex_);
  std::uint32_t index;
  if (free_.empty()) {
    index = static_cast<std::uint32_t>(slots_.size());
    slots_.push_back(Slot{kind, first_generation_, nullptr});
  } else {
    index = free_.back();
    free_.pop_back();
  }
  Slot& slot = slots_[index];
  slot.kind = kind;
  slot.object = std::move(object);
  return pack(kind, slot.generation, index);
}

std::shared_ptr<void> HandleRegistry::end_locked(std::uint32_t index) {
  Slot& slot = slots_[index];
  std::shared_ptr<void> object = std::move(slot.object);
  slot.object = nullptr;
  // A slot whose generations are used up is never used again: no handle can come to life a second time.
  if (slot.generation < kLastGeneration) {
    ++slot.generation;
    free_.push_back(index);
  }
  return object;
}

std::shared_ptr<void> HandleRegistry::find_erased(HandleKind kind, std::int64_t handle, const char* argument, bool end,
                                                  bool stale_is_null) {
  const Unpacked parts = unpack(handle);
  bool stale = false;
  {
    std::lock_guard lock(mutex_);
    if (handle > 0 && parts.kind == static_cast<std::uint64_t>(kind)) {
      if (parts.index < slots_.size()) {
        const Slot& slot = slots_[parts.index];
        if (slot.object && slot.kind == kind && slot.generation == parts.generation) {
          return end ? end_locked(parts.index) : slot.object;
        }
      }
      stale = true;
    }
  }
  if (stale && stale_is_null) return nullptr;
  refuse(kind, handle, argument, stale);
}

std::vector<std::shared_ptr<void>> HandleRegistry::all_erased(HandleKind kind) {
  std::vector<std::shared_ptr<void>> objects;
  std::lock_guard lock(mutex_);
  for (const Slot& slot : slots_) {
    if (slot.object && slot.kind == kind) objects.push_back(slot.object);
  }
  return objects;
}

void HandleRegistry::forget_if_live(std::int64_t handle) noexcept {
  const Unpacked parts = unpack(handle);
  std::shared_ptr<void> object;  // dies after the lock is released
  std::lock_guard lock(mutex_);
  if (handle <= 0 || parts.index >= slots_.size()) return;
  const Slot& slot = slots_[parts.index];
  if (slot.object && static_cast<std::uint64_t>(slot.kind) == parts.kind && slot.generation == parts.generation) {
    object = end_locked(parts.index);
  }
}

}  // namespace roundpipe::ops
