"""What every benchmark needs: the facts of the machine, timing, and a result file."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine_facts() -> dict[str, Any]:
    """The machine and the software that a figure depends on. Bytes are named so."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    if torch.cuda.is_available():
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _driver_version()
        facts["gpus"] = [
            {"name": p.name, "memory_bytes": p.total_memory}
            for p in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ]
    return facts


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def write_result(name: str, result: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Writes `result` beside the machine's facts; the file is named after the benchmark and the time (UTC)."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    path.write_text(json.dumps({"benchmark": name, "machine": machine_facts(), **result}, indent=2) + "\n")
    return path


def wait_for_devices() -> None:
    """Waits for every GPU, so that a clock that stops afterwards has seen all work."""
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        torch.cuda.synchronize(index)


def iteration_times(iterate: Callable[[], Any], iterations: int, warmup: int, finish: Callable[[], Any]) -> list[float]:
    """Seconds of each of `iterations` calls after `warmup` unmeasured ones.

    Calls may return while work goes on: then an iteration's time is the distance between two returns, which is what a
    training loop sees. `finish` waits for everything; what it waits for after the last call is added to that call.
    """
    for _ in range(warmup):
        iterate()
    finish()
    times = []
    mark = time.perf_counter()
    for index in range(iterations):
        iterate()
        if index == iterations - 1:
            finish()
        now = time.perf_counter()
        times.append(now - mark)
        mark = now
    return times


def summary(times: list[float]) -> dict[str, Any]:
    """Median, mean and extremes, in seconds. The mean is what a long run costs an iteration; the median forgives a
    first iteration that still overlaps nothing and a last one that waits for all that is left."""
    return {
        "median_s": statistics.median(times),
        "mean_s": statistics.fmean(times),
        "min_s": min(times),
        "max_s": max(times),
        "iterations": len(times),
    }


def gpu_memory(device: int = 0) -> dict[str, int]:
    """Bytes of one GPU: what everybody holds on it, and what torch's allocator holds and held at most."""
    free, total = torch.cuda.mem_get_info(device)
    return {
        "used_bytes": total - free,
        "reserved_bytes": torch.cuda.memory_reserved(device),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
    }


def peak_held_bytes(memory: dict[str, int], used_before_bytes: int) -> int:
    """Most bytes this process held: the allocator's peak and all that does not come from the allocator (the context and
    the engine's own), counted from what the GPU held before the process."""
    outside_allocator = memory["used_bytes"] - used_before_bytes - memory["reserved_bytes"]
    return memory["peak_reserved_bytes"] + outside_allocator
