"""What does each `pin_model` cost on the host, and how fast do weights go up?

    python benchmarks/pin_modes.py --device cuda:0 --layers 32 --layer-mib 256
    python benchmarks/pin_modes.py --device host:1 --layers 8 --layer-mib 32

A model of equal layers that compute next to nothing is called again and again: a call takes as long as its weights.
Rates are bytes a second, the best of `--rounds` calls, each mode in a process of its own:

    alloc, register         pinned, copied or in place
    off                     pageable memory of the process
    off, file in cache      mapped from a file that the system holds in memory
    off, file on disk       mapped from a file of which nothing is in memory

Beside them, in the same process: the link (torch copying pinned memory to the device; on simulated devices a memcpy),
memcpy into pinned memory, and reading the file from the disk in order. Host cost: resident memory after wrapping less
before the model was made, as a multiple of the weights; peak: how far it rose above that while wrapping.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, wait_for_devices, write_result
from file_weights import Looked, drop_pages, make_file, mapped_weights, read_rate
from torch import Tensor, nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops

CASES = ("alloc", "register", "off", "off, file in cache", "off, file on disk")
WIDTH = 64
MIB = 1 << 20


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="as in roundpipe.use_devices; default: the first GPU, else host:1")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layer-mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--cases", default=";".join(CASES), help="separated by semicolons")
    parser.add_argument("--folder", type=Path, help="where the file of weights is made; default: a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() else "host:1"
    return args


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def best_rate(size_bytes: int, rounds: int, run: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    best = 0.0
    for _ in range(rounds):
        if before is not None:
            before()
        wait_for_devices()
        begin = time.perf_counter()
        run()
        wait_for_devices()
        best = max(best, size_bytes / (time.perf_counter() - begin))
    return best


def link_rates(device: str, source: Tensor | None) -> dict[str, float]:
    """Of the same chunks that are streamed, 16 MiB: up from pinned memory, and into pinned memory from `source`."""
    chunk = 16 * MIB
    pinned = _ops.host_empty([16 * chunk], torch.uint8)
    target = torch.empty_like(pinned, device=device if device.startswith("cuda") else "cpu")

    def up() -> None:
        for to, come in zip(target.split(chunk), pinned.split(chunk), strict=True):
            to.copy_(come, non_blocking=True)

    own = torch.ones_like(pinned) if source is None else source.view(torch.uint8).flatten()[: pinned.numel()]
    count = own.numel()
    up()
    return {
        "link": best_rate(pinned.numel(), 5, up),
        "memcpy_to_pinned": best_rate(count, 5, lambda: pinned[:count].copy_(own)),
    }


def plan(layers: int) -> ModelExecutePlan:
    """A layer is a stage, so that one is computed while the next ones come."""
    made = ModelExecutePlan()
    made.fwd_plan = [range(i, i + 1) for i in range(layers)]
    made.bwd_plan = [range(i, i + 1) for i in reversed(range(layers))]
    return made


def measure_here(args: argparse.Namespace, case: str, path: Path) -> dict[str, Any]:
    roundpipe.use_devices(args.device)
    layer_bytes = args.layer_mib * MIB
    size_bytes = args.layers * layer_bytes
    _ops.drop_quietly(RoundPipe, nn.Linear(8, 8))  # the engine's own memory is there before anything is counted
    gc.collect()
    baseline = status_bytes("VmRSS")
    if "file" in case:
        weights = mapped_weights(path, args.layers)
    else:
        weights = [torch.full((layer_bytes // 2,), 0.5, dtype=torch.bfloat16) for _ in range(args.layers)]
    layers = nn.Sequential(*(Looked(weight, WIDTH) for weight in weights))
    layers.requires_grad_(False)
    if "file" not in case:
        weights.clear()  # nobody but the model holds them
    made = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    begin = time.perf_counter()
    model = RoundPipe(layers, pin_model=case.partition(",")[0])
    wrapping_s = time.perf_counter() - begin
    gc.collect()
    found: dict[str, Any] = {
        "weights_bytes": size_bytes,
        "wrapping_s": wrapping_s,
        "host_cost": (status_bytes("VmRSS") - baseline) / size_bytes,
        "peak_over_model_bytes": max(0, status_bytes("VmHWM") - made),
    }
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan(args.layers))
    x = torch.zeros(1, WIDTH)

    def run() -> None:
        with torch.no_grad():
            model(x, roundpipe_run_config=config)

    run()
    if "disk" in case:
        drop_pages(path, weights)
        found["read_in_order"] = max(read_rate(path) for _ in range(2))
        found["rate"] = best_rate(size_bytes, args.rounds, run, before=lambda: drop_pages(path, weights))
        found["of_disk"] = found["rate"] / found["read_in_order"]
    else:
        found["rate"] = best_rate(size_bytes, args.rounds, run)
    found |= link_rates(args.device, weights[0] if "cache" in case else None)
    found["of_link"] = found["rate"] / found["link"]
    found["of_memcpy"] = found["rate"] / min(found["memcpy_to_pinned"], found["link"])
    return found


def measure(args: argparse.Namespace, case: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", args.device, "--layers", str(args.layers)]
    command += ["--layer-mib", str(args.layer_mib), "--rounds", str(args.rounds), "--child", case, str(path)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed tensors go back to the system at once
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{case}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.child:
        print(json.dumps(measure_here(args, args.child[0], Path(args.child[1]))))
        return 0
    print(machine_facts())
    cases = args.cases.split(";")
    result: dict[str, Any] = {"settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)}}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "weights.bin"
        if any("file" in case for case in cases):
            make_file(path, args.layers * args.layer_mib * MIB)
        for case in cases:
            found = result[case] = measure(args, case, path)
            line = f"{case}: {found['rate'] / 1e9:.2f} GB/s ({found['of_link']:.2f} of the link"
            line += f", {found['of_disk']:.2f} of the disk" if "of_disk" in found else ""
            print(f"{line}), {found['host_cost']:.3f} x on the host, wrapped in {found['wrapping_s']:.2f} s")
    print(f"written: {write_result('pin_modes', result, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
