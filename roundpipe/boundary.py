"""What crosses a boundary between stages: trees whose tensors lie in host memory between two devices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from . import _ops
from .errors import ConfigError
from .host_placement import is_dense
from .interrupts import uninterrupted
from .live_memory import Kind

if TYPE_CHECKING:
    from .engine import Engine, Worker
    from .passed_on import PassedOn


class Traffic(IntEnum):
    """Kinds of traffic in the engine's byte counters (the order of the core's enumeration)."""

    WEIGHTS = 0
    GRADIENTS = 1
    ACTIVATIONS = 2
    BUFFERS = 3
    INPUTS = 4


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The permutation that makes a dense tensor contiguous; None when it is not dense."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    if tensor.numel() == 0 or not is_dense(tensor):
        return None
    return sorted(range(tensor.dim()), key=lambda d: (-tensor.stride()[d], -tensor.shape[d]))


class HostTensor:
    """One tensor in pinned host memory, dropped with its last reference. Immutable once made."""

    __slots__ = (
        "__weakref__",
        "_keeper",
        "dtype",
        "is_passed_on",
        "nbytes",
        "on_host",
        "order",
        "record",
        "size",
        "traffic",
    )

    def __init__(self, record: int, like: torch.Tensor, order: list[int], traffic: Traffic, on_host: bool) -> None:
        self.record = record
        self._keeper = _ops.handle_keeper(record)
        self.dtype = like.dtype
        self.size = like.shape
        self.nbytes = like.numel() * like.element_size()
        self.order = order
        self.traffic = traffic
        self.on_host = on_host  # belongs on the host: a fetch gives a CPU tensor
        self.is_passed_on = False  # some stage returned it as it got it, see Note [Passed on]

    # -- making --------------------------------------------------------------------------------------------------
    @staticmethod
    def stash(worker: Worker, tensor: torch.Tensor, traffic: Traffic) -> HostTensor:
        """Starts the copy down from ``worker``'s device; returns at once."""
        _check_kind(tensor)
        tensor = tensor.detach()
        if tensor.device != worker.device:
            return HostTensor.from_host(worker.engine, tensor, traffic, on_host=tensor.device.type == "cpu")
        order = _memory_order(tensor)
        if order is None:
            tensor = tensor.contiguous()
            order = list(range(tensor.dim()))
        flat = tensor.permute(order)
        if worker.memory is not None and traffic is not Traffic.BUFFERS:
            worker.memory.note(tensor, Kind.RING)
        record = _ops.stash(worker.engine.handle, worker.index, [flat], int(traffic), 0)
        return HostTensor(record, tensor, order, traffic, on_host=False)

    @staticmethod
    def from_host(engine: Engine, tensor: torch.Tensor, traffic: Traffic, on_host: bool = False) -> HostTensor:
        """Copies a tensor that is not on a worker's device into pinned memory now, on the calling thread."""
        _check_kind(tensor)
        tensor = tensor.detach().cpu().contiguous()
        order = list(range(tensor.dim()))
        with uninterrupted():  # or Ctrl-C could lose the handle between these two
            return HostTensor(_ops.stash_host(engine.handle, [tensor]), tensor, order, traffic, on_host)

    # -- reading -------------------------------------------------------------------------------------------------
    def wait(self, worker_check: Any = None) -> None:
        """Blocks until all bytes are on the host."""
        _ops.wait(_ops.record_wait, self.record, check=worker_check)

    def host(self) -> torch.Tensor:
        """The tensor over the record's own memory, which it keeps alive. Requires ``wait()``."""
        flat = _ops.record_host(self.record)[0]
        return flat.permute(_inverse(self.order))

    def memory(self) -> torch.Tensor:
        """As ``host()``, for a tensor that nobody reads before ``wait()``."""
        return _ops.record_memory(self.record)[0].permute(_inverse(self.order))

    def order_after_read(self, worker: Worker) -> None:
        """What ``worker`` computes next may overwrite the tensor that was stashed from its device."""
        if not self.on_host:
            _ops.wait(_ops.record_order_after_read, self.record, worker.index)

    def fetch(self, worker: Worker) -> Fetch:
        return Fetch(self, worker)


class Fetch:
    """A copy of a host tensor on its way up to a device."""

    __slots__ = ("_keeper", "source", "target", "ticket", "worker")

    def __init__(self, source: HostTensor, worker: Worker) -> None:
        self.source = source
        self.worker = worker
        self.ticket = 0
        if source.on_host:
            self.target = torch.empty(0)
            return
        # Not a view of `flat` but the other way round: a view at a graph's entry could not be written in place.
        self.target = torch.empty_permuted(source.size, source.order, dtype=source.dtype, device=worker.device)
        if worker.memory is not None:
            worker.memory.note(self.target, Kind.BUFFERS if source.traffic is Traffic.BUFFERS else Kind.RING)
        flat = self.target.permute(source.order)
        with uninterrupted():
            handle, record = worker.engine.handle, source.record
            self.ticket = _ops.fetch_start(handle, worker.index, record, [flat], int(source.traffic))
            self._keeper = _ops.handle_keeper(self.ticket)

    def wait(self) -> torch.Tensor:
        """The tensor; what the device's compute stream does next comes after the copy."""
        if self.source.on_host:
            self.source.wait()
            return self.source.host().clone()
        if self.ticket:
            _ops.wait(_ops.fetch_wait, self.ticket, check=self.worker.check)
            self.ticket = 0
        return self.target


def _inverse(order: list[int]) -> list[int]:
    inverse = [0] * len(order)
    for position, dimension in enumerate(order):
        inverse[dimension] = position
    return inverse


def _check_kind(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ConfigError(
            f"a tensor of layout {tensor.layout} (shape {tuple(tensor.shape)}) crosses a boundary between layers; "
            "expected a dense (strided) tensor. Convert it with .to_dense() or keep it inside one layer."
        )
    if tensor.is_meta:
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} on the meta device has no values; expected one on the CPU or a "
            "GPU."
        )


@dataclass
class Boundary:
    """A tree at one boundary for one microbatch. Tensor leaves are HostTensors, others stand as they are."""

    spec: pytree.TreeSpec
    leaves: list[Any]
    requires_grad: list[bool]

    def fetch(self, worker: Worker, passed_on: PassedOn | None = None) -> PendingTree:
        """Starts the copies up. passed_on: what the device has kept of this call, and may keep of this tree."""
        return PendingTree(self, worker, passed_on)


class PendingTree:
    """The tensors of a boundary on their way to a device; a tensor that stands at several leaves moves once."""

    def __init__(self, boundary: Boundary, worker: Worker, passed_on: PassedOn | None = None) -> None:
        self.boundary = boundary
        self._worker = worker
        self._passed_on = passed_on
        self._hosts = {id(leaf): leaf for leaf in boundary.leaves if isinstance(leaf, HostTensor)}
        self._fetches = {
            key: host.fetch(worker)
            for key, host in self._hosts.items()
            if passed_on is None or passed_on.get(host) is None
        }

    def wait(self) -> LiveTree:
        arrived = {key: self._arrived(key, host) for key, host in self._hosts.items()}
        live = LiveTree(self.boundary.spec, [], list(self.boundary.requires_grad), {})
        for leaf in self.boundary.leaves:
            if isinstance(leaf, HostTensor):
                tensor = arrived[id(leaf)]
                live.leaves.append(tensor)
                live.remember(tensor, leaf)
            else:
                live.leaves.append(leaf)
        return live

    def _arrived(self, key: int, host: HostTensor) -> torch.Tensor:
        fetch = self._fetches.get(key)
        if fetch is None:  # kept when this tree was asked for, but a layer may have written it since
            kept = None if self._passed_on is None else self._passed_on.get(host)
            if kept is not None:
                return kept
            fetch = self._fetches[key] = host.fetch(self._worker)
        tensor = fetch.wait()
        if self._passed_on is not None and host.is_passed_on:
            self._passed_on.keep(host, tensor)
        return tensor


@dataclass
class LiveTree:
    """A tree on a device. ``known``: which of its tensors already lie in host memory, unchanged since."""

    spec: pytree.TreeSpec
    leaves: list[Any]
    requires_grad: list[bool]
    known: dict[int, tuple[torch.Tensor, int, HostTensor]]

    def value(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.spec)

    def remember(self, tensor: torch.Tensor, host: HostTensor) -> None:
        self.known[id(tensor)] = (tensor, tensor._version, host)

    def stored(self, tensor: torch.Tensor) -> HostTensor | None:
        entry = self.known.get(id(tensor))
        if entry is not None and entry[0] is tensor and entry[1] == tensor._version:
            return entry[2]
        return None

    def stash(
        self, worker: Worker, traffic: Traffic = Traffic.ACTIVATIONS, passed_on: PassedOn | None = None
    ) -> Boundary:
        """Starts the copies down of every tensor that is not on the host yet. passed_on: where the device keeps those
        that are.
        """
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                host = self.stored(leaf)
                if host is None:
                    host = HostTensor.stash(worker, leaf, traffic)
                    self.remember(leaf, host)
                elif passed_on is not None:
                    host.is_passed_on = True
                    if leaf.device == worker.device:
                        passed_on.keep(host, leaf)
                leaves.append(host)
            else:
                leaves.append(leaf)
        return Boundary(self.spec, leaves, list(self.requires_grad))


class ArrivingGradients:
    """What a backward microbatch waits for; ``grads`` None: nothing came, there is nothing to do."""

    def __init__(self, grads: list[Fetch | None] | None, tree: PendingTree | None) -> None:
        self.grads = grads
        self.tree = tree
