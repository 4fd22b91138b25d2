"""What do more microbatches save on a device, and what do they cost?

    python benchmarks/microbatch_memory.py --model q17 --rows 16 --tokens 4096 --stage-layers 4
    python benchmarks/microbatch_memory.py --device host:1@1GiB

One plan and one batch, cut into more and more microbatches, with both grains of recompute: the device's peak (torch's
allocator, or the counted peak of a simulated device) and tokens a second. Beside them the peak of the activations kept
on the host so far: the batch is the same, so it does not grow with the number of microbatches.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, iteration_times, machine_facts, summary, wait_for_devices, write_result
from models import MODELS, build, random_batch

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines

MIB = float(1 << 20)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", help="devices as in roundpipe.use_devices; default: the first GPU, else host:1@1GiB"
    )
    parser.add_argument("--model", choices=MODELS, help="default: q17 on a GPU, else tiny")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, help="of a row; default: 4096 on a GPU, else 64")
    parser.add_argument("--microbatches", default="1,2,4,8,16", help="comma separated, at most as many as rows")
    parser.add_argument("--grains", default="stage,layer")
    parser.add_argument("--stage-layers", type=int, default=4, help="layers of each stage, the fused one included")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() else "host:1@1GiB"
    on_gpu = args.device.startswith("cuda")
    args.model = args.model or ("q17" if on_gpu else "tiny")
    args.tokens = args.tokens or (4096 if on_gpu else 64)
    try:
        args.microbatches = [int(count) for count in args.microbatches.split(",")]
    except ValueError:
        parser.error(f"--microbatches: got {args.microbatches!r}, expected whole numbers with commas between them")
    if not all(1 <= count <= args.rows for count in args.microbatches):
        parser.error(f"--microbatches: expected numbers between 1 and {args.rows}, the rows")
    args.grains = args.grains.split(",")
    if set(args.grains) - {"stage", "layer"}:
        parser.error("--grains: expected stage, layer, or both")
    return args


def plan_of(num_layers: int, size: int) -> ModelExecutePlan:
    """Stages of `size` layers; the last one is the fused one."""
    first = max(0, num_layers - size)
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, min(i + size, first)) for i in range(0, first, size)]
    plan.bwd_plan = [range(first, num_layers), *reversed(plan.fwd_plan)]
    plan.check_valid(num_layers, "fused")
    return plan


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    roundpipe.use_devices(args.device)
    device = roundpipe.devices()[0]
    if device.kind == "host" and device.memory_bytes is None:
        raise SystemExit("a simulated device is counted only with a limit: host:1@1GiB")
    print(machine_facts())
    dims = MODELS[args.model]
    batch = random_batch(dims, args.rows, args.tokens)
    model = RoundPipe(build(dims, device=device.device), name="benchmark")
    plan = plan_of(model.num_layers, args.stage_layers)
    points: list[dict[str, Any]] = []
    print(f"{'grain':<8}{'microbatches':>14}{'device peak, MiB':>20}{'tokens/s':>12}{'host peak so far, MiB':>24}")
    for grain in args.grains:
        for count in args.microbatches:
            config = RoundPipeRunConfig(num_microbatch=count, recompute_grain=grain, execute_plan=plan)

            def iterate(config: RoundPipeRunConfig = config, count: int = count) -> None:
                model.forward_backward(batch, loss_fn=lambda loss, _: loss / count, run_config=config)
                model.zero_grad()

            def finish() -> None:
                model.synchronize()
                wait_for_devices()

            if device.kind == "cuda":
                torch.cuda.empty_cache()
            roundpipe.memory.reset_device_peaks()
            times = iteration_times(iterate, args.iterations, args.warmup, finish)
            peak = max(found.peak_bytes or 0 for found in roundpipe.memory_report().devices)
            kept = _ops.engine_live(engines.current().handle)[2]
            speed = args.rows * args.tokens / summary(times)["median_s"]
            points.append(
                {
                    "grain": grain,
                    "num_microbatch": count,
                    "device_peak_bytes": peak,
                    "tokens_per_s": speed,
                    "host_activations_peak_so_far_bytes": kept,
                    "times": summary(times),
                }
            )
            print(f"{grain:<8}{count:>14}{peak / MIB:>20.1f}{speed:>12.0f}{kept / MIB:>24.1f}", flush=True)
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    print(f"written: {write_result('microbatch_memory', {'settings': settings, 'points': points}, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
