"""Operators of the engine and its devices, and what is known of the build and the machine."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from roundpipe import _ops

open_engines: dict[int, int] = {}  # handle -> process that opened it


# -- engine and devices ------------------------------------------------------------------------------------------------
def engine_open(kind: str, devices: Sequence[int], memory_limit_bytes: int = 0, check: bool = False) -> int:
    """Opens an engine over GPUs (``"cuda"``, driver ordinals) or simulated devices (``"host"``, 0..n-1)."""
    handle = _ops._call("engine_open", kind, devices, memory_limit_bytes, check)
    open_engines[handle] = os.getpid()
    return handle


def engine_close(engine: int) -> None:
    """Aborts open jobs, poisons pending updates and stops all threads; at most about 15 s."""
    open_engines.pop(engine, None)
    _ops._call("engine_close", engine)


def engine_set_stream(engine: int, device: int, stream: int) -> None:
    """The native stream (``torch.cuda.Stream.cuda_stream``) on which compute is launched; only while no job is open."""
    _ops._call("engine_set_stream", engine, device, stream)


def engine_set_region(engine: int, device: int, region: Tensor) -> None:
    """Lends device memory (uint8) for weights and gradients; held until replaced or closed. No job may be open."""
    _ops._call("engine_set_region", engine, device, region)


def engine_bytes(engine: int, device: int) -> list[int]:
    """Bytes copied: up by weights, gradients, activations, buffers, inputs, then down by the same."""
    return _ops._call("engine_bytes", engine, device)


def engine_bounced_bytes(engine: int, device: int) -> int:
    """Bytes of weights that went up through bounce buffers since the last reset."""
    return _ops._call("engine_bounced_bytes", engine, device)


def engine_reset_bytes(engine: int) -> None:
    """Sets the counters of :func:`engine_bytes` to 0 on every device."""
    _ops._call("engine_reset_bytes", engine)


def engine_poke(engine: int) -> None:
    """Makes every lane look again whether its next copy is ready."""
    _ops._call("engine_poke", engine)


def engine_wait_idle(engine: int, timeout_ms: int) -> bool:
    """Until no job is open and no copy is under way."""
    return _ops._call("engine_wait_idle", engine, timeout_ms)


def engine_reports(engine: int) -> str:
    """Races that the happens-before checker found since the last call, one a line."""
    return _ops._call("engine_reports", engine)


def engine_inject(engine: int, what: str, a: int, b: int = 0) -> None:
    """Tests on simulated devices: ``"delay"`` (seed, at most us) or ``"fail_copy"`` (after n more copies)."""
    _ops._call("engine_inject", engine, what, a, b)


def engine_live(engine: int) -> list[int]:
    """Records, their bytes, the peak of those, open jobs, live handles."""
    return _ops._call("engine_live", engine)


# -- facts and trace ---------------------------------------------------------------------------------------------------
def build_facts() -> str:
    """How the library was built, one fact a line."""
    return _ops._call("build_facts")


def cuda_driver() -> str:
    """Empty when a CUDA driver can be used, else why not."""
    return _ops._call("cuda_driver")


def isa_names() -> list[str]:
    """Instruction sets that this CPU supports, best first."""
    return _ops._call("isa_names").split(",")


def isa_active() -> str:
    """The instruction set in use."""
    return _ops._call("isa_active")


def isa_force(name: str) -> None:
    """Uses the named instruction set; ``""`` goes back to the automatic choice."""
    _ops._call("isa_force", name)


def trace_start(capacity: int) -> None:
    """Records the newest ``capacity`` spans from now on."""
    _ops._call("trace_start", capacity)


def trace_stop() -> tuple[list[list[str]], dict[str, tuple[int, str]]]:
    """Spans, oldest first: kind, name, track, begin and end in ns, argument; and (thread id, name) by track."""
    lines = [line.split("\t") for line in _ops._call("trace_stop").splitlines()]
    threads = {track: (int(thread), name) for kind, name, track, *rest in lines if kind == "thread" for thread in rest}
    return [line for line in lines if line[0] != "thread"], threads
