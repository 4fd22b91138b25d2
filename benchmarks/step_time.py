"""How long is one training iteration, beside the same model held on the GPU as a whole without an optimizer?

    python benchmarks/step_time.py --workload W1 --modes async,exact --baseline checkpoint
    python benchmarks/step_time.py --workload W2 --optimizer compact --max-grad-norm 1.0
    python benchmarks/step_time.py --model tiny --device host:1 --rows 4 --tokens 64 --microbatches 2

Both run in one process, on the same weights and tokens, and their losses and gradients are compared first. Times are
seconds an iteration, after warm-up. Only ratios of one run carry over to another machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from baselines import Resident
from common import (
    RESULTS,
    gpu_memory,
    iteration_times,
    machine_facts,
    peak_held_bytes,
    summary,
    wait_for_devices,
    write_result,
)
from copy_overlap import profile
from models import MODELS, build, random_batch

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig

WORKLOADS = {
    "W1": dict(model="q17", rows=16, tokens=4096, microbatches=8),
    "W2": dict(model="q17", rows=4, tokens=4096, microbatches=4),
}
SMALL = dict(model="tiny", rows=4, tokens=64, microbatches=2)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, help="sets model, rows, tokens and microbatches")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--microbatches", type=int)
    parser.add_argument("--device", help="devices as in roundpipe.use_devices; default: the first GPU, else host:1")
    parser.add_argument("--modes", default="async,exact", help="comma separated: async, exact, frozen (no optimizer)")
    parser.add_argument(
        "--optimizer",
        choices=("torch", "compact"),
        default="torch",
        help="torch.optim.AdamW on a float32 copy, or roundpipe.optim.AdamW on the weights themselves",
    )
    parser.add_argument("--master", choices=("split", "float32"), default="split", help="of the compact optimizer")
    parser.add_argument("--state-dtype", default="float32", help="of the compact optimizer's moments")
    parser.add_argument("--max-grad-norm", type=float, help="of the compact optimizer; default: no clipping")
    parser.add_argument("--baseline", choices=("checkpoint", "keep", "none"), default="checkpoint")
    parser.add_argument("--grain", choices=("stage", "layer"), default="stage")
    parser.add_argument("--stage-blocks", type=int, help="layers a stage, for an explicit plan")
    parser.add_argument("--fused-blocks", type=int, help="blocks of the fused stage, for an explicit plan")
    parser.add_argument("--cap-gib", type=float, help="cap the GPU, and plan for 60 %% of it")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="also profile one iteration of each mode")
    parser.add_argument("--timelines", type=Path, help="a directory for timelines of three iterations of each mode")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    for name, value in WORKLOADS.get(args.workload, SMALL).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() else "host:1"
    args.modes = args.modes.split(",")
    if unknown := set(args.modes) - {"async", "exact", "frozen"}:
        parser.error(f"--modes: unknown {', '.join(sorted(unknown))}; expected async, exact or frozen")
    return args


def explicit_plan(num_layers: int, stage_blocks: int, fused_blocks: int) -> ModelExecutePlan:
    """The last `fused_blocks` blocks and the head are the fused stage, the others go in stages of `stage_blocks`."""
    first_fused = max(0, num_layers - 1 - fused_blocks)
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, min(i + stage_blocks, first_fused)) for i in range(0, first_fused, stage_blocks)]
    plan.bwd_plan = [range(first_fused, num_layers), *reversed(plan.fwd_plan)]
    plan.check_valid(num_layers, "fused")
    return plan


def choose_plan(model: RoundPipe, args: argparse.Namespace) -> ModelExecutePlan | None:
    if args.stage_blocks or args.fused_blocks:
        return explicit_plan(model.num_layers, args.stage_blocks or 1, args.fused_blocks or 0)
    if args.cap_gib:
        return ModelExecutePlan.auto("fused", model, model_memory_limit=0.6 * args.cap_gib * 1.073741824)
    return None


def watched_parameters(model: torch.nn.Sequential) -> list[str]:
    """A few gradients that pass through everything: first and last block, embedding, and the head's norm."""
    last = len(model) - 2
    return [
        "0.tokens.weight",
        "1.q.weight",
        "1.down.weight",
        f"{last}.k.weight",
        f"{last}.up.weight",
        f"{last + 1}.norm.weight",
    ]


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


class Streamed:
    """The RoundPipe side: one wrapper, iterations in a mode."""

    def __init__(self, model: torch.nn.Sequential, args: argparse.Namespace) -> None:
        self.model = RoundPipe(model, optim_dtype=torch.float32, name="benchmark")
        self.plan = choose_plan(self.model, args)
        self.args = args
        self.config = RoundPipeRunConfig(
            num_microbatch=args.microbatches, recompute_grain=args.grain, execute_plan=self.plan
        )
        self.optimizer: torch.optim.Optimizer | None = None

    def forward_backward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pieces = self.args.microbatches
        return self.model.forward_backward(batch, loss_fn=lambda loss, _: loss / pieces, run_config=self.config)

    def iterate(self, batch: tuple[torch.Tensor, torch.Tensor], mode: str) -> torch.Tensor:
        loss = self.forward_backward(batch)
        if mode == "frozen":
            self.model.zero_grad()
        else:
            update = self.optimizer if self.args.optimizer == "compact" else self._update
            self.model.step(update, is_async=mode == "async")
        return loss

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prepare(self, mode: str) -> None:
        if mode != "frozen" and self.optimizer is None and self.args.optimizer == "compact":
            self.optimizer = roundpipe.optim.AdamW(
                self.model,
                lr=1e-6,
                master=self.args.master,
                state_dtype=self.args.state_dtype,
                max_grad_norm=self.args.max_grad_norm,
            )
        elif mode != "frozen" and self.optimizer is None:
            with roundpipe.OptimizerCtx():
                # The rate is tiny on purpose: the time of a step does not depend on it; random tokens teach nothing.
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)


def compare(streamed: Streamed, resident: Resident, batch, args: argparse.Namespace) -> dict[str, Any]:
    """Loss and gradients of one iteration on both sides, before any weight has moved."""
    names = watched_parameters(resident.model)
    wanted_loss = resident.forward_backward(*batch, args.microbatches).item()
    wanted = resident.gradients(names)
    resident.zero_grad()
    loss = streamed.forward_backward(batch).item()
    streamed.model.synchronize()
    parameters = dict(streamed.model.model.named_parameters())
    errors = {name: relative_error(parameters[name].grad, wanted[name]) for name in names}
    streamed.model.zero_grad()
    bf16 = next(resident.model.parameters()).dtype == torch.bfloat16
    worst = max(errors.values())
    agree = abs(loss - wanted_loss) <= 2e-3 * abs(wanted_loss) and worst <= (3e-2 if bf16 else 1e-4)
    return {"loss": loss, "baseline_loss": wanted_loss, "gradient_errors": errors, "agree": agree}


def run(args: argparse.Namespace) -> dict[str, Any]:
    roundpipe.use_devices(args.device)
    on_gpu = roundpipe.devices()[0].kind == "cuda"
    device = roundpipe.devices()[0].device
    result: dict[str, Any] = {"settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)}}
    used_before = 0
    if on_gpu:
        free, total = torch.cuda.mem_get_info(device)
        used_before = total - free
        if args.cap_gib:
            torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / total, device)
    dims = MODELS[args.model]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = build(dims, dtype=dtype, device=device)
    batch = random_batch(dims, args.rows, args.tokens)
    streamed = Streamed(model, args)
    print(f"{args.model}: {sum(p.numel() for p in model.parameters()) / 1e9:.3f}e9 parameters on {args.device}")
    if streamed.plan is not None:
        print(f"plan: {streamed.plan}")

    if args.baseline != "none":
        resident = Resident(model, device, checkpointed=args.baseline == "checkpoint")
        result["comparison"] = compare(streamed, resident, batch, args)
        print(f"comparison: {result['comparison']}")

        def baseline_iteration() -> None:
            resident.forward_backward(*batch, args.microbatches)
            resident.zero_grad()

        times = iteration_times(baseline_iteration, args.iterations, args.warmup, wait_for_devices)
        result["baseline"] = summary(times)
        print(f"baseline ({args.baseline}): {result['baseline']['median_s']:.3f} s")
        del resident, baseline_iteration

    for mode in args.modes:
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        result[mode] = measure(streamed, batch, mode, args, on_gpu, used_before, result.get("baseline"))
    result["losses"] = [streamed.forward_backward(batch).item()]
    streamed.model.synchronize()
    return result


def measure(streamed: Streamed, batch, mode: str, args, on_gpu: bool, used_before: int, baseline) -> dict[str, Any]:
    streamed.prepare(mode)
    times = iteration_times(
        lambda: streamed.iterate(batch, mode), args.iterations, args.warmup, streamed.model.synchronize
    )
    measured = summary(times)
    line = f"{mode}: {measured['median_s']:.3f} s (mean {statistics.fmean(times):.3f})"
    if baseline:
        measured["ratio_to_baseline"] = measured["median_s"] / baseline["median_s"]
        line += f", {measured['ratio_to_baseline']:.3f} of the baseline"
    if on_gpu:
        memory = gpu_memory(roundpipe.devices()[0].ordinal)
        measured["memory"] = {**memory, "peak_held_bytes": peak_held_bytes(memory, used_before)}
        line += f", GPU held at most {measured['memory']['peak_held_bytes'] / 2**30:.2f} GiB"
    if args.profile and on_gpu:

        def profiled() -> None:
            streamed.iterate(batch, mode)
            streamed.iterate(batch, mode)
            streamed.model.synchronize()
            wait_for_devices()

        measured["profile_of_two_iterations"] = profile(profiled)
        line += f"\n  profile of two iterations: {measured['profile_of_two_iterations']}"
    print(line)
    if args.timelines:  # `timeline_gaps.py` reads them
        args.timelines.mkdir(parents=True, exist_ok=True)
        with roundpipe.trace(args.timelines / f"{mode}.json"):
            for _ in range(3):
                streamed.iterate(batch, mode)
            streamed.model.synchronize()
    return measured


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    print(machine_facts())
    result = run(args)
    print(f"written: {write_result(f'step_time-{args.workload or args.model}', result, args.results)}")
    return 0 if result.get("comparison", {"agree": True})["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
