#include "ops/checks.h"

#include <memory>

#include "core/errors.h"
#include "ops/error_record.h"

namespace roundpipe::ops {
namespace {

std::string place_name(DeviceType type, std::int32_t index) {
  switch (type) {
    case DeviceType::CPU:
      return "cpu";
    case DeviceType::CUDA:
      return "cuda:" + std::to_string(index);
    case DeviceType::Meta:
      return "meta";
    default:
      return "device type " + std::to_string(static_cast<int>(type));
  }
}

bool dense(const Tensor& tensor) { return tensor.defined() && tensor.layout() == Layout::Strided; }

bool is_at(const Tensor& tensor, const Place& place) {
  const auto device = tensor.device();
  return device.type() == place.type && (place.type == DeviceType::CPU || device.index() == place.index);
}

}  // namespace

void refuse(const std::string& argument, const std::string& expected, const std::string& came) {
  throw InvalidArgument(std::string("roundpipe::") + current_op() + ": argument '" + argument + "': expected " +
                        expected + ", got " + came);
}

std::string at(const char* argument, std::size_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

std::string describe(const Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  const auto device = tensor.device();
  std::string text = torch::headeronly::toString(tensor.scalar_type());
  if (tensor.layout() != Layout::Strided) return "a sparse " + text + " tensor";
  text += "[";
  for (std::int64_t i = 0; i < tensor.dim(); ++i) text += (i ? ", " : "") + std::to_string(tensor.size(i));
  text += "] on " + place_name(device.type(), device.index());
  return tensor.is_contiguous() ? text : "a non-contiguous " + text;
}

std::size_t byte_count(const Tensor& tensor) {
  return static_cast<std::size_t>(tensor.numel()) * tensor.element_size();
}

void require_contiguous(const Tensor& tensor, const std::string& argument, const Place& place) {
  if (!dense(tensor) || !tensor.is_contiguous() || !is_at(tensor, place)) {
    refuse(argument, "a contiguous tensor on " + place_name(place.type, place.index), describe(tensor));
  }
}

void require_bytes(const Tensor& tensor, const std::string& argument, const Place& place) {
  if (!dense(tensor) || !tensor.is_contiguous() || !is_at(tensor, place) || tensor.scalar_type() != ScalarType::Byte) {
    refuse(argument, "a contiguous uint8 tensor on " + place_name(place.type, place.index), describe(tensor));
  }
}

void require_same_length(const char* argument, std::size_t came, const char* other, std::size_t expected) {
  if (came != expected) {
    refuse(argument, std::to_string(expected) + " elements, one for each of '" + other + "'", std::to_string(came));
  }
}

std::chrono::milliseconds require_timeout(std::int64_t timeout_ms) {
  // The upper bound keeps deadline arithmetic of any clock from overflowing; it is more than a year.
  if (timeout_ms < 0 || timeout_ms > 40'000'000'000) {
    refuse("timeout_ms", "0 to 40000000000 milliseconds", std::to_string(timeout_ms));
  }
  return std::chrono::milliseconds(timeout_ms);
}

std::size_t require_index(const char* argument, std::int64_t index, std::size_t size) {
  if (index < 0 || static_cast<std::uint64_t>(index) >= size) {
    refuse(argument, "an index from 0 to " + std::to_string(size) + " (exclusive)", std::to_string(index));
  }
  return static_cast<std::size_t>(index);
}

Traffic require_traffic(std::int64_t traffic) {
  return static_cast<Traffic>(require_index("traffic", traffic, kTrafficKinds));
}

HeldTensors hold(const std::vector<Tensor>& tensors, const char* argument, const Place& place) {
  HeldTensors held{{}, std::make_shared<std::vector<Tensor>>()};
  held.ranges.reserve(tensors.size());
  held.tensors->reserve(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    require_contiguous(tensors[i], at(argument, i), place);
    held.ranges.push_back({tensors[i].mutable_data_ptr(), byte_count(tensors[i])});
    held.tensors->push_back(detached(tensors[i]));
  }
  return held;
}

}  // namespace roundpipe::ops
