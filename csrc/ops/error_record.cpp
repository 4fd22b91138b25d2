#include "ops/error_record.h"

#include <exception>
#include <new>
#include <stdexcept>

#include "core/errors.h"

namespace roundpipe::ops {
namespace {

// Operators do not nest, so one name a thread is enough.
thread_local const char* op_name = "";

[[noreturn]] void keep(const char* kind, std::int64_t number, const char* message) {
  std::string text = message;
  if (text.rfind("roundpipe::", 0) != 0) text = std::string("roundpipe::") + op_name + ": " + text;
  error_record() = ErrorRecord{kind, number, text};
  throw std::runtime_error(text);
}

}  // namespace

ErrorRecord& error_record() {
  thread_local ErrorRecord record;
  return record;
}

const char* current_op() { return op_name; }

void begin_op(const char* name) {
  op_name = name;
  error_record() = ErrorRecord{};
}

void fail_op() {
  try {
    throw;
  } catch (const InvalidArgument& error) {
    keep("InvalidArgument", 0, error.what());
  } catch (const Poisoned& error) {
    keep("Poisoned", 0, error.what());
  } catch (const DriverError& error) {
    keep("DriverError", error.code, error.what());
  } catch (const HostOutOfMemory& error) {
    keep("HostOutOfMemory", static_cast<std::int64_t>(error.asked_bytes), error.what());
  } catch (const DeviceOutOfMemory& error) {
    keep("DeviceOutOfMemory", static_cast<std::int64_t>(error.asked_bytes), error.what());
  } catch (const Error& error) {
    keep("Error", 0, error.what());
  } catch (const std::bad_alloc&) {
    keep("HostOutOfMemory", 0, "the C++ heap is exhausted");
  } catch (const std::exception& error) {
    keep("Internal", 0, error.what());
  } catch (...) {
    keep("Internal", 0, "an exception that is no std::exception");
  }
}

}  // namespace roundpipe::ops
