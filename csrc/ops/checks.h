// Argument checks of the operators. Each failure names the operator, the argument, what was expected and what came.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/activation_store.h"
#include "core/transfer_engine.h"
#include "ops/stable_abi.h"

namespace roundpipe::ops {

[[noreturn]] void refuse(const std::string& argument, const std::string& expected, const std::string& came);

std::string at(const char* argument, std::size_t index);  // "tensors[2]"
std::string describe(const Tensor& tensor);               // "Float[2, 3] on cpu"
std::size_t byte_count(const Tensor& tensor);

// Where a tensor has to be: host memory, or the memory of one device (which for simulated devices is host memory too).
struct Place {
  DeviceType type = DeviceType::CPU;
  std::int32_t index = 0;
};

void require_contiguous(const Tensor& tensor, const std::string& argument, const Place& place);
void require_bytes(const Tensor& tensor, const std::string& argument, const Place& place);  // and dtype uint8
void require_same_length(const char* argument, std::size_t came, const char* other, std::size_t expected);
std::chrono::milliseconds require_timeout(std::int64_t timeout_ms);
std::size_t require_index(const char* argument, std::int64_t index, std::size_t size);
Traffic require_traffic(std::int64_t traffic);

// The memory and the holders of a list of contiguous tensors at `place`.
struct HeldTensors {
  std::vector<DeviceBytes> ranges;
  std::shared_ptr<std::vector<Tensor>> tensors;
};
HeldTensors hold(const std::vector<Tensor>& tensors, const char* argument, const Place& place);

}  // namespace roundpipe::ops
