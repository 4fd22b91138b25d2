"""The process's engine: devices, their worker threads, and the one sequence in which jobs are dealt out to them."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from . import _ops
from .devices import DeviceSpec, active_spec, devices
from .errors import ConfigError, DeviceOutOfMemory, HostOutOfMemory, RoundPipeError, StallError
from .live_memory import BesideCompiledCode, LiveMemory
from .replica import DeviceParameters, LayerReplica
from .units import ALIGNMENT_BYTES

if TYPE_CHECKING:
    from torch import nn

# Covers the process-wide CPU generator, and with it all layer compute on simulated devices: a layer draws from the
# state derived for it, and nobody may draw in between.
cpu_generator_lock = threading.RLock()
_unshared = contextlib.nullcontext()
_of_thread = threading.local()  # .device: the name of the device whose worker the thread is


class Runnable(Protocol):
    def run(self, worker: Worker) -> None: ...


class Worker:
    """One device and the thread that launches its compute."""

    def __init__(self, engine: Engine, index: int, device: torch.device) -> None:
        self.engine = engine
        self.index = index
        self.device = device
        self.simulated = device.type == "cpu"
        self.name = devices()[index].name
        limit = engine.spec.memory_limit_bytes
        # None: torch's allocator counts, or nobody.
        self.memory: LiveMemory | None = BesideCompiledCode(self.name, limit) if self.simulated and limit else None
        # Held while a layer computes, where devices share a generator that layers draw from.
        self.compute_lock: contextlib.AbstractContextManager[Any] = (
            cpu_generator_lock if self.simulated else engine.gpu_locks.get(device, _unshared)
        )
        self.parameters = DeviceParameters(device)
        self.anchor = torch.zeros((), device=device, requires_grad=True)  # makes stage entries part of a graph
        self.stream = None if self.simulated else torch.cuda.Stream(device)
        self._replicas: dict[int, tuple[weakref.ref[nn.Module], LayerReplica]] = {}
        self.region = torch.empty(0, dtype=torch.uint8, device=device)
        self.check: Callable[[], None] | None = None  # asked between slices of a wait; raises to end it
        self._views: dict[Any, list[torch.Tensor]] = {}
        self._queue: queue.SimpleQueue[Runnable | None] = queue.SimpleQueue()
        if self.stream is not None:
            _ops.engine_set_stream(engine.handle, index, self.stream.cuda_stream)
        self.thread = threading.Thread(target=self._loop, name=f"roundpipe-{self.name}", daemon=True)
        self.thread.start()

    def submit(self, job: Runnable) -> None:
        self._queue.put(job)

    def stop(self) -> None:
        self._queue.put(None)

    def _loop(self) -> None:
        _of_thread.device = self.name
        if self.stream is not None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.stream)
        while True:
            job = self._queue.get()
            if job is None:
                return
            job.run(self)
            del job
            self.engine.progress += 1

    # -- device memory -------------------------------------------------------------------------------------------
    def set_region(self, size_bytes: int) -> None:
        """Replaces the weight region. Only while no job is open."""
        self._views.clear()
        self.parameters.leave_region()
        self.region = torch.empty(0, dtype=torch.uint8, device=self.device)
        _ops.engine_set_region(self.engine.handle, self.index, self.region)
        if self.memory is not None:
            self.memory.set_region(self.region)
            self.memory.make_room(size_bytes, "the region of weights and gradients")
        if self.stream is None:
            region = _host_region(size_bytes, self.name)
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
                region = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        _ops.engine_set_region(self.engine.handle, self.index, region)  # may refuse: then the empty one stays
        self.region = region
        if self.memory is not None:
            self.memory.set_region(region)

    def views(self, key: Any, layouts: list[Any], offset: int) -> list[torch.Tensor]:
        """Views of the region for one packed image; places repeat, so they are made once."""
        found = self._views.get((key, offset))
        if found is None:
            if len(self._views) > 4096:
                self._views.clear()
            found = [layout.view(self.region, offset) for layout in layouts]
            self._views[(key, offset)] = found
        return found

    # -- skeletons -----------------------------------------------------------------------------------------------
    def replica(self, layer: nn.Module) -> LayerReplica:
        """This device's skeleton of a layer, made on first use and forgotten with the layer."""
        entry = self._replicas.get(id(layer))
        if entry is not None and entry[0]() is layer:
            return entry[1]
        replica = LayerReplica(layer, self.parameters)
        self._replicas[id(layer)] = (weakref.ref(layer), replica)
        return replica

    def forget(self, layers: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        """Drops the skeletons of a model that is gone, after the jobs that still use them."""
        self.submit(_Forget(layers, parameters))

    def forget_now(self, layers: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        for layer in layers:
            self._replicas.pop(id(layer), None)
        self.parameters.forget(parameters)
        self._views.clear()


def _host_region(size_bytes: int, device: str) -> torch.Tensor:
    """Of a simulated device.

    Raises:
        HostOutOfMemory: the host has not so much.
    """
    try:
        return torch.empty(size_bytes, dtype=torch.uint8)
    except (RuntimeError, MemoryError) as error:
        from .host_advice import explain  # not at the top: it asks models, which need an engine

        failure = HostOutOfMemory(
            f"{device} is a simulated device, whose memory is the host's, and its region of weights and gradients "
            f"takes {size_bytes} bytes: those of two stages. Give it a limit, by which stages are planned, as a GPU "
            f'has one (roundpipe.use_devices("host:1@4GiB")). {error}',
            asked_bytes=size_bytes,
            device=device,
        )
        raise explain(failure) from error


class _Forget:
    """Runs behind the jobs that were queued before it."""

    def __init__(self, layers: list[nn.Module], parameters: list[nn.Parameter]) -> None:
        self.layers = layers
        self.parameters = parameters

    def run(self, worker: Worker) -> None:
        worker.forget_now(self.layers, self.parameters)


class Engine:
    """Owns the core engine of one set of devices. One is open at a time; models find it through ``current()``."""

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        _stall_seconds()  # refused here, and not in the first wait
        found = devices()
        check = os.environ.get("ROUNDPIPE_CHECK", "0") == "1" and spec.kind == "host"
        self.handle = _ops.engine_open(spec.kind, [d.ordinal for d in found], spec.memory_limit_bytes or 0, check)
        self.progress = 0  # jobs and updates finished; the watchdog looks at it
        self.dispatch_lock = threading.RLock()  # jobs of one call enter all queues before those of the next
        self._next = 0
        self.calls_in_flight: weakref.WeakSet[Any] = weakref.WeakSet()
        self.steps_in_flight: weakref.WeakSet[Any] = weakref.WeakSet()
        self.gpu_locks = {d.device: threading.RLock() for d in found if d.kind == "cuda" and d.sharers > 1}
        self.workers = [Worker(self, i, d.device) for i, d in enumerate(found)]
        # The model whose activations made regions shrink, and how large it lets them be.
        self._room_for_regions: tuple[weakref.ref[Any], int] | None = None
        self.closed = False
        self.ended = False  # closed, and nothing of it runs any more

    @property
    def device_count(self) -> int:
        return len(self.workers)

    @property
    def simulated(self) -> bool:
        return self.spec.kind == "host"

    def next_worker(self) -> Worker:
        """The device of the next job of the one continuous sequence. Hold ``dispatch_lock``."""
        worker = self.workers[self._next]
        self._next = (self._next + 1) % len(self.workers)
        return worker

    def peek(self, ahead: int) -> int:
        return (self._next + ahead) % len(self.workers)

    # -- device memory -------------------------------------------------------------------------------------------
    def reserve_regions(
        self,
        wanted: list[int],
        least: list[int],
        most: int | None = None,
        owner: weakref.ref[Any] | None = None,
    ) -> None:
        """Makes every device's region at least ``wanted`` bytes, or ``least`` where memory does not allow more.

        Regions that earlier calls made larger stay so, unless this call's activations find no room beside them. Then
        the others' grow no further than that again, for as long as the model lives that needed the room.
        Hold ``dispatch_lock``. Waits for all work when a region must change.

        Args:
            most: how large a region that is there already may be beside what the call needs; None: no limit.
            owner: the model that calls; None: what it does not know to need others need not give.
        """
        sizes = [worker.region.numel() for worker in self.workers]
        if sizes == wanted:
            return
        room = self._room_for_regions
        if room is not None and room[0]() is None:
            room = None
        elif room is not None and owner == room[0] and most is not None:
            room = room[0], max(*wanted, most)
        self._room_for_regions = room
        limit = self.spec.memory_limit_bytes
        for worker, size, asked, minimum in zip(self.workers, sizes, wanted, least, strict=True):
            if size >= asked and (most is None or size <= max(asked, most)):
                continue
            if size >= asked:
                assert most is not None
                if owner is not None:
                    mine = max(asked, most)
                    self._room_for_regions = owner, min(mine, room[1]) if room else mine
            else:
                if room is not None:
                    asked = max(minimum, min(asked, room[1]) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
                if limit:
                    asked = max(minimum, min(asked, limit))
                if size >= asked:
                    continue
            self.wait_idle()
            try:
                worker.set_region(asked)
            except (torch.OutOfMemoryError, DeviceOutOfMemory):
                if minimum >= asked:
                    raise
                worker.set_region(minimum)

    def drop_regions(self) -> None:
        """After a device ran out of memory: the next call makes regions of the size that it needs."""
        with self.dispatch_lock:
            if self.closed:
                return
            self.wait_idle()
            for worker in self.workers:
                worker.set_region(0)
                if not worker.simulated:
                    with torch.cuda.device(worker.device):
                        torch.cuda.empty_cache()  # or pieces of it stay apart that are wanted whole

    # -- waiting and ending --------------------------------------------------------------------------------------
    def wait_idle(self) -> None:
        """Blocks until no job is open and no copy is under way."""
        _ops.wait(_ops.engine_wait_idle, self.handle, check=Watchdog(self))

    def raise_reports(self) -> None:
        """Raises what the happens-before checker found (simulated devices with ROUNDPIPE_CHECK=1)."""
        reports = _ops.engine_reports(self.handle) if self.simulated else ""
        if reports:
            raise RoundPipeError(f"the happens-before checker found unordered accesses:\n{reports}")

    def close(self, deadline: float | None = None) -> None:
        """Ends all jobs; waits for layers that are running until ``deadline`` (monotonic seconds) at most."""
        if self.closed:
            return
        self.closed = True
        deadline = time.monotonic() + _PATIENCE_S if deadline is None else deadline
        for call in list(self.calls_in_flight):
            if not call.finished:
                call.abandon(RoundPipeError("the engine was closed while this call was in flight"), told=False)
        for worker in self.workers:
            worker.stop()
        for worker in self.workers:
            end_thread(worker.thread, deadline)
        for worker in self.workers:
            worker._views.clear()
            worker._replicas.clear()
        with contextlib.suppress(RoundPipeError):  # it did not end in time: copies may be under way for ever
            _ops.engine_close(self.handle)
            self.ended = True


def _stall_seconds() -> float:
    said = os.environ.get("ROUNDPIPE_STALL_SECONDS", "600")
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ConfigError(
            f"ROUNDPIPE_STALL_SECONDS is {said!r}, expected seconds above 0; unset it for the default, 600"
        )
    return seconds


class Watchdog:
    """Turns a wait without any progress into an error that shows the counters."""

    def __init__(self, engine: Engine, what: str = "the engine", dump: Callable[[], str] | None = None) -> None:
        self.engine = engine
        self.what = what
        self.dump = dump
        self.limit_s = _stall_seconds()
        self._seen = -1
        self._since = time.monotonic()

    def __call__(self) -> None:
        if self.engine.progress != self._seen:
            self._seen = self.engine.progress
            self._since = time.monotonic()
        elif time.monotonic() - self._since > self.limit_s:
            facts = _ops.engine_live(self.engine.handle)
            counters = "records, bytes, peak bytes, open jobs, handles: " + ", ".join(map(str, facts))
            raise StallError(
                f"no progress for {self.limit_s:g} s while waiting for {self.what}. Raise ROUNDPIPE_STALL_SECONDS if a "
                "single layer may take longer than that.",
                counters=counters + (f"\n{self.dump()}" if self.dump else ""),
            )


def end_thread(thread: threading.Thread, deadline: float) -> None:
    """Waits for a thread that was asked to end; after ``deadline`` (monotonic seconds) its Python code is interrupted.

    A daemon thread that is still inside C++ code when the interpreter goes away takes the process down with it, so one
    that runs a layer of its user's is not simply left behind. Only a single operation that never ends is.
    """
    thread.join(max(0.0, deadline - time.monotonic()))
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        thread.join(0.5)


_PATIENCE_S = 3.0  # how long a closing engine waits for layers and step functions that are running

_engine: Engine | None = None
_engine_lock = threading.Lock()  # covers making and replacing the one engine
_forked = False  # this process is a fork of one whose engine was open
after_engine_exit: list[Callable[[], None]] = []  # called once no copy can be under way any more; not when one may
at_engine_exit: list[Callable[[float], None]] = []  # called with a deadline when the interpreter exits, before closing


def forget_model(layers: list[nn.Module], parameters: list[nn.Parameter]) -> None:
    """Called when a wrapper has gone, on whatever thread that happened; takes no lock."""
    engine = _engine
    if engine is not None and not engine.closed and not _forked:
        for worker in engine.workers:
            worker.forget(layers, parameters)


def check_process() -> None:
    """Raises RoundPipeError in a forked child, where the engine of the parent must not be touched."""
    if _forked:
        raise RoundPipeError(
            "RoundPipe was used in a forked child process; its engine and its weights live in the parent only. Start "
            "the child with the 'spawn' method, or keep RoundPipe models out of DataLoader workers."
        )


def worker_device() -> str | None:
    """The device that this thread computes for; None for a thread of the user's. (Hooks that autograd runs on a thread
    of its own, as on a GPU, are not known.)
    """
    return getattr(_of_thread, "device", None)


_FORK_PATIENCE_S = 1.0
_held_for_fork = threading.local()  # whether the forking thread got the lock


def _before_fork() -> None:
    # Bounded: the layer that holds the lock may itself wait for the process that is being forked (a compiler's pool).
    _held_for_fork.value = cpu_generator_lock.acquire(timeout=_FORK_PATIENCE_S)


def _after_fork() -> None:
    if _held_for_fork.value:
        cpu_generator_lock.release()


def _after_fork_in_child() -> None:
    global _forked, _engine_lock
    _after_fork()
    _engine_lock = threading.Lock()
    _forked = _forked or _engine is not None


# A child must not inherit the CPU generator in the state that a layer is just using, nor locked (DataLoader workers
# seed theirs first of all). So a fork waits until no layer holds it.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork,
    after_in_child=_after_fork_in_child,
)


def current() -> Engine:
    """The open engine; opened on first use with the devices that were asked for.

    Raises:
        RoundPipeError: in a forked child, where the engine of the parent must not be touched.
    """
    global _engine
    check_process()
    with _engine_lock:
        spec = active_spec()
        if _engine is not None and _engine.spec == spec:
            return _engine
        if _engine is not None:
            # Everything dispatched ends well on the old devices; failures are for the models' next calls to raise.
            for work in (*_engine.calls_in_flight, *_engine.steps_in_flight):
                work.wait_ended()
            _engine.close()
            _engine = None
        _engine = Engine(spec)
        return _engine


def open_engine() -> Engine | None:
    """The engine if one is open; opens none and waits for nothing."""
    return None if _engine is None or _engine.closed else _engine


def _at_exit() -> None:
    if _engine is not None and not _forked:
        deadline = time.monotonic() + _PATIENCE_S
        for end in at_engine_exit:
            end(deadline)
        _engine.close(deadline)
        if _engine.ended:
            for unlock in after_engine_exit:
                unlock()


atexit.register(_at_exit)
