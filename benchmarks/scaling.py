"""How does the time of an iteration fall with the number of GPUs?

    python benchmarks/scaling.py --workloads q17,q4,moe,lora
    python benchmarks/scaling.py --workloads tiny --devices host --counts 1,2

Strong scaling: the same batch, plan and microbatches on 1..N devices; efficiency = t(1) / (n * t(n)).
Weak scaling: n times the rows and microbatches on n devices; efficiency = t(1) / t(n).
Steps are asynchronous, by the compact AdamW. Losses of one and of n devices are compared bit for bit before anything is
timed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, gpu_memory, iteration_times, machine_facts, summary, wait_for_devices, write_result
from copy_overlap import profile
from models import MODELS, Dimensions, add_lora, build, random_batch
from workers import worker_times

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines

# forward, backward: layers of each stage, in the order in which they run; the first backward stage is the fused one.
# Two neighbouring jobs run at the same time on two devices, at the pace of the slower one, so they are cut to be about
# equally long. In units of one block's forward a block takes 3 in a fused or backward stage (2 if it is frozen), and
# the head with its loss 14 (q17), 9 (q4), 13 (moe), 4 (lora).
WORKLOADS: dict[str, dict[str, Any]] = {
    "tiny": dict(model="tiny", rows=8, tokens=64, microbatches=4, forward=[2, 2], backward=[2, 2, 2]),
    "q17": dict(model="q17", rows=16, tokens=4096, microbatches=8, forward=[14, 14], backward=[2, 6, 5, 5, 6, 6]),
    "q4": dict(model="q4", rows=16, tokens=4096, microbatches=8, forward=[17, 16], backward=[5, 7, 6, 6, 6, 8]),
    "moe": dict(model="moe", rows=16, tokens=4096, microbatches=8, forward=[8, 8], backward=[2, 5, 5, 6]),
    "lora": dict(
        model="l8",
        rows=16,
        tokens=4096,
        microbatches=8,
        forward=[15, 14],
        backward=[5, 6, 6, 6, 5, 6],
        lora=16,
    ),
}
_TRAFFIC = ("weights", "gradients", "activations", "buffers", "inputs")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="q17", help=f"comma separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--devices", choices=("cuda", "host"), default="cuda" if torch.cuda.is_available() else "host")
    parser.add_argument("--counts", help="comma separated numbers of devices; default: 1 and all")
    parser.add_argument("--kinds", default="strong,weak", help="comma separated: strong, weak")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rows", type=int, help="instead of the workload's")
    parser.add_argument("--tokens", type=int, help="instead of the workload's")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.workloads, args.kinds = args.workloads.split(","), args.kinds.split(",")
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"--workloads: unknown {', '.join(sorted(unknown))}; expected {', '.join(WORKLOADS)}")
    if unknown := set(args.kinds) - {"strong", "weak"}:
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}; expected strong or weak")
    most = torch.cuda.device_count() if args.devices == "cuda" else 2
    args.counts = [int(n) for n in args.counts.split(",")] if args.counts else sorted({1, most})
    return args


def choose_devices(kind: str, count: int) -> None:
    roundpipe.use_devices(f"host:{count}" if kind == "host" else ",".join(f"cuda:{i}" for i in range(count)))


def plan_of(forward: list[int], backward: list[int], num_layers: int) -> ModelExecutePlan:
    plan = ModelExecutePlan()
    start, stop = 0, num_layers
    for length in forward:
        plan.fwd_plan.append(range(start, start + length))
        start += length
    for length in backward:
        plan.bwd_plan.append(range(stop - length, stop))
        stop -= length
    plan.check_valid(num_layers, "fused")
    return plan


class Training:
    """One wrapped model, iterations on whatever devices are chosen."""

    def __init__(self, workload: dict[str, Any], args: argparse.Namespace) -> None:
        self.workload = {**workload, **{k: v for k in ("rows", "tokens") if (v := getattr(args, k))}}
        dims: Dimensions = MODELS[workload["model"]]
        on_gpu = args.devices == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = build(dims, dtype=dtype, device="cuda:0" if on_gpu else "cpu")
        if "lora" in workload:
            add_lora(model, rank=workload["lora"])
        if args.compile:
            for block in model[1:-1]:
                block.compile()
        gc.collect()
        self.dims = dims
        self.model = RoundPipe(model)
        self.plan = plan_of(self.workload["forward"], self.workload["backward"], self.model.num_layers)
        # The rate is tiny on purpose: the time of a step does not depend on it; random tokens teach nothing.
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-6, master="split" if on_gpu else "float32")

    def prepare(self, factor: int) -> None:
        """The batch of `factor` times the workload's rows, in as many times its microbatches."""
        self.pieces = self.workload["microbatches"] * factor
        self.batch = random_batch(self.dims, self.workload["rows"] * factor, self.workload["tokens"])
        self.config = RoundPipeRunConfig(num_microbatch=self.pieces, execute_plan=self.plan)

    def forward_backward(self) -> float:
        pieces = self.pieces
        loss = self.model.forward_backward(self.batch, loss_fn=lambda loss, _: loss / pieces, run_config=self.config)
        return float(loss)

    def iterate(self) -> None:
        self.forward_backward()
        self.model.step(self.optimizer)


def measure(training: Training, count: int, args: argparse.Namespace) -> dict[str, Any]:
    times = iteration_times(training.iterate, args.iterations, args.warmup, training.model.synchronize)
    found: dict[str, Any] = {"devices": count, **summary(times)}
    tokens = training.batch[0].numel()
    found["tokens_per_s"] = tokens / found["median_s"]

    engine = engines.current()
    _ops.engine_reset_bytes(engine.handle)
    with worker_times() as workers:
        training.iterate()
        training.model.synchronize()
    found["workers"] = workers
    names = [f"{direction}_{kind}" for direction in ("up", "down") for kind in _TRAFFIC]
    found["link_bytes"] = [
        dict(zip(names, _ops.engine_bytes(engine.handle, i), strict=True)) for i in range(engine.device_count)
    ]
    if args.devices == "cuda":
        found["memory"] = [gpu_memory(i) for i in range(count)]

        def two_iterations() -> None:
            training.iterate()
            training.iterate()
            training.model.synchronize()
            wait_for_devices()

        profiled = profile(two_iterations)
        found["profile_of_two_iterations"] = profiled
        found["bubble_fraction"] = 1 - profiled["kernel_s"] / (count * 2 * found["median_s"])
    return found


def run_workload(name: str, args: argparse.Namespace) -> dict[str, Any]:
    choose_devices(args.devices, 1)
    training = Training(WORKLOADS[name], args)
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in training.model.model.parameters()),
        "workload": training.workload,
        "plan": str(training.plan),
    }
    training.prepare(1)
    losses = {}
    for count in args.counts:
        choose_devices(args.devices, count)
        losses[count] = training.forward_backward()
        training.model.zero_grad()
    result["losses"] = losses
    result["losses_equal"] = len(set(losses.values())) == 1
    print(f"{name}: {result['parameters'] / 1e9:.3f}e9 parameters, losses equal: {result['losses_equal']} {losses}")
    for kind in args.kinds:
        rows = []
        for count in args.counts:
            choose_devices(args.devices, count)
            training.prepare(count if kind == "weak" else 1)
            if args.devices == "cuda":
                torch.cuda.empty_cache()
            row = measure(training, count, args)
            first = rows[0]["median_s"] * rows[0]["devices"] if rows else row["median_s"] * count
            ideal = first / count if kind == "strong" else first / (rows[0]["devices"] if rows else count)
            row["efficiency"] = ideal / row["median_s"]
            rows.append(row)
            share = max(w["gil_wait_share"] for w in row["workers"].values())
            print(
                f"  {kind}, {count} devices: {row['median_s']:.3f} s (mean {row['mean_s']:.3f}), "
                f"{row['tokens_per_s']:.0f} tokens/s, efficiency {row['efficiency']:.3f}, "
                f"bubbles {row.get('bubble_fraction', float('nan')):.3f}, GIL wait share {share:.3f}",
                flush=True,
            )
        result[kind] = rows
    training.model.synchronize()
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    print(machine_facts())
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    result: dict[str, Any] = {"settings": settings, "results": {}}
    for name in args.workloads:
        result["results"][name] = run_workload(name, args)
        gc.collect()
    print(f"written: {write_result('scaling-' + '-'.join(args.workloads), result, args.results)}")
    return 0 if all(r["losses_equal"] for r in result["results"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
