"""Keeping what a module saves for its backward in pinned host memory, for modules that no RoundPipe streams."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from roundpipe.data_plane import offload_start, offload_wait, reload_start, reload_wait
from roundpipe.errors import ConfigError, ConfigTypeError

__all__ = ["ActivationOffload", "offload_activations"]

_WASTE = 4  # a view moves with its whole storage when that is at most this many times the view's own bytes


class _Entry:
    """Bytes that travel as one: on the device, on the host, or on the way."""

    def __init__(self, base: Tensor, watched: Tensor) -> None:
        self.device = base.device
        self.nbytes = base.nbytes
        self.uses = 0  # saved tensors that show these bytes and were not asked for yet
        self.order = 0
        self.spoiled = False
        self._source: Tensor | None = base
        self._watched: Tensor | None = watched  # whose version counter says that the source was written
        self._version = watched._version
        self._down = offload_start(base)
        self._host: Tensor | None = None
        self._up: Tensor | None = None
        self._loaded: Tensor | None = None

    @property
    def on_device(self) -> bool:
        return self._source is not None or self._loaded is not None

    @property
    def loading(self) -> bool:
        return self._up is not None

    def leave_device(self) -> None:
        """Waits until the bytes are on the host, and lets the source go."""
        if self._source is None:
            return
        assert self._watched is not None
        self._host = offload_wait(self._down, self._source)
        # The copy may have seen what was written meanwhile.
        self.spoiled = self._watched._version != self._version
        self._source = self._watched = None

    def start_loading(self) -> None:
        if self._host is not None and self._up is None and self._loaded is None:
            self._up = reload_start(self._host, self.device)

    def take(self) -> Tensor:
        """The bytes on the device; kept there until every saved tensor of them has been asked for."""
        if self._source is not None:
            assert self._watched is not None
            self.spoiled = self._watched._version != self._version
            base = self._source
        elif self._loaded is not None:
            base = self._loaded
        else:
            self.start_loading()
            assert self._host is not None and self._up is not None
            base = self._loaded = reload_wait(self._up, self._host, self.device)
            self._up = None
        self.uses -= 1
        if self.uses <= 0:
            self._loaded = None
        return base


class _Saved:
    """One saved tensor: where it lies in an entry. Autograd holds it; the session holds entries weakly."""

    def __init__(self, entry: _Entry, x: Tensor, begin_bytes: int, compact: bool) -> None:
        self.entry = entry
        self.dtype, self.size = x.dtype, x.size()
        self.stride = torch.empty_like(x, device="meta").stride() if compact else x.stride()
        self.offset = 0 if compact else x.storage_offset() - begin_bytes // x.element_size()

    def view(self, base: Tensor) -> Tensor:
        if base.dtype == torch.uint8 and self.dtype != torch.uint8:
            whole = base.numel() // self.dtype.itemsize * self.dtype.itemsize
            base = base[:whole].view(self.dtype)
        return base.as_strided(self.size, self.stride, self.offset)


class ActivationOffload:
    """What one ``with offload_activations(...)`` has moved.

    Attributes:
        offloaded_bytes: copied to the host so far.
        reloaded_bytes: copied back so far.
    """

    def __init__(self, module: nn.Module, min_bytes: int, keep_bytes: int, prefetch_bytes: int) -> None:
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self._min_bytes, self._keep_bytes, self._prefetch_bytes = min_bytes, keep_bytes, prefetch_bytes
        held = [*module.parameters(), *module.buffers()]
        self._devices = {tensor.device for tensor in held}
        self._state = {tensor.untyped_storage()._cdata for tensor in held}
        # Guards everything below. Forward packs on its thread, backward unpacks on a thread for each device.
        self._lock = threading.Lock()
        self._order: list[weakref.ref[_Entry]] = []  # as forward saved them
        self._cursor = 0  # backward has brought up, or passed, everything from here on
        self._leaving: deque[tuple[weakref.ref[_Entry], int]] = deque()  # with their bytes, oldest first
        self._leaving_bytes = 0
        self._loading: weakref.WeakSet[_Entry] = weakref.WeakSet()
        self._known: dict[tuple[int, int, int, int], tuple[StorageWeakRef, weakref.ref[_Entry]]] = {}

    # -- forward -------------------------------------------------------------------------------------------------
    def pack(self, x: Tensor) -> Tensor | _Saved:
        if not self._wanted(x):
            return x
        x = x.detach()  # its node will hold what we return: holding the node would be a cycle
        with torch.no_grad(), self._lock:
            saved = self._find(x)
            if saved is None:
                return x
            saved.entry.uses += 1
            self._let_leave()
            return saved

    def _wanted(self, x: Tensor) -> bool:
        if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
            return False
        if self._devices and x.device not in self._devices:
            return False
        return x.numel() > 0 and x.nbytes >= self._min_bytes and x.untyped_storage()._cdata not in self._state

    def _find(self, x: Tensor) -> _Saved | None:
        """``x`` in an entry that its storage has already, or in a new one."""
        storage = x.untyped_storage()
        span = sum((size - 1) * stride for size, stride in zip(x.size(), x.stride(), strict=True)) + 1
        begin, end = 0, int(storage.nbytes())
        compact = False
        if end > _WASTE * x.nbytes:
            begin = int(x.storage_offset()) * x.element_size()
            end = begin + int(span) * x.element_size()
            compact = end - begin > _WASTE * x.nbytes
        compact = compact or x.is_conj() or x.is_neg()
        if end - begin < self._min_bytes:  # an expanded tensor is smaller than it looks
            return None
        key = (storage._cdata, begin, end, x._version)
        if not compact:
            held, found = self._known.get(key, (None, None))
            entry = found() if found is not None else None
            # While the weak reference is held, no other storage can get this address.
            if held is not None and entry is not None and not held.expired():
                return _Saved(entry, x, begin, False)
        if compact:
            base = torch.empty_like(x).copy_(x)
        else:
            base = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage, begin, (end - begin,), (1,))
        entry = self._add(_Entry(base, base if compact else x))
        if not compact:
            self._known[key] = (StorageWeakRef(storage), weakref.ref(entry))
        return _Saved(entry, x, begin, compact)

    def _add(self, entry: _Entry) -> _Entry:
        if len(self._order) >= 1024 and len(self._order) & (len(self._order) - 1) == 0:  # now and then
            living = [ref for ref in self._order if ref() is not None]
            for index, ref in enumerate(living):
                if (old := ref()) is not None:
                    old.order = index
            self._order = living
            self._known = {key: value for key, value in self._known.items() if value[1]() is not None}
        entry.order = len(self._order)
        self._order.append(weakref.ref(entry))
        self._cursor = len(self._order)
        self._leaving.append((weakref.ref(entry), entry.nbytes))
        self._leaving_bytes += entry.nbytes
        self.offloaded_bytes += entry.nbytes
        return entry

    def _let_leave(self) -> None:
        """Keeps the newest ``keep_bytes`` on the device: their copies are under way, and backward wants them first."""
        while self._leaving_bytes > self._keep_bytes:
            ref, nbytes = self._leaving.popleft()
            self._leaving_bytes -= nbytes
            if (entry := ref()) is not None:
                entry.leave_device()

    # -- backward ------------------------------------------------------------------------------------------------
    def unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        entry = saved.entry
        with torch.no_grad(), self._lock:
            if not entry.on_device and not entry.loading:
                self._load(entry)
            self._prefetch(entry)
            base = entry.take()
            self._loading.discard(entry)
            if entry.spoiled:
                raise RuntimeError(
                    f"a tensor of {list(saved.size)} that backward needs was modified in place while "
                    "offload_activations copied it to the host; write it out of place instead"
                )
            return saved.view(base)

    def _prefetch(self, entry: _Entry) -> None:
        """Starts what was saved before, while there is room for it."""
        total = sum(other.nbytes for other in self._loading if other is not entry)
        self._cursor = min(self._cursor, entry.order)
        while total < self._prefetch_bytes and self._cursor > 0:
            self._cursor -= 1
            other = self._order[self._cursor]()
            if other is None or other.uses <= 0 or other.on_device or other.loading:
                continue
            self._load(other)
            total += other.nbytes

    def _load(self, entry: _Entry) -> None:
        entry.start_loading()
        self._loading.add(entry)
        self.reloaded_bytes += entry.nbytes


@contextlib.contextmanager
def offload_activations(
    module: nn.Module,
    *,
    min_bytes: int = 1 << 20,
    keep_bytes: int = 512 << 20,
    prefetch_bytes: int = 512 << 20,
) -> Iterator[ActivationOffload]:
    """Keeps what forward passes in this context save for backward in pinned host memory until backward needs it.

    For modules whose weights fit on the device but whose activations do not, where recomputing them would take longer
    than copying them. Results do not change. Backward may run inside or outside the context::

        with roundpipe.offload_activations(model):
            loss = model(x).sum()
        loss.backward()

    Saved tensors on the module's devices are copied, except its parameters and buffers and what is smaller than
    ``min_bytes``. Views of one storage travel once. Copies run beside compute; backward starts those of earlier layers
    while it computes with later ones. The calling thread waits when it is further ahead of the copies than
    ``keep_bytes``. On the CPU the copies go through a simulated device, for tests.

    Args:
        module: whose devices are meant, and whose parameters and buffers stay.
        min_bytes: smallest tensor that is copied.
        keep_bytes: how much of the newest stays on the device: copies under way, and what backward needs first.
        prefetch_bytes: how much backward brings up ahead of its use.

    Yields an :class:`ActivationOffload`, which counts what was moved.

    Raises:
        ConfigTypeError: ``module`` is no ``nn.Module``, or a RoundPipe, which keeps activations on the host itself.
        ConfigError: a negative number of bytes.
    """
    from roundpipe.model import RoundPipe

    if not isinstance(module, nn.Module) or isinstance(module, RoundPipe):
        raise ConfigTypeError(
            f"offload_activations: got a {type(module).__name__}, expected an nn.Module that lies on its device as a "
            "whole (a RoundPipe keeps its activations on the host by itself)"
        )
    for name, value in (("min_bytes", min_bytes), ("keep_bytes", keep_bytes), ("prefetch_bytes", prefetch_bytes)):
        if not isinstance(value, int) or value < 0:
            raise ConfigError(f"offload_activations: argument '{name}': expected bytes, 0 or more, got {value!r}")
    session = ActivationOffload(module, min_bytes, keep_bytes, prefetch_bytes)
    hooks: Any = torch.autograd.graph.saved_tensors_hooks(session.pack, session.unpack)
    with hooks:
        yield session
