// The core's whole error vocabulary. csrc/ops turns each into the Python exception of the same meaning.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace roundpipe {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct InvalidArgument : Error {  // the caller's mistake
  using Error::Error;
};
struct Poisoned : Error {  // something this operation depends on has failed; the first failure carries the reason
  using Error::Error;
};
struct DriverError : Error {  // a CUDA driver call failed
  DriverError(std::string message, int code_) : Error(std::move(message)), code(code_) {}
  int code;
};
struct HostOutOfMemory : Error {
  HostOutOfMemory(std::string message, std::size_t asked) : Error(std::move(message)), asked_bytes(asked) {}
  std::size_t asked_bytes;
};
struct DeviceOutOfMemory : Error {
  DeviceOutOfMemory(std::string message, std::size_t asked) : Error(std::move(message)), asked_bytes(asked) {}
  std::size_t asked_bytes;
};

}  // namespace roundpipe

#define RP_REQUIRE(condition, message)                             \
  do {                                                             \
    if (!(condition)) throw ::roundpipe::InvalidArgument(message); \
  } while (0)
