// A happens-before race checker over declared byte ranges (vector clocks, FastTrack-style epochs).
//
// Note [What orders what]
//   An *actor* is anything that acts in order: a host thread, or a stream. A stream's operation starts after what the
//   enqueuing thread had done (join at enqueue) but the enqueuing thread never learns of its end except through an
//   event it synchronises with or a token someone released. So a compute stream is an actor of its own even where, as
//   on simulated devices, the compute runs on the calling thread: otherwise a forgotten event would look ordered there
//   and race on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"

namespace roundpipe {

class HappensBefore {
 public:
  using Actor = std::uint32_t;

  HappensBefore();
  ~HappensBefore();

  Actor add_actor(std::string name);
  Actor this_thread();  // the calling thread's actor, added on first use

  void join(Actor into, Actor from);  // all that `from` did so far happens before whatever `into` does next

  // A token (an event, a counter) collects the clocks of those who release it and gives them to those who acquire it.
  void release(const void* token, Actor from);
  void acquire(const void* token, Actor into);
  void forget_token(const void* token) noexcept;

  // A conflict (two accesses, one a write, neither ordered before the other) is reported, and remembered as reported.
  void access(Actor who, Access access, const void* range, std::size_t bytes, const char* what);
  // The range begins a new life: earlier accesses belong to memory that no longer exists.
  void fresh(const void* range, std::size_t bytes) noexcept;

  std::vector<std::string> take_reports();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace roundpipe
