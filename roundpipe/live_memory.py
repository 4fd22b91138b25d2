"""The bytes that tensors hold at a moment, counted storage by storage: the allocator's books of a simulated device.

Note [Counted memory]
  Every storage that an operator makes on the counting thread is added when it appears and subtracted when its last
  tensor has gone, on whatever thread that happens: a weak reference tells. Views cost nothing. Memory that an operator
  takes and gives back inside its own kernel is not seen; nor is what code allocates beside the operators.
  The count is taken by a dispatch mode, which torch carries into backward. It costs some microseconds an operator, so
  only devices whose memory is limited have one. On a device compiled code runs as it was compiled, and what it takes is
  not seen (``BesideCompiledCode``); where only the count is wanted it runs eagerly.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import SIMULATED_OUT_OF_MEMORY

__all__ = ["BesideCompiledCode", "Kind", "LiveMemory", "MemoryUse", "counted"]

_PATIENCE_S = 0.25  # how long an allocation beyond the limit waits for copies under way to let their sources go


class Kind(IntEnum):
    """What a counted storage is for."""

    ACTIVATIONS = 0
    """Made by layers, the loss and autograd."""
    RING = 1
    """At the boundary of a stage: on its way up or down, or what came up."""
    BUFFERS = 2
    """Copies of the model's buffers."""


@dataclass(frozen=True)
class MemoryUse:
    """What a device's memory is taken by, in bytes. None: not known (a GPU's allocator does not tell kinds apart)."""

    weights_bytes: int
    """The region's places for weights: those of two consecutive stages, where both find room."""
    gradients_bytes: int
    """The region's places for gradients."""
    ring_bytes: int | None
    """Boundary activations and their gradients, on the way up or down or waiting for their layer."""
    activations_bytes: int | None
    """What layers, the loss and autograd made."""
    buffers_bytes: int | None = 0
    """Copies of the model's buffers."""
    other_bytes: int = 0
    """Other allocations of this process: tensors that are not the model's, memory that the allocator keeps."""
    elsewhere_bytes: int = 0
    """Other processes, and what is taken outside the allocator."""

    @property
    def total_bytes(self) -> int:
        """Everything but other processes."""
        known = (self.ring_bytes or 0) + (self.activations_bytes or 0) + (self.buffers_bytes or 0)
        return self.weights_bytes + self.gradients_bytes + known + self.other_bytes


class _Held:
    __slots__ = ("kind", "nbytes", "ref")

    def __init__(self, ref: weakref.ref[Any], nbytes: int, kind: Kind) -> None:
        self.ref, self.nbytes, self.kind = ref, nbytes, kind


class LiveMemory(TorchDispatchMode):
    """Counts what is allocated while it is entered, and what of it still lives, until it is dropped.

    Args:
        name: of the device, for messages.
        limit_bytes: an allocation beyond it raises torch.OutOfMemoryError, as a GPU's does; None: no limit.

    Entered by one thread at a time; read by any.
    """

    def __init__(self, name: str = "", limit_bytes: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.limit_bytes = limit_bytes
        self._lock = threading.RLock()  # covers the books, between the counting thread and readers
        self._held: dict[int, _Held] = {}  # by address of the storage
        self._freed: deque[int] = deque()  # keys, appended by whatever thread drops a storage, which must take no lock
        self._bytes = [0] * len(Kind)
        self._region_bytes = 0
        self._peak_bytes = 0
        self._beside_peak_bytes = 0
        self._at_peak = (0, *self._bytes)
        self._region_key: int | None = None

    # -- reading -------------------------------------------------------------------------------------------------
    @property
    def live_bytes(self) -> int:
        """Everything that lives now, the region included."""
        with self._lock:
            self._settle()
            return self._total()

    @property
    def peak_bytes(self) -> int:
        """The most that lived at once since the last ``reset_peak``."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        with self._lock:
            self._settle()
            self._peak_bytes = self._total()
            self._at_peak = (self._region_bytes, *self._bytes)

    @property
    def beside_peak_bytes(self) -> int:
        """The most that lived at once beside the region since the last ``reset_beside_peak``."""
        return self._beside_peak_bytes

    def reset_beside_peak(self) -> None:
        with self._lock:
            self._settle()
            self._beside_peak_bytes = sum(self._bytes)

    def by_kind(self, at_peak: bool = False) -> tuple[int, int, int, int]:
        """(region, activations, ring, buffers) in bytes, now or at the peak."""
        with self._lock:
            self._settle()
            region, *kinds = self._at_peak if at_peak else (self._region_bytes, *self._bytes)
            return (region, *kinds)  # type: ignore[return-value]

    def sizes(self) -> dict[int, int]:
        """Bytes of every counted storage that lives, by the storage's address."""
        with self._lock:
            self._settle()
            return {key: held.nbytes for key, held in self._held.items()}

    # -- what the engine tells -----------------------------------------------------------------------------------
    def set_region(self, region: torch.Tensor) -> None:
        """The region of weights and gradients is another one now; it was allocated outside the mode."""
        with self._lock:
            self._region_bytes = region.nbytes
            self._region_key = region.untyped_storage()._cdata if region.numel() else None
            self._note_peak()

    def make_room(self, nbytes: int, what: str) -> None:
        """Raises torch.OutOfMemoryError if so much more does not fit."""
        if self.limit_bytes is None or self._fits(nbytes):
            return
        now = self.live_bytes
        raise torch.OutOfMemoryError(
            f"{SIMULATED_OUT_OF_MEMORY}. {self.name}: {nbytes} bytes asked for {what}; {now} of the limit of "
            f"{self.limit_bytes} bytes are taken"
        )

    def note(self, tensor: torch.Tensor, kind: Kind) -> None:
        """``tensor`` is of this kind from now on; one that is not counted stays so."""
        with self._lock:
            self._settle()
            held = self._held.get(tensor.untyped_storage()._cdata)
            if held is not None and held.kind is not kind:
                self._bytes[held.kind] -= held.nbytes
                self._bytes[kind] += held.nbytes
                held.kind = kind

    def transient(self, nbytes: int) -> None:
        """So much was taken and given back."""
        with self._lock:
            self._settle()
            self._note_peak(nbytes)

    # -- counting ------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "roundpipe":
            return self._own_operator(func, args, kwargs)
        out = func(*args, **kwargs)
        if _makes_storage(func):
            self._add_all(out)
        return out

    def _own_operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Those of the engine move bytes between places that are counted already."""
        if func._schema.name == "roundpipe::linear_cross_entropy":
            from .models.linear_cross_entropy import loss_sum_and_gradients

            with self:  # its chunks are the larger part
                return loss_sum_and_gradients(*args, **kwargs)
        out = func(*args, **kwargs)
        if func._schema.name == "roundpipe::reload_wait":
            self._add_all(out)
        return out

    def _add_all(self, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._add(out)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self._add_all(one)

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a kind of tensor that has none
            return
        nbytes = storage.nbytes()
        if not nbytes:
            return
        key = storage._cdata
        with self._lock:
            self._settle()
            held = self._held.get(key)
            if held is not None or key == self._region_key:
                if held is not None and held.nbytes != nbytes:  # resized in place
                    self._bytes[held.kind] += nbytes - held.nbytes
                    held.nbytes = nbytes
                    self._note_peak()
                return
            if self.limit_bytes is not None and not self._fits(nbytes):
                raise torch.OutOfMemoryError(
                    f"{SIMULATED_OUT_OF_MEMORY}. {self.name}: tried to allocate {nbytes} bytes for a tensor of shape "
                    f"{tuple(tensor.shape)}; {self._total()} of the limit of {self.limit_bytes} bytes are taken"
                )
            freed = self._freed
            ref = weakref.ref(storage, lambda _, key=key: freed.append(key))  # type: ignore[misc]
            self._held[key] = _Held(ref, nbytes, Kind.ACTIVATIONS)
            self._bytes[Kind.ACTIVATIONS] += nbytes
            self._note_peak()

    def _fits(self, nbytes: int) -> bool:
        """Gives copies under way a moment to let their sources go, as the sources are freed by other threads."""
        assert self.limit_bytes is not None
        least, deadline = None, 0.0
        while True:
            with self._lock:
                self._settle()
                total = self._total()
                waits = self._bytes[Kind.RING] > 0
            if total + nbytes <= self.limit_bytes:
                return True
            now = time.monotonic()
            if least is None or total < least:
                least, deadline = total, now + _PATIENCE_S
            if not waits or now > deadline:
                return False
            time.sleep(0.001)

    def _settle(self) -> None:
        """Subtracts what was freed since; before any look at an address, which may have been given out again."""
        while self._freed:
            held = self._held.pop(self._freed.popleft(), None)
            if held is not None:
                self._bytes[held.kind] -= held.nbytes

    def _total(self) -> int:
        return self._region_bytes + sum(self._bytes)

    def _note_peak(self, more: int = 0) -> None:
        beside = sum(self._bytes) + more
        self._beside_peak_bytes = max(self._beside_peak_bytes, beside)
        total = self._region_bytes + beside
        if total > self._peak_bytes:
            self._peak_bytes = total
            self._at_peak = (self._region_bytes, self._bytes[0] + more, *self._bytes[1:])


class BesideCompiledCode(LiveMemory):
    """For a device that runs the user's layers: torch.compile would refuse ``fullgraph`` beside any other mode."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


_fresh: dict[Any, bool] = {}


def _makes_storage(func: Any) -> bool:
    """Whether an operator may return memory that is not that of an argument."""
    found = _fresh.get(func)
    if found is None:
        found = _fresh[func] = any(result.alias_info is None for result in func._schema.returns)
    return found


@contextmanager
def counted(memory: LiveMemory | None) -> Iterator[None]:
    """``memory`` counts in here; None: nobody does."""
    if memory is None:
        yield
    else:
        with memory:
            yield
