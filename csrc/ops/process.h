// Which process this is: a forked child inherits our memory but none of our threads, so it must not touch the engine.
#pragma once

#include <cstdint>

namespace roundpipe::ops {

// 0 in the process that loaded the library, one more in each generation of forked children.
std::uint32_t process_generation() noexcept;

// `renew` runs in every forked child before anything else of ours can.
void on_fork(void (*renew)());

// One T a process. Leaked on purpose: a static destructor would run while torch and the driver are being torn down. A
// forked child gets a fresh one, because the inherited one's lock may be held by a thread that the child does not have.
template <class T>
class PerProcess {
 public:
  static T& get() {
    static const bool registered = (renew(), on_fork(&renew), true);
    (void)registered;
    return *instance_;
  }

 private:
  static void renew() { instance_ = new T; }
  static inline T* instance_ = nullptr;
};

}  // namespace roundpipe::ops
