"""Buffers: a copy on each device that needs one, snapshots for recompute, and the way of changed values back home.

Note [Buffers]
  Host buffers do not change during a call: the values that forwards write are collected and copied home on the caller's
  thread before the call returns. A forward whose layer will be recomputed notes, for each microbatch, which host tensor
  holds the values it started from: the host's own until a forward changed them, a snapshot afterwards. Recompute starts
  from exactly those and its own writes are thrown away. It never looks at the host's buffers: the caller may have
  replaced them meanwhile, for his next call.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .boundary import HostTensor, Traffic
from .errors import ConfigError

if TYPE_CHECKING:
    from .engine import Engine, Worker
    from .replica import BufferPlace, LayerReplica


class HostBuffers:
    """Pinned copies of all buffers of a model, renewed on the caller's thread when the host's tensors changed."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        for layer in layers:
            for name, buffer in layer.named_buffers():
                _check_buffer(name, buffer)
        self._stored: dict[int, tuple[torch.Tensor, int, int, HostTensor]] = {}

    def refresh(self, engine: Engine, layers: list[nn.Module] | None = None) -> None:
        """``layers``: only the buffers of these; None: all."""
        seen = set()
        for layer in self._layers if layers is None else layers:
            for name, buffer in layer.named_buffers():
                if id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                _check_buffer(name, buffer)
                entry = self._stored.get(id(buffer))
                if entry and entry[0] is buffer and entry[1:3] == (buffer._version, buffer.data_ptr()):
                    continue
                host = HostTensor.from_host(engine, buffer, Traffic.BUFFERS, on_host=False)
                self._stored[id(buffer)] = (buffer, buffer._version, buffer.data_ptr(), host)
        for key in self._stored.keys() - seen if layers is None else ():
            del self._stored[key]

    def forget(self) -> None:
        self._stored.clear()

    def of(self, module: nn.Module, name: str) -> HostTensor:
        return self._stored[id(module._buffers[name])][3]


_NONE = torch.empty(0)


def _check_buffer(name: str, buffer: torch.Tensor) -> None:
    if buffer.requires_grad:
        raise ConfigError(
            f"buffer {name!r} requires grad; expected a Parameter for what is trained and a buffer without grad "
            "otherwise. Call buffer.requires_grad_(False) or register it as a Parameter."
        )


@dataclass
class _Slot:
    module: nn.Module  # of the host layer
    twin: nn.Module
    name: str
    home: HostTensor  # the host's own value during this call
    source: HostTensor  # what the device's copy was loaded from
    tensor: torch.Tensor
    version: int
    written: bool = False  # by a kernel that counts no version

    def intact(self) -> bool:
        return (
            not self.written
            and self.twin._buffers.get(self.name) is self.tensor
            and self.tensor._version == self.version
        )


@dataclass
class NotedBuffers:
    """What one forward of a layer started from."""

    places: list[BufferPlace]
    sources: list[HostTensor]  # by number


class LayerBuffers:
    """The buffers of one layer on one device during one job: the host's, or those of ``noted`` for a recompute."""

    def __init__(self, worker: Worker, replica: LayerReplica, host: HostBuffers | NotedBuffers) -> None:
        self._worker = worker
        self._replica = replica
        self._slots: list[_Slot] = []
        self._places = host.places if isinstance(host, NotedBuffers) else replica.buffer_places()
        for module, name, number in self._places:
            if number != len(self._slots):
                continue
            source = host.sources[number] if isinstance(host, NotedBuffers) else host.of(module, name)
            slot = _Slot(module, replica.skeleton_of(module), name, source, source, _NONE, -1)
            cached = replica.loaded_buffers.get((id(module), name))
            if cached is not None and cached[0]() is source and cached[1]._version == cached[2]:
                self._put(slot, source, cached[1])
            else:
                self._load(slot, source)
            self._slots.append(slot)
        # Weakly: a device that sees no more jobs would keep the host's copies of values that have changed since.
        replica.loaded_buffers = {
            (id(s.module), s.name): (weakref.ref(s.source), s.tensor, s.version) for s in self._slots
        }
        self._alias()

    def __bool__(self) -> bool:
        return bool(self._slots)

    def _put(self, slot: _Slot, source: HostTensor, tensor: torch.Tensor) -> None:
        slot.twin._buffers[slot.name] = tensor
        slot.source, slot.tensor, slot.version, slot.written = source, tensor, tensor._version, False

    def _load(self, slot: _Slot, source: HostTensor) -> None:
        self._put(slot, source, source.fetch(self._worker).wait())

    def _alias(self) -> None:
        """What stands at several places of the layer is one tensor on the device too; what stands nowhere is gone."""
        placed = {(id(module), name): self._replica.skeleton_of(module) for module, name, _ in self._places}
        for place in self._replica.placed_buffers.keys() - placed.keys():
            self._replica.placed_buffers[place]._buffers.pop(place[1], None)
        self._replica.placed_buffers = placed
        for module, name, number in self._places:
            buffers = self._replica.skeleton_of(module)._buffers
            if number is None:
                buffers[name] = None
                continue
            first = self._slots[number]
            if first.module is not module or first.name != name:
                buffers[name] = first.twin._buffers[first.name]

    def note_silent_writes(self) -> None:
        """After a forward: PyTorch's normalisation kernels write running statistics without counting a version.

        Counting one here instead would be wrong too: their backward was given the same tensors.
        """
        for slot in self._slots:
            if isinstance(slot.twin, _NormBase) and slot.twin.training and slot.tensor.is_floating_point():
                slot.written = True
                self._forget_copy(slot)

    def distrust(self) -> None:
        """After a failure: a forward that raised half way may have written silently, so nothing is kept."""
        for slot in self._slots:
            self._forget_copy(slot)

    def _forget_copy(self, slot: _Slot) -> None:
        loaded = self._replica.loaded_buffers
        self._replica.loaded_buffers = {key: entry for key, entry in loaded.items() if entry[1] is not slot.tensor}

    def snapshot(self) -> NotedBuffers:
        """Where the values lie from which the coming forward starts. Changed ones are copied down before it writes."""
        sources = []
        for slot in self._slots:
            if not slot.intact():
                present = slot.twin._buffers.get(slot.name)
                if present is None:
                    raise ConfigError(f"a forward deleted the buffer {slot.name!r}; buffers must stay registered.")
                source = HostTensor.stash(self._worker, present, Traffic.BUFFERS)
                source.order_after_read(self._worker)
                self._put(slot, source, present)
            sources.append(slot.source)
        return NotedBuffers(self._places, sources)

    def load(self, noted: NotedBuffers) -> None:
        """Values as noted by ``snapshot``, after a forward that has failed half way."""
        self.distrust()
        for slot, source in zip(self._slots, noted.sources, strict=True):
            self._load(slot, source)
        self._alias()

    @contextlib.contextmanager
    def restored(self, noted: NotedBuffers) -> Iterator[None]:
        """Values as noted by ``snapshot`` of the forward that is being repeated; afterwards those from before."""
        before = [(s.source, s.tensor, s.version, s.written, s.twin._buffers.get(s.name)) for s in self._slots]
        try:
            for slot, source in zip(self._slots, noted.sources, strict=True):
                if slot.source is not source or not slot.intact():
                    self._load(slot, source)
            self._alias()
            yield
        finally:
            for slot, (source, tensor, version, written, present) in zip(self._slots, before, strict=True):
                written = written or (slot.tensor is tensor and slot.written)
                slot.source, slot.tensor, slot.version, slot.written = source, tensor, version, written
                slot.twin._buffers[slot.name] = present
            self._alias()

    def collect(self, updates: list[BufferUpdate]) -> None:
        """Starts the way home of every value that differs from the host's."""
        for slot in self._slots:
            if slot.intact() and slot.source is slot.home:
                continue
            present = slot.twin._buffers.get(slot.name)
            if present is None:
                continue
            source = slot.source if slot.intact() else HostTensor.stash(self._worker, present, Traffic.BUFFERS)
            updates.append(BufferUpdate(slot.module, slot.name, source))
            self._replica.loaded_buffers.pop((id(slot.module), slot.name), None)


@dataclass
class BufferUpdate:
    """A buffer that a forward changed; applied on the caller's thread before the call returns."""

    module: nn.Module
    name: str
    value: HostTensor

    def apply(self) -> BufferUndo:
        """Requires that the value is on the host."""
        value = self.value.host()
        buffer = self.module._buffers.get(self.name)
        if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
            before = buffer.clone()
            with torch.no_grad():
                buffer.copy_(value)
            return BufferUndo(self.module, self.name, buffer, before, buffer._version)
        replaced = self.module._buffers[self.name] = value.clone()
        return BufferUndo(self.module, self.name, replaced, buffer, replaced._version, replaces=True)


@dataclass
class BufferUndo:
    """What a buffer was before a call whose backward still runs; the call may fail after it returned."""

    module: nn.Module
    name: str
    present: torch.Tensor
    before: torch.Tensor | None
    version: int
    replaces: bool = False  # ``before`` is the tensor itself, not a copy of its values

    def untouched(self) -> bool:
        return self.module._buffers.get(self.name) is self.present and self.present._version == self.version

    def apply(self) -> None:
        if self.replaces:
            self.module._buffers[self.name] = self.before
        else:
            assert self.before is not None
            with torch.no_grad():
                self.present.copy_(self.before)


def undo_all(undos: list[BufferUndo]) -> None:
    """Undoes in reverse order, but for buffers that somebody has changed since the last of these updates."""
    latest = {(id(undo.module), undo.name): undo.untouched() for undo in undos}
    for undo in reversed(undos):
        if latest[id(undo.module), undo.name]:
            undo.apply()
