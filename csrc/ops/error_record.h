// What went wrong in the calling thread's last operator, kept for Python: an exception that crosses the operator
// boundary arrives there as a plain RuntimeError, and error_take() says which kind it was.
#pragma once

#include <cstdint>
#include <string>

namespace roundpipe::ops {

struct ErrorRecord {
  std::string kind;  // class name in core/errors.h, or "Internal"; empty: no failure
  std::int64_t number = 0;
  std::string message;
};

ErrorRecord& error_record();      // of the calling thread
const char* current_op();         // name of the operator that the calling thread is in
void begin_op(const char* name);  // forgets the previous failure
[[noreturn]] void fail_op();      // inside a catch block: records the exception and throws std::runtime_error

}  // namespace roundpipe::ops
