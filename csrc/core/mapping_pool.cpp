#include "core/mapping_pool.h"

#include <iterator>

namespace roundpipe {

std::byte* MappingPool::take_pooled(std::size_t bytes) {
  const auto best = ranges_by_size_.lower_bound({bytes, nullptr});
  if (best == ranges_by_size_.end()) return nullptr;
  const auto [range_bytes, data] = *best;
  erase_range(free_ranges_.find(data));
  if (range_bytes > bytes) insert_range(data + bytes, range_bytes - bytes);
  hand_out(mapping_of(data), bytes);
  return data;
}

std::byte* MappingPool::take_dedicated(std::size_t bytes) {
  const auto best = dedicated_by_size_.lower_bound({bytes, nullptr});
  if (best == dedicated_by_size_.end() || best->first - bytes > bytes / 8) return nullptr;
  std::byte* data = best->second;
  hand_out(mapping_of(data), bytes);
  return data;
}

std::byte* MappingPool::add(HostMapping memory, bool pooled, std::size_t bytes) {
  std::byte* base = memory.base();
  const std::size_t mapping_bytes = memory.bytes();
  reserved_bytes_ += mapping_bytes;
  registered_bytes_ += memory.registered_bytes();
  const auto at = mappings_.emplace(base, Mapping{std::move(memory), pooled, 0, 0}).first;
  if (pooled && mapping_bytes > bytes) insert_range(base + bytes, mapping_bytes - bytes);
  hand_out(at, bytes);
  return base;
}

void MappingPool::give_back(std::byte* data, std::size_t bytes) {
  const auto at = mapping_of(data);
  at->second.live_bytes -= bytes;
  if (at->second.pooled) coalesce(data, bytes, at);
  if (at->second.live_bytes == 0) begin_idle(at);
}

HostMapping MappingPool::detach_idle(std::size_t keep) {
  if (idle_bytes_ <= keep) return {};
  auto at = mappings_.find(std::prev(idle_.end())->second);
  if (at->second.memory.bytes() <= keep) at = mappings_.find(idle_.begin()->second);
  end_idle(at);
  if (at->second.pooled) erase_range(free_ranges_.find(at->first));  // idle: one range, the whole of it
  reserved_bytes_ -= at->second.memory.bytes();
  registered_bytes_ -= at->second.memory.registered_bytes();
  HostMapping memory = std::move(at->second.memory);
  mappings_.erase(at);
  return memory;
}

void MappingPool::leak_live() noexcept {
  for (auto& [base, mapping] : mappings_) {
    if (mapping.live_bytes != 0) mapping.memory.leak();
  }
}

void MappingPool::insert_range(std::byte* base, std::size_t bytes) {
  free_ranges_.emplace(base, bytes);
  ranges_by_size_.emplace(bytes, base);
}

void MappingPool::erase_range(Ranges::iterator range) {
  ranges_by_size_.erase({range->second, range->first});
  free_ranges_.erase(range);
}

void MappingPool::coalesce(std::byte* data, std::size_t bytes, Mappings::iterator at) {
  // Neighbouring mappings may touch, but they are given back one by one: no range reaches over a mapping's end.
  const auto next = free_ranges_.lower_bound(data);
  if (next != free_ranges_.end() && next->first == data + bytes &&
      next->first != at->first + at->second.memory.bytes()) {
    bytes += next->second;
    erase_range(next);
  }
  const auto after = free_ranges_.lower_bound(data);
  if (after != free_ranges_.begin()) {
    const auto previous = std::prev(after);
    if (previous->first >= at->first && previous->first + previous->second == data) {
      data = previous->first;
      bytes += previous->second;
      erase_range(previous);
    }
  }
  insert_range(data, bytes);
}

void MappingPool::begin_idle(Mappings::iterator at) {
  at->second.idle_since = ++idle_clock_;
  idle_.emplace(idle_clock_, at->first);
  idle_bytes_ += at->second.memory.bytes();
  if (!at->second.pooled) dedicated_by_size_.emplace(at->second.memory.bytes(), at->first);
}

void MappingPool::end_idle(Mappings::iterator at) {
  if (at->second.idle_since == 0) return;
  idle_.erase(at->second.idle_since);
  at->second.idle_since = 0;
  idle_bytes_ -= at->second.memory.bytes();
  dedicated_by_size_.erase({at->second.memory.bytes(), at->first});
}

void MappingPool::hand_out(Mappings::iterator at, std::size_t bytes) {
  end_idle(at);
  at->second.live_bytes += bytes;
}

}  // namespace roundpipe
