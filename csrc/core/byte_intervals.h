// An ordered map from disjoint byte ranges to values, split at any address on demand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

namespace roundpipe {

template <class Value>
class ByteIntervals {
 public:
  using Address = std::uintptr_t;

  // Calls visit(Value&) for every piece of [begin, end); pieces never seen before start as Value{}. Pieces that are
  // equal and adjacent afterwards become one, so that repeated use of one range costs one piece.
  template <class Visit>
  void update(Address begin, Address end, Visit&& visit) {
    if (begin >= end) return;
    split(begin);
    split(end);
    fill_gaps(begin, end);
    for (auto it = pieces_.find(begin); it != pieces_.end() && it->first < end; ++it) visit(it->second.value);
    merge(begin, end);
  }

  // Forgets [begin, end). When there is no memory to split a piece at the border, the whole piece is forgotten.
  void erase(Address begin, Address end) noexcept {
    if (begin >= end) return;
    try {
      split(begin);
      split(end);
    } catch (...) {
    }
    auto it = pieces_.upper_bound(begin);
    if (it != pieces_.begin() && std::prev(it)->second.end > begin) --it;
    while (it != pieces_.end() && it->first < end) it = pieces_.erase(it);
  }

  std::size_t size() const noexcept { return pieces_.size(); }

 private:
  struct Piece {
    Address end;
    Value value;
  };

  void split(Address at) {
    auto it = pieces_.lower_bound(at);
    if (it == pieces_.begin()) return;
    --it;
    if (it->second.end <= at) return;
    pieces_.emplace_hint(std::next(it), at, Piece{it->second.end, it->second.value});
    it->second.end = at;
  }

  void fill_gaps(Address begin, Address end) {
    Address at = begin;
    auto it = pieces_.lower_bound(begin);
    while (at < end) {
      const Address next = it == pieces_.end() || it->first > end ? end : it->first;
      if (at < next) pieces_.emplace_hint(it, at, Piece{next, Value{}});
      if (it == pieces_.end() || it->first >= end) return;
      at = it->second.end;
      ++it;
    }
  }

  void merge(Address begin, Address end) {
    auto it = pieces_.find(begin);
    for (auto next = std::next(it); next != pieces_.end() && next->first < end;) {
      if (it->second.value == next->second.value) {
        it->second.end = next->second.end;
        next = pieces_.erase(next);
      } else {
        it = next++;
      }
    }
  }

  std::map<Address, Piece> pieces_;  // by first address; disjoint
};

}  // namespace roundpipe
