// offload_*, reload_*, data_plane_*: copies that autograd and the compiler can see. See Note [Data plane].
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/happens_before.h"
#include "core/host_backend.h"
#include "ops/arenas.h"
#include "ops/data_plane.h"
#include "ops/guard.h"
#include "ops/handles.h"
#include "ops/process.h"

namespace roundpipe::ops {
namespace {

using TorchDevice = torch::stable::Device;
using Integers = std::vector<std::int64_t>;

struct Transit {
  static constexpr HandleKind kHandleKind = HandleKind::kTransit;
  std::shared_ptr<DataRoom> room;  // declared first, destroyed last: the others need its backend
  Direction direction{};
  Integers sizes, strides;
  ScalarType dtype{};
  std::shared_ptr<Record> record;  // down
  std::shared_ptr<Handover> up;
  std::shared_ptr<Tensor> target;  // up
};

struct TicketCell {
  std::int64_t handle;
  std::uint32_t born;
};

Tensor make_ticket(std::shared_ptr<Transit> transit) {
  auto* cell = new TicketCell{HandleRegistry::global().add(std::move(transit)), process_generation()};
  return host_tensor(&cell->handle, {}, {}, ScalarType::Long, [cell](void*) {
    if (process_generation() == cell->born) HandleRegistry::global().forget_if_live(cell->handle);
    delete cell;
  });
}

std::int64_t handle_of(const Tensor& ticket) {
  require_contiguous(ticket, "ticket", Place{});
  if (ticket.scalar_type() != ScalarType::Long || ticket.numel() != 1) {
    refuse("ticket", "the int64 tensor of one element that the start returned", describe(ticket));
  }
  return *static_cast<const std::int64_t*>(ticket.const_data_ptr());
}

Integers sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }
Integers strides_of(const Tensor& tensor) { return {tensor.strides().begin(), tensor.strides().end()}; }

// As torch decides whether empty_like keeps the strides: every element once, and no gaps.
bool is_dense(const Tensor& tensor) {
  const Integers sizes = sizes_of(tensor), strides = strides_of(tensor);
  std::vector<std::size_t> order(sizes.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (sizes[a] < 2 || sizes[b] < 2) return sizes[a] >= 2 && sizes[b] < 2;
    return strides[a] < strides[b];
  });
  std::int64_t expected = 1;
  for (const std::size_t i : order) {
    if (sizes[i] < 2) return true;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

// An object of our own with the elements of `tensor` in one piece of memory, strides as empty_like gives them.
Tensor dense(const Tensor& tensor) {
  Tensor own = detached(tensor);
  if (is_dense(own)) return own;
  Tensor copy = torch::stable::empty_like(own);
  torch::stable::copy_(copy, own);
  return copy;
}

Tensor empty_strided(const Integers& sizes, const Integers& strides, ScalarType dtype, const Place& place) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(Sizes(sizes.data(), sizes.size())),
                                    from(Sizes(strides.data(), strides.size())),
                                    from(std::optional<ScalarType>(dtype)),
                                    from(std::optional<Layout>()),
                                    from(std::optional<TorchDevice>(TorchDevice(place.type, place.index))),
                                    from(std::optional<bool>())};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_strided", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

void require_strided(const Tensor& tensor, const char* argument) {
  if (!tensor.defined() || tensor.layout() != Layout::Strided) {
    refuse(argument, "a tensor of strided layout", describe(tensor));
  }
}

Place place_of(const Tensor& tensor, const char* argument) {
  require_strided(tensor, argument);
  const auto device = tensor.device();
  if (device.type() != DeviceType::CPU && device.type() != DeviceType::CUDA) {
    refuse(argument, "a tensor on the CPU or a CUDA device", describe(tensor));
  }
  return {device.type(), device.type() == DeviceType::CPU ? 0 : device.index()};
}

Place place_of(const TorchDevice& device) {
  if (device.type() == DeviceType::CPU) return {};
  if (device.type() != DeviceType::CUDA) {
    refuse("device", "the CPU or a CUDA device", "a device of type " + std::to_string(static_cast<int>(device.type())));
  }
  const bool unnamed = device.index() < 0;
  return {DeviceType::CUDA, unnamed ? torch::stable::accelerator::getCurrentDeviceIndex() : device.index()};
}

// Host memory that an upload reads: on the CPU, and strided.
void require_host(const Tensor& host) {
  require_strided(host, "host");
  if (host.device().type() != DeviceType::CPU) refuse("host", "a tensor on the CPU", describe(host));
}

std::shared_ptr<Transit> begin(const Place& place, Direction direction, const Tensor& source) {
  auto transit = std::make_shared<Transit>();
  transit->room = DataPlane::global().room(place);
  transit->direction = direction;
  transit->sizes = sizes_of(source);
  transit->strides = strides_of(source);
  transit->dtype = source.scalar_type();
  return transit;
}

std::shared_ptr<Transit> start_offload(const Tensor& x, const Place& place) {
  auto held = std::make_shared<Tensor>(dense(x));
  auto transit = begin(place, Direction::kDeviceToHost, *held);
  DataRoom& room = *transit->room;
  const DeviceBytes source{const_cast<void*>(held->const_data_ptr()), byte_count(*held)};
  transit->record = room.store->stash(*room.device, *room.transfers, *room.compute(), {source}, Traffic::kActivations,
                                      std::move(held));
  return transit;
}

std::shared_ptr<Transit> start_reload(const Tensor& host, const Place& place) {
  const Tensor source = dense(host);
  auto transit = begin(place, Direction::kHostToDevice, source);
  DataRoom& room = *transit->room;
  transit->target = std::make_shared<Tensor>(empty_strided(transit->sizes, transit->strides, transit->dtype, place));
  const DeviceBytes bytes{transit->target->mutable_data_ptr(), byte_count(*transit->target)};
  auto held = std::make_shared<std::pair<Tensor, std::shared_ptr<Tensor>>>(source, transit->target);
  transit->up = room.store->upload(*room.device, *room.transfers, *room.compute(), source.const_data_ptr(), bytes,
                                   Traffic::kActivations, std::move(held));
  return transit;
}

void require_same(const Transit& transit, Direction direction, const Place& place, const Tensor& argument,
                  const char* name) {
  const bool same = transit.direction == direction && transit.sizes == sizes_of(argument) &&
                    transit.dtype == argument.scalar_type() && transit.room->place.type == place.type &&
                    transit.room->place.index == place.index;
  if (!same) refuse(name, "what the start of this ticket was given", describe(argument));
}

// The copy of this ticket, or null if it was waited for before.
std::shared_ptr<Transit> take(const Tensor& ticket, Direction direction, const Place& place, const Tensor& argument,
                              const char* name) {
  const std::int64_t handle = handle_of(ticket);
  const auto transit = HandleRegistry::global().get_if_live<Transit>(handle, "ticket");
  if (!transit) return nullptr;
  require_same(*transit, direction, place, argument, name);
  return HandleRegistry::global().take_if_live<Transit>(handle, "ticket");
}

std::chrono::milliseconds patience() {
  const char* text = std::getenv("ROUNDPIPE_STALL_SECONDS");
  char* end = nullptr;
  const double seconds = text == nullptr ? 0 : std::strtod(text, &end);
  return std::chrono::milliseconds(seconds > 0 && seconds < 1e7 ? static_cast<std::int64_t>(seconds * 1000) : 600'000);
}

void require_done(bool done) {
  if (!done) {
    throw Error(
        "a copy did not finish in time; raise ROUNDPIPE_STALL_SECONDS if the device may compute longer than that");
  }
}

Tensor offload_start(Tensor x) {
  const Place place = place_of(x, "x");
  const OnDevice here(place);
  return make_ticket(start_offload(x, place));
}

Tensor offload_wait(Tensor ticket, Tensor x) {
  const Place place = place_of(x, "x");
  const OnDevice here(place);
  auto transit = take(ticket, Direction::kDeviceToHost, place, x, "x");
  if (!transit) transit = start_offload(x, place);
  require_done(transit->record->wait_host(patience()));
  return owned_host_tensor(transit->record->host(0), transit->sizes, transit->strides, transit->dtype, transit->record);
}

Tensor reload_start(Tensor host, TorchDevice device) {
  require_host(host);
  const Place place = place_of(device);
  const OnDevice here(place);
  return make_ticket(start_reload(host, place));
}

Tensor reload_wait(Tensor ticket, Tensor host, TorchDevice device) {
  require_host(host);
  const Place place = place_of(device);
  const OnDevice here(place);
  auto transit = take(ticket, Direction::kHostToDevice, place, host, "host");
  if (!transit) transit = start_reload(host, place);
  DataRoom& room = *transit->room;
  const DeviceBytes target{transit->target->mutable_data_ptr(), byte_count(*transit->target)};
  require_done(room.store->fetch_wait(*room.device, *transit->up, *room.compute(), {target}, patience()));
  require_done(transit->up->wait_complete(patience()));
  return *transit->target;
}

std::string data_plane_reports() {
  std::string lines;
  for (const auto& room : DataPlane::global().rooms()) {
    HappensBefore* checker = room->backend->checker();
    if (checker == nullptr) continue;
    for (const std::string& report : checker->take_reports()) lines += (lines.empty() ? "" : "\n") + report;
  }
  return lines;
}

void data_plane_inject(std::string what, std::int64_t a, std::int64_t b) {
  HostBackend* backend = DataPlane::global().room(Place{})->host_backend;
  if (what == "delay") {
    if (b < 0 || b > 1'000'000) refuse("b", "0 to 1000000 microseconds", std::to_string(b));
    backend->set_delays(static_cast<std::uint64_t>(a), static_cast<std::uint32_t>(b));
  } else if (what == "fail_copy") {
    backend->fail_copy_after(a);
  } else {
    refuse("what", "'delay' or 'fail_copy'", "'" + what + "'");
  }
}

bool data_plane_close(std::int64_t timeout_ms) { return DataPlane::global().close(require_timeout(timeout_ms)); }

}  // namespace
}  // namespace roundpipe::ops

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CPU, library) {
  ROUNDPIPE_OP(library, offload_start);
  ROUNDPIPE_OP(library, offload_wait);
  ROUNDPIPE_OP(library, reload_start);
  ROUNDPIPE_OP(library, reload_wait);
}

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CUDA, library) {
  ROUNDPIPE_OP(library, offload_start);
  ROUNDPIPE_OP(library, offload_wait);
  ROUNDPIPE_OP(library, reload_start);
  ROUNDPIPE_OP(library, reload_wait);
}

STABLE_TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  ROUNDPIPE_OP(library, data_plane_reports);
  ROUNDPIPE_OP(library, data_plane_inject);
  ROUNDPIPE_OP(library, data_plane_close);
}
