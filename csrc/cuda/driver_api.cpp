#include "cuda/driver_api.h"

#include <dlfcn.h>

#include "core/errors.h"

namespace roundpipe::cuda {
namespace {

constexpr int kOldestDriver = 12000;  // 1000 * major + 10 * minor, as cuDriverGetVersion counts

const char* remedy(Result result) {
  switch (result) {
    case kOutOfMemory:
      return "free memory on the GPU or the host, or end other processes that use the GPU";
    case 3:  // NOT_INITIALIZED
      return "the driver cannot be used in a process forked after CUDA was started; start workers by 'spawn'";
    case 4:  // DEINITIALIZED
      return "the process is exiting; finish GPU work before the interpreter shuts down";
    case 34:  // STUB_LIBRARY
      return "the library found is the toolkit's stub; take the directory of stubs out of LD_LIBRARY_PATH";
    case 36:   // CALL_REQUIRES_NEWER_DRIVER
    case 803:  // SYSTEM_DRIVER_MISMATCH
    case 804:  // COMPAT_NOT_SUPPORTED_ON_DEVICE
      return "the kernel driver and libcuda.so.1 do not match or are too old; update the NVIDIA driver, or take a CUDA "
             "compatibility directory out of LD_LIBRARY_PATH";
    case 46:  // DEVICE_UNAVAILABLE
      return "another process holds the GPU exclusively; end it or choose another GPU";
    case 100:  // NO_DEVICE
      return "no GPU is visible: look at CUDA_VISIBLE_DEVICES and nvidia-smi; in a container, give it the GPUs";
    case 101:  // INVALID_DEVICE
      return "ordinals count from 0 among the GPUs that CUDA_VISIBLE_DEVICES leaves visible";
    case 700:  // ILLEGAL_ADDRESS
    case 710:  // ASSERT
    case 719:  // LAUNCH_FAILED
      return "an earlier kernel or copy failed and the GPU's context is lost; restart the process, with "
             "CUDA_LAUNCH_BLOCKING=1 to see which";
    case 712:  // HOST_MEMORY_ALREADY_REGISTERED
      return "a part of the range is page-locked already, perhaps by pin_memory(); register each page once";
    case 802:  // SYSTEM_NOT_READY
      return "the system's GPU services are not up; start the fabric manager";
    default:
      return "nvidia-smi and the kernel log say more about the GPU's state";
  }
}

struct Loaded {
  DriverApi api;
  int devices = 0;
  Result result = kSuccess;
  std::string problem;  // empty: usable
};

Loaded load_and_initialise() {
  Loaded loaded;
  const auto fail = [&](const char* call, Result result) {
    loaded.result = result;
    loaded.problem = describe_error(loaded.api, call, result, "");
  };
  try {
    loaded.api = load_driver("libcuda.so.1");
  } catch (const DriverError& error) {
    loaded.result = error.code;
    loaded.problem = error.what();
    return loaded;
  }
  if (const Result result = loaded.api.init(0); result != kSuccess) {
    fail("cuInit", result);
    return loaded;
  }
  int version = 0;
  if (const Result result = loaded.api.driver_get_version(&version); result != kSuccess) {
    fail("cuDriverGetVersion", result);
    return loaded;
  }
  if (version < kOldestDriver) {
    loaded.result = 36;
    loaded.problem = "the NVIDIA driver supports CUDA " + std::to_string(version / 1000) + "." +
                     std::to_string(version % 1000 / 10) + ", but 12.0 is needed; update the driver";
    return loaded;
  }
  if (const Result result = loaded.api.device_get_count(&loaded.devices); result != kSuccess) {
    fail("cuDeviceGetCount", result);
  } else if (loaded.devices == 0) {
    fail("cuDeviceGetCount", 100);
  }
  return loaded;
}

const Loaded& loaded() {
  // Leaked on purpose, as is the handle from dlopen: objects of the interpreter are destroyed in any order at exit,
  // some after static destructors have run, and they still call through this table.
  static const Loaded* const instance = new Loaded(load_and_initialise());
  return *instance;
}

}  // namespace

DriverApi load_driver(const char* library) {
  // RTLD_GLOBAL as every other user of the driver in the process has it: they must share one driver.
  void* handle = dlopen(library, RTLD_NOW | RTLD_GLOBAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw DriverError(std::string("the CUDA driver cannot be loaded: ") +
                          (reason == nullptr ? "unknown reason" : reason) +
                          ". Install the NVIDIA driver (in a container, give it the GPUs), or use simulated devices",
                      kNoDriver);
  }
  DriverApi api;
  std::string missing;
#define ROUNDPIPE_RESOLVE(member, name, parameters)                         \
  api.member = reinterpret_cast<Result(*) parameters>(dlsym(handle, name)); \
  if (api.member == nullptr) missing += missing.empty() ? name : ", " name;
  ROUNDPIPE_DRIVER_FUNCTIONS(ROUNDPIPE_RESOLVE)
#undef ROUNDPIPE_RESOLVE
  if (!missing.empty()) {
    throw DriverError(std::string("the CUDA driver ") + library + " lacks " + missing +
                          "; it is too old or not a driver, install one that supports CUDA 12.0 or newer",
                      kNoDriver);
  }
  return api;
}

std::string describe_error(const DriverApi& api, const char* call, Result result, const std::string& context) {
  const char *name = nullptr, *text = nullptr;  // stay null for numbers the driver does not know
  api.get_error_name(result, &name);
  api.get_error_string(result, &text);
  return std::string(call) + " failed: " + (name == nullptr ? "unknown CUDA error" : name) + " (" +
         std::to_string(result) + "): " + (text == nullptr ? "no description" : text) +
         (context.empty() ? "" : "; " + context) + ". " + remedy(result);
}

void throw_driver_error(const char* call, Result result, const std::string& context) {
  throw DriverError(describe_error(loaded().api, call, result, context), result);
}

const DriverApi& driver_api() {
  const Loaded& driver = loaded();
  if (!driver.problem.empty()) throw DriverError(driver.problem, driver.result);
  return driver.api;
}

int driver_device_count() { return loaded().devices; }

}  // namespace roundpipe::cuda
