"""What a timeline is made of, where it is taken; nothing is kept while no trace is on. See Note [Timeline]."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["Recorder", "active", "span"]


class Recorder:
    """What one trace takes beside the core's spans. Lists only grow, by appends of whole spans from any thread."""

    def __init__(self) -> None:
        self.host: list[tuple[int, str, str, str, int, int]] = []  # thread, its name, kind, name, begin and end in ns
        self.layers: list[tuple[str, str, int, int, Any, Any]] = []  # device, phase, layer, microbatch, marks
        self.zero: dict[torch.device, tuple[int, torch.cuda.Event]] = {}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                with torch.cuda.device(index):
                    event = torch.cuda.Event(enable_timing=True)
                    event.record()
                    event.synchronize()
                    self.zero[torch.device("cuda", index)] = (time.monotonic_ns(), event)

    def layer(self, device: str, phase: str, layer: int, microbatch: int, begin: Any, end: Any) -> None:
        """Both marks are seconds of ``time.perf_counter``, or events that were recorded on one stream of ``device``."""
        self.layers.append((device, phase, layer, microbatch, begin, end))

    def mark_ns(self, mark: Any) -> int | None:
        """Waits for an event. None: its device was not yet in use when the trace began."""
        if isinstance(mark, float):
            return int(mark * 1e9)
        if (zero := self.zero.get(mark.device)) is None:
            return None
        mark.synchronize()
        return zero[0] + int(zero[1].elapsed_time(mark) * 1e6)


active: Recorder | None = None


@contextlib.contextmanager
def span(kind: str, name: str) -> Iterator[None]:
    """A span of the calling thread; nothing without a trace."""
    recorder = active
    if recorder is None:
        yield
        return
    begin = time.monotonic_ns()
    try:
        yield
    finally:
        here = threading.current_thread().name
        recorder.host.append((threading.get_native_id(), here, kind, name, begin, time.monotonic_ns()))
