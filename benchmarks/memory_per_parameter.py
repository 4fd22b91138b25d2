"""How many bytes of host memory does a trained parameter take, as the operating system counts them?

    python benchmarks/memory_per_parameter.py --device cuda:0 --width 4096
    python benchmarks/memory_per_parameter.py --device host:1 --modes exact,async,announced --formats split/int8

Two models of equal layers, one with more of them, are trained for a few steps of AdamW, each in a process of its own.
The slope of the resident memory between them is what a parameter costs; what does not grow with the model (libraries,
the regions of simulated devices) drops out. Batches are tiny, so that activations do not count. bfloat16 weights.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, write_result
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

EXPECTED = {  # bytes of an exact step: weight, gradient, master, moments
    "split/float32": 14,
    "split/bfloat16": 10,
    "float32/float32": 16,
    "float32/bfloat16": 12,
    "split/int8": 8.03,
    "float32/int8": 10.03,
    "torch": 20,
}
# Asynchronous: a second copy of the weights. Announced: no gradients, which pass through a pool of constant size.
BESIDE = {"exact": 0, "async": 2, "announced": -2}
LINEARS = 4  # in a layer
ROWS = 8


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="devices as in roundpipe.use_devices; default: the first GPU, else host:1")
    parser.add_argument("--width", type=int, default=1024, help="a layer has four times its square of parameters")
    parser.add_argument("--few", type=int, default=4, help="layers of the smaller model")
    parser.add_argument("--many", type=int, default=16, help="layers of the larger model")
    parser.add_argument("--modes", default="exact,async,announced", help="comma separated; torch knows no announced")
    parser.add_argument("--formats", default=",".join(EXPECTED), help="comma separated: master/moments, or torch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=3, metavar=("LAYERS", "MODE", "FORMAT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() else "host:1"
    return args


def resident_bytes() -> int:
    """Of this process, page-locked memory included."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/smaps_rollup has no Rss")


def layer(width: int) -> nn.Module:
    linears = [
        torch.nn.utils.skip_init(nn.Linear, width, width, bias=False, dtype=torch.bfloat16) for _ in range(LINEARS)
    ]
    for linear in linears:
        nn.init.constant_(linear.weight, 1 / width)  # random numbers would take longer than all the rest
    return nn.Sequential(*linears)


def one_layer_stages(layers: int) -> ModelExecutePlan:
    """The same region of device memory whatever the number of layers."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(layers - 1)]
    plan.bwd_plan = [range(i, i + 1) for i in reversed(range(layers))]
    return plan


def measure_here(args: argparse.Namespace, layers: int, mode: str, formats: str) -> dict[str, int]:
    """Trains one model in this process and counts its memory."""
    roundpipe.use_devices(args.device)
    model = RoundPipe(
        nn.Sequential(*(layer(args.width) for _ in range(layers))),
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=one_layer_stages(layers)),
    )
    step: Any
    if formats == "torch":
        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        step = lambda: (optimizer.step(), optimizer.zero_grad())  # noqa: E731
    else:
        master, state_dtype = formats.split("/")
        step = roundpipe.optim.AdamW(model, lr=1e-6, master=master, state_dtype=state_dtype)
    batch = torch.ones(ROWS, args.width, dtype=torch.bfloat16)
    for _ in range(args.steps):
        announced = step if mode == "announced" else None
        model.forward_backward((batch,), loss_fn=lambda out, _: out.float().square().mean(), step=announced)
        if announced is None:
            model.step(step, is_async=mode == "async")
    model.synchronize()
    parameters = sum(p.numel() for p in model.model.parameters())
    return {"parameters": parameters, "resident_bytes": resident_bytes()}


def measure(args: argparse.Namespace, layers: int, mode: str, formats: str) -> dict[str, int]:
    command = [sys.executable, __file__, "--device", args.device, "--width", str(args.width)]
    command += ["--steps", str(args.steps), "--child", str(layers), mode, formats]
    # Freed tensors go back to the system at once, instead of counting as ours.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(printed.splitlines()[-1])  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.child:
        layers, mode, formats = args.child
        print(json.dumps(measure_here(args, int(layers), mode, formats)))
        return 0
    print(machine_facts())
    result: dict[str, Any] = {"settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)}}
    for formats in args.formats.split(","):
        for mode in args.modes.split(","):
            if formats == "torch" and mode == "announced":
                continue
            small, large = (measure(args, layers, mode, formats) for layers in (args.few, args.many))
            parameters = large["parameters"] - small["parameters"]
            slope = (large["resident_bytes"] - small["resident_bytes"]) / parameters
            expected = EXPECTED[formats] + BESIDE[mode] * (formats != "torch")
            result[f"{formats} {mode}"] = {"bytes": slope, "expected": expected, "small": small, "large": large}
            print(f"{formats}, {mode}: {slope:.2f} bytes a parameter, expected {expected}")
    print(f"written: {write_result('memory_per_parameter', result, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
