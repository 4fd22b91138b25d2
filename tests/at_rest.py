"""When counters of the process stand still, because what others dropped has gone and work has ended; and when those of
an engine begin anew."""

from __future__ import annotations

import gc
import sys
import threading

import roundpipe
from roundpipe import engine as engines
from roundpipe.optimizer_thread import thread as optimizer_thread

PATIENCE_S = 100  # for what must come; only a test that fails waits for it


class _Mark:
    """Reached by a worker once it has let go of the jobs before it."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def run(self, worker: engines.Worker) -> None:
        self.reached.set()


def at_rest(collects: bool = True) -> None:
    """Blocks until threads have let go of what they ran: they do so a moment after everybody was told of its end.

    ``collects``: also what only Python's cycle collector frees, and what the traceback of a failed test holds.
    """
    if collects:
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)
    for _ in range(2):  # a step holds its calls, and a model that goes has its workers forget it
        if collects:
            gc.collect()
        passed = threading.Event()
        optimizer_thread.submit(passed.set)
        assert passed.wait(PATIENCE_S), "the optimizer thread is stuck"
        engine = engines.open_engine()
        if engine is None:
            continue
        engine.wait_idle()
        marks = [_Mark() for _ in engine.workers]
        for worker, mark in zip(engine.workers, marks, strict=True):
            worker.submit(mark)
        for mark in marks:
            assert mark.reached.wait(PATIENCE_S), "a worker is stuck"


def fresh_engine(devices: str) -> engines.Engine:
    """Opens an engine even if the one that is open has these devices: with peaks and regions that no test before it
    has made.
    """
    at_rest()
    for spec in ("host:7@1MiB", devices):
        roundpipe.use_devices(spec)
        engines.current()
    return engines.current()
