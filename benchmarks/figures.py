"""Measures every figure that the documentation quotes or a goal names, and prints it beside the goal.

    python benchmarks/figures.py --list
    python benchmarks/figures.py --seconds 540 --results OUT
    python benchmarks/figures.py --only W2,W6

Each figure is one run of another benchmark in a process of its own, whose result file is kept; what needs more GPUs
than there are is left out. Runs are made in the order of the table until ``--seconds`` are over: a run that cannot end
in time by its estimate is not begun. Goals hold on one H200 with 16 cores (two H200 for scaling); elsewhere only their
ratios mean something. Exit status 1: a run failed or a goal was missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, write_result

HERE = Path(__file__).parent
Result = dict[str, Any]


@dataclass
class Goal:
    """``least``: the figure must be at least so much; else at most."""

    what: str
    read: Callable[[Result], float]
    bound: float
    least: bool = False

    def met(self, value: float) -> bool:
        return value >= self.bound if self.least else value <= self.bound


@dataclass
class Figure:
    command: str
    goals: list[Goal]
    seconds: float  # on the machine that the goals are for
    gpus: int = 1


def mean_s(mode: str) -> Callable[[Result], float]:
    """An asynchronous iteration's end lies in a later one, so only the mean over many says what one takes."""
    return lambda result: result[mode]["mean_s"]


def step_time(arguments: str, bounds: dict[str, float]) -> tuple[str, list[Goal]]:
    return f"step_time.py {arguments}", [Goal(f"{m}, s an iteration", mean_s(m), bound) for m, bound in bounds.items()]


def efficiency(workload: str) -> Callable[[Result], float]:
    return lambda result: result["results"][workload]["strong"][-1]["efficiency"]


def worst_ratio(result: Result) -> float:
    """Of the estimated to the measured peak of the device or the host, as its distance from 1."""
    found = result["configurations"].values()
    return max(abs(one[f"{what}_ratio"] - 1) for one in found for what in ("device", "host"))


def rate_of(case: str, beside: str) -> Callable[[Result], float]:
    return lambda result: result[case][beside]


def split_beside(other: str, key: str, faster_is_more: bool) -> Callable[[Result], float]:
    """How many times as fast as another row of the same run the update with a split master is."""

    def read(result: Result) -> float:
        rows = {row["variant"]: row[key] for row in result["rows"]}
        return rows["split"] / rows[other] if faster_is_more else rows[other] / rows["split"]

    return read


def drop_in_beside_torch(result: Result) -> float:
    rows = {row["variant"]: row["s_per_1e9_parameters"] for row in result["rows"]}
    return rows["torch_step"] / rows["drop_in"]


def split_seconds(result: Result) -> float:
    return {row["variant"]: row["s_per_1e9_parameters"] for row in result["rows"]}["split"]


def largest_excess(result: Result) -> float:
    """Bytes a parameter over what the format says, as a share."""
    return max(
        one["bytes"] / one["expected"] - 1 for one in result.values() if isinstance(one, dict) and "bytes" in one
    )


PLAN = "--stage-blocks 4 --fused-blocks 4"
COMPACT = f"--optimizer compact {PLAN} --iterations 10 --warmup 3"

FIGURES: dict[str, Figure] = {
    "W2": Figure(*step_time(f"--workload W2 {COMPACT} --iterations 20", {"async": 0.80, "exact": 1.00}), seconds=85),
    "W1": Figure(*step_time(f"--workload W1 {COMPACT}", {"async": 2.50, "exact": 2.75}), seconds=130),
    "W6": Figure(
        "optimizer.py --parameters 1e9 --threads 16",
        [
            Goal("split master, s for 1e9 parameters", split_seconds, 0.22),
            Goal("bandwidth, of a parallel copy", split_beside("copy", "gigabytes_per_s", True), 1.0, least=True),
            Goal(
                "times as fast as torch.optim.AdamW(fused=True)",
                split_beside("torch", "s_per_1e9_parameters", False),
                1.0,
                least=True,
            ),
        ],
        seconds=60,
    ),
    "step": Figure(
        "optimizer.py --variants drop_in,torch_step --together --repeats 24",
        [Goal("drop-in step, times as fast as torch.optim.AdamW(fused=True)", drop_in_beside_torch, 1.0, least=True)],
        seconds=20,
        gpus=0,
    ),
    "pinning": Figure(
        "pin_modes.py --layers 32 --layer-mib 256",
        [
            Goal("alloc: rate, of cudaHostAlloc", rate_of("alloc", "of_link"), 0.98, least=True),
            Goal("register: rate, of cudaHostAlloc", rate_of("register", "of_link"), 0.98, least=True),
            Goal("alloc: host bytes, of the model's", rate_of("alloc", "host_cost"), 1.02),
        ],
        seconds=140,
    ),
    "estimate": Figure("estimate.py", [Goal("largest miss of an estimate", worst_ratio, 0.10)], seconds=230),
    "offload": Figure(
        "offload.py --model q17 --rows 4 --tokens 4096 --modes plain,checkpointed,offloaded,checkpointed_offloaded",
        [],
        seconds=100,
    ),
    "microbatches": Figure("microbatch_memory.py", [], seconds=90),
    "trainer": Figure("hf_trainer.py --workloads qwen3-1.7b,llama-8b-lora", [], seconds=120),
    "W7": Figure(
        "memory_per_parameter.py --width 4096 --few 4 --many 8 --formats split/float32,split/int8",
        [Goal("bytes a parameter, over the format's", largest_excess, 0.02)],
        seconds=60,
        gpus=0,
    ),
    "W5": Figure(
        "large_finetune.py --model l8 --rows 8 --tokens 8192 --cap-gib 24",
        [
            Goal("peak host bytes a parameter", lambda result: result["peak_bytes_per_parameter"], 15.5),
            Goal("last loss, of the first", lambda result: result["losses"][-1] / result["losses"][0], 0.999),
        ],
        seconds=200,
    ),
    "scaling-q17": Figure(
        "scaling.py --workloads q17 --kinds strong --compile",
        [Goal("efficiency from 1 GPU to all", efficiency("q17"), 0.95, least=True)],
        seconds=120,
        gpus=2,
    ),
    "scaling-moe": Figure(
        "scaling.py --workloads moe --kinds strong --compile",
        [Goal("efficiency from 1 GPU to all", efficiency("moe"), 0.90, least=True)],
        seconds=120,
        gpus=2,
    ),
    "scaling-lora": Figure(
        "scaling.py --workloads lora --kinds strong",
        [Goal("efficiency from 1 GPU to all", efficiency("lora"), 0.90, least=True)],
        seconds=120,
        gpus=2,
    ),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FIGURES), help="comma separated; default: all, in this order")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all runs together")
    parser.add_argument("--list", action="store_true", help="print the runs and goals, and run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := [name for name in args.only if name not in FIGURES]:
        parser.error(f"--only: unknown {', '.join(unknown)}; known: {', '.join(FIGURES)}")
    return args


def measure(figure: Figure, results: Path, limit_s: float | None) -> tuple[Result | None, str]:
    """What the run wrote, or None and why not. Its file is moved to ``results``."""
    with tempfile.TemporaryDirectory() as folder:
        script, *arguments = figure.command.split()
        command = [sys.executable, str(HERE / script), *arguments, "--results", folder]
        try:
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, f"did not end within {limit_s:.0f} s"
        files = sorted(Path(folder).glob("*.json"))
        if not files:
            return None, f"exit status {done.returncode}\n{done.stdout[-2000:]}"
        results.mkdir(parents=True, exist_ok=True)
        text = files[-1].read_text()
        (results / files[-1].name).write_text(text)
        if done.returncode:
            return None, f"exit status {done.returncode}, see {files[-1].name}\n{done.stdout[-2000:]}"
        return json.loads(text), ""


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.list:
        for name in args.only:
            figure = FIGURES[name]
            print(f"{name}: {figure.command}")
            for goal in figure.goals:
                print(f"    {goal.what}: {'at least' if goal.least else 'at most'} {goal.bound:g}")
        return 0
    print(machine_facts())
    gpus = torch.cuda.device_count()
    end = time.monotonic() + args.seconds
    table: dict[str, Any] = {}
    missed = False
    for name in args.only:
        figure = FIGURES[name]
        if gpus < figure.gpus:
            table[name] = {"left_out": f"needs {figure.gpus} GPUs, there are {gpus}"}
        elif time.monotonic() + figure.seconds > end:
            table[name] = {"left_out": f"would take about {figure.seconds:.0f} s of {end - time.monotonic():.0f}"}
        else:
            begin = time.monotonic()
            result, why_not = measure(figure, args.results, None if end == float("inf") else end - begin)
            row: dict[str, Any] = {"command": figure.command, "wall_s": round(time.monotonic() - begin, 1)}
            try:
                row["goals"] = {
                    goal.what: {"measured": goal.read(result), "goal": goal.bound, "least": goal.least}
                    for goal in (figure.goals if result is not None else ())
                }
            except KeyError as missing:  # the runs to come are worth their time all the same
                why_not = f"its result has no {missing}"
            if why_not:
                row["failed"] = why_not
            table[name] = row
            missed = missed or bool(why_not)
        missed = show(name, table[name]) or missed
    print(f"written: {write_result('figures', {'figures': table}, args.results)}")
    return int(missed)


def show(name: str, row: dict[str, Any]) -> bool:
    """Prints it; whether a goal was missed."""
    missed = False
    print(f"{name}: " + (row.get("left_out") or row.get("failed") or f"{row['wall_s']} s"), flush=True)
    for goal, (what, found) in zip(FIGURES[name].goals, row.get("goals", {}).items(), strict=False):
        met = goal.met(found["measured"])
        missed = missed or not met
        sign = ">=" if goal.least else "<="
        print(f"    {what}: {found['measured']:.4g} ({sign} {goal.bound:g}){'' if met else '  MISSED'}", flush=True)
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
