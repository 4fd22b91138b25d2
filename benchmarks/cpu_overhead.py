"""What does the engine itself cost? One simulated device, against the plain loop over the same microbatches.

    python benchmarks/cpu_overhead.py

Nothing is slow about a simulated device's memory, so all that RoundPipe adds (planning, tickets, copies, threads,
recompute of what its plan recomputes) shows up in the ratio of the two step times. Iterations of both take turns, so
that a machine that changes its pace changes both. The goal is a ratio of at most 1.6.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, write_result
from models import Dimensions, build, random_batch

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

GOAL = 1.6


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--async", dest="is_async", action="store_true", help="let the optimizer run beside")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def plain_loop(model: torch.nn.Sequential, batch, microbatches: int) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def iterate() -> float:
        total = 0.0
        for ids, labels in zip(*(t.chunk(microbatches) for t in batch), strict=True):
            state = model[0](ids, labels)
            for layer in model[1:]:
                state = layer(state)
            loss = state / microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return iterate


def streamed_loop(model: RoundPipe, batch, microbatches: int, is_async: bool) -> Callable[[], float]:
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = RoundPipeRunConfig(num_microbatch=microbatches)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def iterate() -> float:
        loss = model.forward_backward(batch, loss_fn=lambda loss, _: loss / microbatches, run_config=config).item()
        model.step(update, is_async=is_async)
        return loss

    return iterate


def run(args: argparse.Namespace) -> dict[str, Any]:
    roundpipe.use_devices("host:1")
    dims = Dimensions(
        hidden=args.hidden, layers=args.layers, heads=4, kv_heads=2, head_dim=args.hidden // 4, mlp=3 * args.hidden,
        vocabulary=2048, tied=True,
    )  # fmt: skip
    model = build(dims, dtype=torch.float32)
    batch = random_batch(dims, args.rows, args.tokens)
    plain = plain_loop(copy.deepcopy(model), batch, args.microbatches)
    wrapper = RoundPipe(model, name="cpu_overhead")
    streamed = streamed_loop(wrapper, batch, args.microbatches, args.is_async)
    times: dict[str, list[float]] = {"plain": [], "streamed": []}
    losses: dict[str, list[float]] = {"plain": [], "streamed": []}
    for index in range(args.warmup + args.iterations):
        for name, iterate in (("plain", plain), ("streamed", streamed)):
            begin = time.perf_counter()
            losses[name].append(iterate())
            if name == "streamed" and not args.is_async:
                wrapper.synchronize()
            if index >= args.warmup:
                times[name].append(time.perf_counter() - begin)
    wrapper.synchronize()
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "plain_s": medians["plain"],
        "streamed_s": medians["streamed"],
        "ratio": medians["streamed"] / medians["plain"],
        "goal": GOAL,
        "last_losses": {name: values[-1] for name, values in losses.items()},
        "largest_loss_difference": max(abs(a - b) for a, b in zip(*losses.values(), strict=True)),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    result = run(args)
    print(machine_facts())
    print(
        f"plain {result['plain_s'] * 1e3:.1f} ms, streamed {result['streamed_s'] * 1e3:.1f} ms, "
        f"ratio {result['ratio']:.2f} (goal: at most {GOAL}), losses differ by {result['largest_loss_difference']:.1e}"
    )
    print(f"written: {write_result('cpu_overhead', result, args.results)}")
    if not args.is_async and result["largest_loss_difference"] > 1e-3:
        print("the two loops do not compute the same", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
