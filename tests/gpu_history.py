"""Who held a GPU's memory when it held most: what torch's allocator noted of each allocation, for messages of tests."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from types import TracebackType
from typing import Any

import torch

_MIB = 1 << 20
_FRAMES = 5


class PeakHistory:
    """Records in its ``with`` block what is allocated on a GPU; ``str()`` of it says what was alive at the peak.

    What was there before counts in the total and is not listed.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._before = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> PeakHistory:
        self._before = torch.cuda.memory_allocated(self._device)
        torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events = torch.cuda.memory._snapshot()["device_traces"][self._device]
        torch.cuda.memory._record_memory_history(enabled=None)
        if error is not None:
            error.add_note(str(self)) if hasattr(error, "add_note") else print(self)

    def __str__(self) -> str:
        alive: dict[int, tuple[int, str]] = {}
        held = most = self._before
        at_peak: list[tuple[int, str]] = []
        for event in self._events:
            action, address = event.get("action"), event.get("addr", 0)
            if action == "alloc":
                alive[address] = event["size"], _where(event.get("frames", []))
                held += event["size"]
                if held > most:
                    most, at_peak = held, list(alive.values())
            elif action == "free_requested" and address in alive:
                held -= alive.pop(address)[0]
        sizes: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        for size, where in at_peak:
            sizes[where] += size
            numbers[where] += 1
        lines = [f"the GPU held most, {most / _MIB:.1f} MiB, with {self._before / _MIB:.1f} MiB from before and"]
        lines += [f"  {size / _MIB:8.1f} MiB in {numbers[where]}: {where}" for where, size in sizes.most_common(20)]
        return "\n".join(lines)


def _where(frames: list[dict[str, Any]]) -> str:
    """The innermost frames that are not torch's."""
    own = [f for f in frames if "site-packages" not in f["filename"] and "threading.py" not in f["filename"]]
    return " < ".join(f"{PurePath(f['filename']).name}:{f['line']} {f['name']}" for f in own[:_FRAMES]) or "(C++)"
