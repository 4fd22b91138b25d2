"""``with roundpipe.trace("out.json")``: a timeline of what computed, copied, waited and updated, and when.

Note [Timeline]
  Three kinds of spans meet on one clock, CLOCK_MONOTONIC in nanoseconds. The core's (copies, updates, waits for
  tickets) are kept by its own ring, by thread. Those of Python threads (calls, jobs, waits) are taken here. Layers are
  measured on their devices as the planner measures them (job_probe.py), but every microbatch: on a GPU by events, whose
  times are turned into this clock by one event that was waited for when the trace began.
  Without a trace each place costs one test of a module attribute.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from . import _ops, spans
from . import engine as engines
from .errors import ConfigError
from .spans import Recorder

__all__ = ["trace"]

_DEVICE_PROCESS, _HOST_PROCESS = 1, 2


_starting = threading.Lock()  # covers the change of `spans.active`


class trace:
    """Records a timeline from entering to leaving and writes it as a JSON that Perfetto and chrome://tracing show.

    Leaving waits for what is under way, and for the GPUs. The file appears whole or not at all; an exception in the
    block is passed on after it was written. One trace at a time, over all models of the process. Each device shows its
    layers by phase (fwd, re, bwd) and microbatch; each thread shows its copies (bytes), updates, calls, jobs and waits.
    Recording costs a few microseconds a span and two events a layer and microbatch.

    Args:
        path: the file to write; its directory must exist.
        max_spans: copies and updates to keep; of more the oldest are dropped.

    Raises:
        ConfigError: ``path`` cannot be written, ``max_spans`` is not positive, or a trace is being recorded already.
    """

    def __init__(self, path: str | os.PathLike[str], max_spans: int = 1_000_000) -> None:
        if not isinstance(max_spans, int) or max_spans < 1:
            raise ConfigError(f"roundpipe.trace: max_spans={max_spans!r}, expected a positive number of spans to keep")
        self.path = Path(path)
        self.max_spans = max_spans

    def __enter__(self) -> trace:
        folder = self.path.parent
        if self.path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(
                f"roundpipe.trace: cannot write {str(self.path)!r}; give a file in a directory that exists"
            )
        with _starting:
            if spans.active is not None:
                raise ConfigError("roundpipe.trace: a trace is being recorded already; leave it before the next")
            spans.active = Recorder()
            _ops.trace_start(self.max_spans)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        recorder = spans.active
        assert recorder is not None
        try:
            if engines._engine is not None and not engines._engine.closed:
                engines._engine.wait_idle()
        finally:
            spans.active = None
            core, threads = _ops.trace_stop()
        events = _device_events(recorder) + _host_events(recorder, core, threads)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)


def _event(process: int, track: int, kind: str, name: str, begin_ns: int, end_ns: int, **args: Any) -> dict[str, Any]:
    microseconds = {"ts": begin_ns / 1e3, "dur": max(0, end_ns - begin_ns) / 1e3}
    return {"ph": "X", "pid": process, "tid": track, "cat": kind, "name": name, "args": args, **microseconds}


def _named(process: int, track: int | None, name: str) -> dict[str, Any]:
    what = {"name": "process_name"} if track is None else {"name": "thread_name", "tid": track}
    return {"ph": "M", "pid": process, "args": {"name": name}, **what}


def _device_events(recorder: Recorder) -> list[dict[str, Any]]:
    events = [_named(_DEVICE_PROCESS, None, "devices")]
    tracks: dict[str, int] = {}
    for device, phase, layer, microbatch, begin, end in recorder.layers:
        begin_ns, end_ns = recorder.mark_ns(begin), recorder.mark_ns(end)
        if begin_ns is None or end_ns is None:
            continue
        if device not in tracks:
            tracks[device] = len(tracks) + 1
            events.append(_named(_DEVICE_PROCESS, tracks[device], f"{device} compute"))
        name = f"{phase} layer {layer}"
        args = {"layer": layer, "microbatch": microbatch}
        events.append(_event(_DEVICE_PROCESS, tracks[device], phase, name, begin_ns, end_ns, **args))
    return events


def _host_events(
    recorder: Recorder, core: list[list[str]], threads: dict[str, tuple[int, str]]
) -> list[dict[str, Any]]:
    """Spans of the core and of Python on the tracks of the threads that they share."""
    events = [_named(_HOST_PROCESS, None, "host")]
    names: dict[int, str] = {}
    for kind, name, track, begin_ns, end_ns, argument in core:
        thread, called = threads[track]
        names.setdefault(thread, called)
        args = {"bytes" if kind == "copy" else "unit": int(argument)}
        events.append(_event(_HOST_PROCESS, thread, kind, name, int(begin_ns), int(end_ns), **args))
    for thread, called, kind, name, begin, end in recorder.host:
        names[thread] = called  # Python's name tells more than the system's
        events.append(_event(_HOST_PROCESS, thread, kind, name, begin, end))
    return events + [_named(_HOST_PROCESS, thread, called) for thread, called in names.items()]
