"""Where the launching threads of the devices spend their time.

A worker's time inside jobs is its own computing (CPU time of the thread), waiting (for the engine, for other jobs, and
for autograd, whose own threads launch the backward pass), and the rest: it was ready to run and did not, because
another thread held the interpreter (or the machine had no core left). That rest is what is called the GIL wait here; it
is an upper bound.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roundpipe import _ops, stage_job

_waited = threading.local()


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if getattr(_waited, "inside", False):
            return function(*args, **kwargs)
        _waited.inside = True
        wall, cpu = time.perf_counter(), time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent = (time.perf_counter() - wall) - (time.thread_time() - cpu)
            _waited.seconds = getattr(_waited, "seconds", 0.0) + spent
            _waited.inside = False

    return timed


@contextmanager
def worker_times() -> Iterator[dict[str, dict[str, float]]]:
    """By device: seconds inside jobs, of them computing, waiting, and neither; filled in when the context ends."""
    found: dict[str, dict[str, float]] = {}
    run, wait, condition_wait = stage_job.StageJob.run, _ops.wait, threading.Condition.wait
    backward = torch.autograd.backward

    def timed_run(self: Any, worker: Any) -> None:
        wall, cpu, waited = time.perf_counter(), time.thread_time(), getattr(_waited, "seconds", 0.0)
        run(self, worker)
        entry = found.setdefault(f"{worker.index}", {"job_s": 0.0, "cpu_s": 0.0, "wait_s": 0.0})
        entry["job_s"] += time.perf_counter() - wall
        entry["cpu_s"] += time.thread_time() - cpu
        entry["wait_s"] += getattr(_waited, "seconds", 0.0) - waited

    stage_job.StageJob.run = timed_run
    _ops.wait = _timed(wait)
    threading.Condition.wait = _timed(condition_wait)
    torch.autograd.backward = _timed(backward)
    try:
        yield found
    finally:
        stage_job.StageJob.run = run
        _ops.wait = wait
        threading.Condition.wait = condition_wait
        torch.autograd.backward = backward
        for entry in found.values():
            entry["gil_wait_s"] = max(0.0, entry["job_s"] - entry["cpu_s"] - entry["wait_s"])
            entry["gil_wait_share"] = entry["gil_wait_s"] / entry["job_s"]
