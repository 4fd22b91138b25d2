"""How much of the time that copies take is hidden behind compute, from a profiler trace of the GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Interval = tuple[float, float]


def merge(intervals: list[Interval]) -> list[Interval]:
    """The same set of instants as disjoint, ascending intervals."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def common_length(left: list[Interval], right: list[Interval]) -> float:
    """Length of the instants that two lists of disjoint ascending intervals share."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of copies by direction and the share of them during which a kernel ran on the same GPU."""
    spans: dict[tuple[str, Any], list[Interval]] = {}
    copied: dict[str, int] = {}
    for event in events:
        category = event.get("cat")
        if category not in ("kernel", "gpu_memcpy"):
            continue
        kind = "kernel"
        if category == "gpu_memcpy":
            kind = next((k for k in ("HtoD", "DtoH") if k in event["name"]), "")
            if not kind:
                continue
            copied[kind] = copied.get(kind, 0) + int(event.get("args", {}).get("bytes", 0))
        begin = event["ts"]
        spans.setdefault((kind, event.get("args", {}).get("device")), []).append((begin, begin + event["dur"]))
    busy = {key: merge(value) for key, value in spans.items()}
    result: dict[str, Any] = {"kernel_s": sum(e - b for (k, _), v in busy.items() if k == "kernel" for b, e in v) / 1e6}
    for kind in ("HtoD", "DtoH"):
        length = sum(e - b for (k, _), v in busy.items() if k == kind for b, e in v)
        hidden = sum(common_length(v, busy.get(("kernel", d), [])) for (k, d), v in busy.items() if k == kind)
        result[kind] = {
            "copying_s": length / 1e6,
            "hidden_fraction": hidden / length if length else None,
            "bytes": copied.get(kind, 0),
            "gigabytes_per_s": copied.get(kind, 0) / length / 1e3 if length else None,
        }
    return result


def profile(run: Callable[[], Any]) -> dict[str, Any]:
    """Runs `run` (which must wait for its work) under the profiler and sums up its GPU events."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summarize(json.loads(path.read_text())["traceEvents"])
