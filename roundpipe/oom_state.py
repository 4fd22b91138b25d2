"""What a device holds at the moment when it runs out of memory, noted on the exception while that is so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .boundary import HostTensor
from .devices import devices
from .errors import DeviceOutOfMemory
from .live_memory import MemoryUse

if TYPE_CHECKING:
    from .boundary import Boundary
    from .engine import Worker

__all__ = ["as_out_of_memory", "note_use", "outside_bytes", "shapes_of"]


def as_out_of_memory(error: BaseException, message: str | None = None) -> DeviceOutOfMemory | None:
    """``error`` as our own kind, with the original as its cause; None: it is something else."""
    if isinstance(error, DeviceOutOfMemory):
        return error
    if not isinstance(error, torch.OutOfMemoryError):
        return None
    made = DeviceOutOfMemory(str(error) if message is None else f"{message}: {error}")
    made.__cause__ = error
    return made


def outside_bytes(worker: Worker) -> int:
    """What torch's allocator has given out on a GPU beside the region: when a job begins, tensors that are not its."""
    if worker.simulated:
        return 0
    return max(0, int(torch.cuda.memory_allocated(worker.device)) - worker.region.numel())


def note_use(error: DeviceOutOfMemory, worker: Worker, gradient_bytes: int, outside: int) -> None:
    """Completes ``error`` by what ``worker``'s device holds now.

    Args:
        gradient_bytes: of the job that failed, in the region.
        outside: ``outside_bytes`` when the job began.
    """
    error.device = worker.name
    if worker.memory is not None:
        region, activations, ring, buffers = worker.memory.by_kind()
        gradients = min(gradient_bytes, region)
        error.use = MemoryUse(region - gradients, gradients, ring, activations, buffers)
        error.capacity_bytes = worker.memory.limit_bytes
    elif not worker.simulated:
        region = worker.region.numel()
        gradients = min(gradient_bytes, region)
        allocated = int(torch.cuda.memory_allocated(worker.device))
        reserved = int(torch.cuda.memory_reserved(worker.device))
        free, total = torch.cuda.mem_get_info(worker.device)
        other = outside + reserved - allocated
        activations = max(0, allocated - region - outside)
        elsewhere = max(0, total - free - reserved)
        error.use = MemoryUse(region - gradients, gradients, None, activations, None, other, elsewhere)
        limit = devices()[worker.index].memory_bytes or total
        error.capacity_bytes = max(0, min(limit, total - elsewhere) - outside)


def shapes_of(boundary: Boundary | None) -> tuple[str, ...]:
    """The tensors of a microbatch in words."""
    if boundary is None:
        return ()
    tensors = {id(leaf): leaf for leaf in boundary.leaves if isinstance(leaf, HostTensor)}
    return tuple(f"{str(t.dtype).removeprefix('torch.')} {list(t.size)}" for t in tensors.values())
