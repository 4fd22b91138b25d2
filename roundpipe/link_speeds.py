"""Measured speeds: of the copies by which the engine moves weights and gradients, and of the host's memory."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from . import _ops
from .engine import Engine, Worker
from .errors import DeviceOutOfMemory

__all__ = ["LinkSpeed", "host_copy_bytes_per_s", "measure_link"]

_EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Bytes a second between the host and one device, the best of a few copies. On a simulated device it is the
    speed of host copies."""

    up: float
    """From pinned memory to the device: weights with pin_model "alloc" or "register"."""
    down: float
    """From the device to pinned memory: gradients."""
    both: float
    """Up and down at the same time, together."""
    up_pageable: float
    """From pageable memory, through bounce buffers: pin_model "off"."""
    size_bytes: int
    """Of one copy."""


def measure_link(engine: Engine, worker: Worker, size_bytes: int, repeats: int = 3) -> LinkSpeed:
    """Runs on the device's worker, behind what is queued there; waits for all of it.

    Raises:
        DeviceOutOfMemory, HostOutOfMemory: there is no room for the copies; nothing is kept.
    """
    region_bytes = [3 * size_bytes] * engine.device_count
    try:
        with engine.dispatch_lock:
            engine.reserve_regions(region_bytes, region_bytes)
    except DeviceOutOfMemory:
        raise
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(f"no room for the copies that are timed: {error}", device=worker.name) from error
    measurement = _Measurement(size_bytes, repeats)
    worker.submit(measurement)
    result = measurement.results.get()
    if isinstance(result, BaseException):
        raise result
    return result


class _Measurement:
    """Streams units as a stage's job does."""

    def __init__(self, size_bytes: int, repeats: int) -> None:
        self.size_bytes = size_bytes
        self.repeats = repeats
        self.results: queue.SimpleQueue[LinkSpeed | BaseException] = queue.SimpleQueue()

    def run(self, worker: Worker) -> None:
        try:
            self.results.put(self._measure(worker))
        except BaseException as error:  # noqa: BLE001 (raised on the caller's thread)
            self.results.put(error)

    def _measure(self, worker: Worker) -> LinkSpeed:
        size = self.size_bytes
        with (
            _unit(worker, _ops.host_empty([size], torch.uint8), 0) as pinned,
            _unit(worker, torch.ones(size, dtype=torch.uint8), 0, pageable=True) as pageable,
            _unit(worker, _ops.host_empty([size], torch.uint8), size) as trained,
        ):
            image = _ops.host_empty([size], torch.uint8)
            measured = {
                "up": size / self._best(lambda: _upload(worker, pinned)),
                "up_pageable": size / self._best(lambda: _upload(worker, pageable)),
                "down": size / self._best(lambda: _download(worker, trained, image)),
                "both": 2 * size / self._best(lambda: _download(worker, trained, image, beside=pinned)),
            }
        return LinkSpeed(size_bytes=size, **measured)

    def _best(self, timed: Callable[[], float]) -> float:
        timed()  # touches memory for the first time
        return min(timed() for _ in range(self.repeats))


@contextlib.contextmanager
def _unit(worker: Worker, weights: torch.Tensor, gradient_bytes: int, pageable: bool = False) -> Iterator[int]:
    engine = worker.engine.handle
    claim = _ops.host_claim(engine, [weights], False) if pageable else 0
    unit = _ops.unit_open(engine, [weights], [0], weights.nbytes, gradient_bytes, claim)
    try:
        yield unit
    finally:
        _ops.drop_quietly(_ops.unit_close, unit)
        if claim:
            _ops.drop_quietly(_ops.host_claim_drop, claim)


@contextlib.contextmanager
def _job(worker: Worker, unit: int, store: torch.Tensor) -> Iterator[int]:
    job = _ops.job_open(worker.engine.handle, worker.index, [unit], [_EMPTY], [store])
    try:
        yield job
    except BaseException:
        _ops.drop_quietly(_ops.job_abort, job)
        raise
    finally:
        _ops.drop_quietly(_ops.job_forget, job)


def _arrived(worker: Worker, job: int) -> None:
    """The job's weights are on the device, as the host sees it."""
    _ops.wait_place(job, 0)
    if worker.stream is not None:
        worker.stream.synchronize()


def _upload(worker: Worker, unit: int) -> float:
    """Seconds."""
    begin = time.perf_counter()
    with _job(worker, unit, _EMPTY) as job:
        _arrived(worker, job)
        took = time.perf_counter() - begin
        _ops.job_weights_done(job, 0)
        _ops.job_close(job)
    return took


def _download(worker: Worker, unit: int, store: torch.Tensor, beside: int = 0) -> float:
    """Seconds that the gradients take, and with ``beside`` that unit's weights on their way up at the same time."""
    with _job(worker, unit, store) as job:
        _arrived(worker, job)
        _ops.job_weights_done(job, 0)
        begin = time.perf_counter()
        _ops.job_gradients_done(job, 0)
        _ops.job_close(job)
        if beside:
            _upload(worker, beside)
        _ops.wait(_ops.job_wait_gradients, job)
        return time.perf_counter() - begin


def host_copy_bytes_per_s(threads: int, size_bytes: int = 256 << 20, repeats: int = 3) -> float:
    """Bytes that a plain copy in host memory reads and writes in a second, with ``threads`` of torch's threads."""
    source = torch.ones(size_bytes // 4)
    target = torch.empty_like(source).fill_(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(before)
    return 2 * source.nbytes / min(times)
