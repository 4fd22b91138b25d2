// The few functions of the CUDA driver that we call, resolved at run time, so that one build serves machines with and
// without a GPU and the drivers of CUDA 12 and 13. The declarations are our own; the driver's ABI is stable.
#pragma once

#include <cstddef>
#include <string>

extern "C" {
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
}

namespace roundpipe::cuda {

using Result = int;
using DeviceOrdinal = int;
using ContextHandle = CUctx_st*;
using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using DevicePointer = unsigned long long;

// CUresult values that we tell apart.
inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;
// Ours: there was no driver to call.
inline constexpr Result kNoDriver = -1;

inline constexpr unsigned kHostRegisterPortable = 0x1;
inline constexpr int kPointerAttributeMemoryType = 2;
inline constexpr unsigned kMemoryTypeHost = 1;
inline constexpr unsigned kEventBlockingSync = 0x1;
inline constexpr unsigned kEventDisableTiming = 0x2;
inline constexpr unsigned kStreamNonBlocking = 0x1;

// X(member, exported name, parameters)
#define ROUNDPIPE_DRIVER_FUNCTIONS(X)                                                                \
  X(init, "cuInit", (unsigned))                                                                      \
  X(driver_get_version, "cuDriverGetVersion", (int*))                                                \
  X(get_error_name, "cuGetErrorName", (Result, const char**))                                        \
  X(get_error_string, "cuGetErrorString", (Result, const char**))                                    \
  X(device_get_count, "cuDeviceGetCount", (int*))                                                    \
  X(device_get, "cuDeviceGet", (DeviceOrdinal*, int))                                                \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", (ContextHandle*, DeviceOrdinal))             \
  X(context_get_current, "cuCtxGetCurrent", (ContextHandle*))                                        \
  X(context_set_current, "cuCtxSetCurrent", (ContextHandle))                                         \
  X(host_register, "cuMemHostRegister_v2", (void*, std::size_t, unsigned))                           \
  X(host_unregister, "cuMemHostUnregister", (void*))                                                 \
  X(pointer_get_attribute, "cuPointerGetAttribute", (void*, int, DevicePointer))                     \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (DevicePointer, const void*, std::size_t, StreamHandle)) \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, DevicePointer, std::size_t, StreamHandle))         \
  X(set_bytes, "cuMemsetD8Async", (DevicePointer, unsigned char, std::size_t, StreamHandle))         \
  X(stream_create, "cuStreamCreateWithPriority", (StreamHandle*, unsigned, int))                     \
  X(stream_destroy, "cuStreamDestroy_v2", (StreamHandle))                                            \
  X(stream_wait_event, "cuStreamWaitEvent", (StreamHandle, EventHandle, unsigned))                   \
  X(event_create, "cuEventCreate", (EventHandle*, unsigned))                                         \
  X(event_record, "cuEventRecord", (EventHandle, StreamHandle))                                      \
  X(event_query, "cuEventQuery", (EventHandle))                                                      \
  X(event_synchronize, "cuEventSynchronize", (EventHandle))                                          \
  X(event_destroy, "cuEventDestroy_v2", (EventHandle))

struct DriverApi {
#define ROUNDPIPE_DECLARE(member, name, parameters) Result(*member) parameters = nullptr;
  ROUNDPIPE_DRIVER_FUNCTIONS(ROUNDPIPE_DECLARE)
#undef ROUNDPIPE_DECLARE
};

// The loaded and initialised driver. Throws DriverError with the reason and the remedy; a failure is final for the
// process, as it is for the driver itself.
const DriverApi& driver_api();
int driver_device_count();  // after driver_api() succeeded once; CUDA_VISIBLE_DEVICES counts

// Resolves every function or throws DriverError saying what is missing. For driver_api() and its tests, which name
// libraries that are no driver.
DriverApi load_driver(const char* library);

// "cuEventQuery failed: CUDA_ERROR_... (number): the driver's words; context. remedy"
std::string describe_error(const DriverApi& api, const char* call, Result result, const std::string& context);
[[noreturn]] void throw_driver_error(const char* call, Result result, const std::string& context);

inline void check(const char* call, Result result, const std::string& context) {
  if (result != kSuccess) throw_driver_error(call, result, context);
}

}  // namespace roundpipe::cuda
