"""``memory_report()``: where every byte of host and device memory is that this process's models hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import torch

from . import _ops
from . import engine as engines
from .ownership import owners
from .training_state import TrainingState, living_states

__all__ = ["DeviceMemory", "HostMemory", "MemoryReport", "memory_report", "reset_device_peaks"]


@dataclass(frozen=True)
class HostMemory:
    """Host memory in bytes, by what it is for. All but weights in place and the states of optimizers that are not
    compact lies in pinned memory of exact size."""

    weights_bytes: int
    """Weights that were copied into pinned memory."""
    weights_in_place_bytes: int
    """Weights that stay in their own storages (pin_model "register" and "off")."""
    mapped_bytes: int
    """Of these, mapped from files: the system may drop them and read them again."""
    gradients_bytes: int
    """Gradient images, one a unit and two once a window had several calls; of announced steps the pool instead."""
    optimizer_bytes: int
    """Optimizer parameters with their gradients, or masters, moments and shadows of compact optimizers."""
    optimizer_states_bytes: int
    """What other optimizers keep in their ``state`` for optimizer parameters, in ordinary memory. An optimizer is known
    from its first step on (in a step function, or in an ``OptimizerCtx``). What it keeps elsewhere is part of
    ``process_bytes`` alone."""
    activations_bytes: int
    """Boundary activations, inputs and outputs that wait for recompute, backward, or their caller."""
    other_bytes: int
    """Bounce buffers, copies made by the operators for graphs, rounding."""
    idle_bytes: int
    """Pinned memory that is kept for reuse."""
    locked_bytes: int
    """Page-locked by the engine: what it allocated and what it registered in place."""
    process_bytes: int
    """Resident memory of the whole process, as the system counts it."""
    available_bytes: int
    """What the system and the control group have left."""

    def by_purpose(self) -> dict[str, int]:
        """Bytes by what they are for: ``{"weights": ..., "gradients": ..., ...}``, in the order above."""
        parts = [f.name for f in fields(self) if f.name not in ("locked_bytes", "available_bytes")]
        return {part.removesuffix("_bytes").replace("_", " "): getattr(self, part) for part in parts}

    @property
    def allocated_bytes(self) -> int:
        """Pinned memory taken from the system: everything above but weights in place and optimizer states."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.other_bytes
            + self.idle_bytes
        )


@dataclass(frozen=True)
class DeviceMemory:
    """One device's memory in bytes."""

    name: str
    """``"cuda:0"``, ``"host:1"``."""
    region_bytes: int
    """Streamed weights and gradients: a region for two consecutive stages."""
    tensors_bytes: int | None
    """Other tensors: activations and the user's own. None: not counted (a simulated device without a limit)."""
    cached_bytes: int | None
    """Kept by torch's caching allocator for reuse."""
    elsewhere_bytes: int | None
    """In use outside torch's allocator: the CUDA context, libraries, other processes."""
    total_bytes: int | None
    """Size of the device; a simulated one's limit."""
    peak_bytes: int | None = None
    """The most that region and tensors took at once, since the start or a reset (of ``torch.cuda.
    reset_peak_memory_stats`` on a GPU, ``roundpipe.memory.reset_device_peaks`` on a simulated device)."""


@dataclass(frozen=True)
class MemoryReport:
    """``str()`` of it is a table."""

    host: HostMemory
    devices: tuple[DeviceMemory, ...]
    models: dict[str, int]
    """Host memory of each living model in bytes: weights, gradients and what its optimizer holds. By its class and the
    wrapper's name, the oldest first; of one class the second is ``Class#2``."""

    def __str__(self) -> str:
        lines = ["host memory"]
        for field in fields(self.host):
            lines.append(_line(field.name, getattr(self.host, field.name)))
        for device in self.devices:
            lines.append(f"device {device.name}")
            lines += [_line(f.name, getattr(device, f.name)) for f in fields(device) if f.name != "name"]
        lines += [f"model {name}: {size / 2**20:.1f} MiB of host memory" for name, size in self.models.items()]
        return "\n".join(lines)


def memory_report() -> MemoryReport:
    """What this process's models, and the engine for them, hold at this moment. Opens the engine, waits for nothing.

    Work under way changes the numbers meanwhile; after ``model.synchronize()`` they stand still.
    """
    engine = engines.current()
    return MemoryReport(host_memory(), tuple(_device(worker) for worker in engine.workers), model_memory())


def host_memory() -> HostMemory:
    """The host's part of the report. Opens no engine."""
    reserved, registered, used, quarantined, _, _ = _ops.host_stats()
    locked_in_place, pinned, pageable, mapped, _ = _ops.host_claim_stats(0)
    del pinned, pageable
    parts = [_of_state(state) for state in living_states()]
    weights, in_place, gradients, optimizer, states = map(sum, zip(*parts, strict=True)) if parts else (0,) * 5
    engine = engines.open_engine()
    activations = 0 if engine is None else _ops.engine_live(engine.handle)[1]
    known = weights + gradients + optimizer + activations
    available = _ops.host_limits()[4]
    return HostMemory(
        weights_bytes=weights,
        weights_in_place_bytes=in_place,
        mapped_bytes=mapped,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        optimizer_states_bytes=states,
        activations_bytes=activations,
        other_bytes=max(0, used + quarantined - known),
        idle_bytes=max(0, reserved - used - quarantined),
        locked_bytes=registered + locked_in_place,
        process_bytes=_resident_bytes(),
        available_bytes=available,
    )


def model_memory() -> dict[str, int]:
    """Host memory by model, see ``MemoryReport.models``."""
    counted: Counter[str] = Counter()
    found = {}
    for owner in owners.living():
        state = vars(owner).get("_state")
        if not isinstance(state, TrainingState):
            continue  # about to be wrapped, or replaced
        kind = type(owner._naming_model()).__name__  # type: ignore[attr-defined]
        counted[kind] += 1
        number = f"#{counted[kind]}" if counted[kind] > 1 else ""
        found[f"{kind}{number} ({owner.name})"] = sum(_of_state(state))
    return found


def _of_state(state: TrainingState) -> tuple[int, int, int, int, int]:
    """Bytes of weights, weights in place, gradients, optimizer and optimizer states."""
    weights = in_place = gradients = 0
    for unit in state.units:
        weights += int(unit.image.numel())
        in_place += sum(h.nbytes for h in unit.homes if not _within(h, unit.image))
        gradients += unit.host_gradient_bytes
    gradients += state.gradient_pool.host_bytes
    compact = state.compact.memory
    optimizer = state.optimizer.host_bytes + (0 if compact is None else compact.host_bytes)
    return weights, in_place, gradients, optimizer, state.optimizer.state_bytes


def _within(home: torch.Tensor, image: torch.Tensor) -> bool:
    return home.untyped_storage().data_ptr() == image.untyped_storage().data_ptr()


def _device(worker: engines.Worker) -> DeviceMemory:
    region = worker.region.numel()
    counted = worker.memory
    if counted is not None:
        tensors = counted.live_bytes - region
        return DeviceMemory(worker.name, region, tensors, 0, 0, counted.limit_bytes, counted.peak_bytes)
    if worker.simulated:
        return DeviceMemory(worker.name, region, None, None, None, None)
    allocated = torch.cuda.memory_allocated(worker.device)
    reserved = torch.cuda.memory_reserved(worker.device)
    free, total = torch.cuda.mem_get_info(worker.device)
    return DeviceMemory(
        worker.name,
        region,
        allocated - region,
        reserved - allocated,
        max(0, total - free - reserved),
        total,
        torch.cuda.max_memory_allocated(worker.device),
    )


def reset_device_peaks() -> None:
    """From now on ``peak_bytes`` of every device is the most since this call."""
    for worker in engines.current().workers:
        if worker.memory is not None:
            worker.memory.reset_peak()
        elif not worker.simulated:
            torch.cuda.reset_peak_memory_stats(worker.device)


def _resident_bytes() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return 0


def _line(name: str, value: int | None) -> str:
    label = name.removesuffix("_bytes").replace("_", " ")
    return f"  {label:<22}" + ("not counted" if value is None else f"{value / 2**20:12.1f} MiB")
