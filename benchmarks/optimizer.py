"""How long does the host take for a whole optimizer step: scale gradients, update, publish low-precision weights?

    python benchmarks/optimizer.py --parameters 1e9 --threads 16
    python benchmarks/optimizer.py --parameters 1e7 --repeats 3
    python benchmarks/optimizer.py --variants drop_in,torch_step --together

AdamW on bfloat16 gradients and weights, in seconds per 1e9 parameters. Ours is one pass; the baseline is what a plain
loop does around torch.optim.AdamW(fused=True): cast the gradients, scale them, step, cast the weights. Bytes are those
that each must move at least (every input read once, every output written once; a pass of its own counts anew), and the
bandwidth is to be read beside that of a parallel copy in the same run. Variants take turns, so that a machine that
changes its pace changes all of them.

"drop_in" and "torch_step" are the bare steps of roundpipe.optim.AdamW and of torch.optim.AdamW(fused=True) on float32
parameters and gradients; "deepspeed_step" is that of DeepSpeed's CPU Adam, where the package is installed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, summary, write_result
from torch import Tensor

from roundpipe import _ops, optim

OPTIONS: dict[str, Any] = dict(lr=1e-2, eps=1e-8, weight_decay=0.1)
BETAS = (0.9, 0.999)
FACTOR = 0.5
STEP = 10
BARE_STEPS = ("drop_in", "torch_step", "deepspeed_step")


@dataclass
class Variant:
    """One way to do the step. `bytes_per_parameter` counts what must be read and written."""

    name: str
    bytes_per_parameter: int
    run: Callable[[], Any]
    weights: list[Tensor]  # published, for the comparison of results


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e8, help="in all; 16 to 28 bytes each for one variant")
    parser.add_argument("--tensor", type=float, default=16e6, help="parameters a tensor")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", default="", help="instruction set of our kernels; default: the best")
    parser.add_argument("--variants", default="float32,split,split+bfloat16,torch", help="comma separated")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--together", action="store_true", help="hold all variants at once and let them take turns")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def sizes_of(parameters: int, tensor: int) -> list[int]:
    return [min(tensor, parameters - begin) for begin in range(0, parameters, tensor)]


def filled(sizes: list[int], dtype: torch.dtype, scale: float, seed: int) -> list[Tensor]:
    """Random numbers, repeated: making them all anew would take longer than the benchmark."""
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(seed)).mul_(scale).to(dtype)
    made = [torch.empty(n, dtype=dtype) for n in sizes]
    for tensor in made:
        for piece in tensor.split(len(block)):
            piece.copy_(block[: len(piece)])
    return made


def zeros(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.empty(n, dtype=dtype).zero_() for n in sizes]


def ours(name: str, sizes: list[int]) -> Variant:
    masters = filled(sizes, torch.float32, 0.02, seed=1)
    gradients = filled(sizes, torch.bfloat16, 1.0, seed=2)
    published = zeros(sizes, torch.bfloat16)
    moments = torch.bfloat16 if name == "split+bfloat16" else torch.float32
    seeds = list(range(len(sizes))) if moments == torch.bfloat16 else []
    bytes_per_parameter = 2 + 4 * moments.itemsize
    if name == "float32":
        bytes_per_parameter += 4 + 4 + 2
    else:
        bytes_per_parameter += 4 + 4
        for index, master in enumerate(masters):
            masters[index] = torch.empty(len(master), dtype=torch.int16)
            _ops.split_master(master, published[index], masters[index])
    averages, variances = zeros(sizes, moments), zeros(sizes, moments)

    def run() -> None:
        _ops.adam_update(
            masters, published, gradients, averages, variances, [], [float(STEP)] * len(sizes), beta1=BETAS[0],
            beta2=BETAS[1], decoupled=True, factor=FACTOR, seeds=seeds, **OPTIONS,
        )  # fmt: skip

    return Variant(name, bytes_per_parameter, run, published)


def plain(sizes: list[int]) -> Variant:
    masters = filled(sizes, torch.float32, 0.02, seed=1)
    gradients = filled(sizes, torch.bfloat16, 1.0, seed=2)
    published = zeros(sizes, torch.bfloat16)
    for master in masters:
        master.requires_grad_()
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, betas=BETAS, fused=True, **OPTIONS)
    for master in masters:
        optimizer.state[master] = {
            "step": torch.tensor(STEP - 1.0),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }

    @torch.no_grad()
    def run() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            assert master.grad is not None
            master.grad.copy_(gradient)
            master.grad.mul_(FACTOR)
        optimizer.step()
        for master, target in zip(masters, published, strict=True):
            target.copy_(master)
        for master in masters:  # the same step every time, as ours
            optimizer.state[master]["step"].fill_(STEP - 1.0)

    cast, scale, step, publish = 2 + 4, 4 + 4, 4 * 4 + 3 * 4, 4 + 2
    return Variant("torch", cast + scale + step + publish, run, published)


def bare_step(name: str, sizes: list[int]) -> Variant:
    parameters = [torch.nn.Parameter(weight) for weight in filled(sizes, torch.float32, 0.02, seed=1)]
    for parameter, gradient in zip(parameters, filled(sizes, torch.float32, 1.0, seed=2), strict=True):
        parameter.grad = gradient
    optimizer: Any
    if name == "drop_in":
        optimizer = optim.AdamW(parameters, betas=BETAS, **OPTIONS)
    elif name == "deepspeed_step":
        optimizer = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(parameters, betas=BETAS, **OPTIONS)
    else:
        optimizer = torch.optim.AdamW(parameters, betas=BETAS, fused=True, **OPTIONS)
    return Variant(name, 4 * 4 + 3 * 4, optimizer.step, [p.detach() for p in parameters])


def copy_variant(parameters: int) -> Variant:
    source, target = torch.empty(parameters).zero_(), torch.empty(parameters).zero_()
    return Variant("copy", 8, lambda: target.copy_(source), [])


def measure(variants: list[Variant], repeats: int, warmup: int, parameters: int) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {v.name: [] for v in variants}
    for index in range(warmup + repeats):
        first = index % len(variants)  # who comes after whom makes some percent
        for variant in variants[first:] + variants[:first]:
            begin = time.perf_counter()
            variant.run()
            if index >= warmup:
                times[variant.name].append(time.perf_counter() - begin)
    rows = []
    for variant in variants:
        figures = summary(times[variant.name])
        rows.append(
            {
                "variant": variant.name,
                "bytes_per_parameter": variant.bytes_per_parameter,
                "s_per_1e9_parameters": figures["median_s"] * 1e9 / parameters,
                "gigabytes_per_s": variant.bytes_per_parameter * parameters / figures["median_s"] / 1e9,
                **figures,
            }
        )
    return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    _ops.isa_force(args.isa)
    parameters = int(args.parameters)
    sizes = sizes_of(parameters, int(args.tensor))
    names = [name for name in args.variants.split(",") if name]
    makers: dict[str, Callable[[], Variant]] = {
        "torch": lambda: plain(sizes),
        **{name: lambda name=name: bare_step(name, sizes) for name in BARE_STEPS},
        **{name: lambda name=name: ours(name, sizes) for name in ("float32", "split", "split+bfloat16")},
    }
    rows: list[dict[str, Any]] = []
    weights: dict[str, Tensor] = {}
    for group in [names] if args.together else [[name] for name in names]:
        variants = [copy_variant(parameters)] + [makers[name]() for name in group]
        rows += measure(variants, args.repeats, args.warmup, parameters)
        weights.update({v.name: v.weights[0][:100_000].float() for v in variants[1:]})
        del variants
    first = weights[names[0]]
    return {
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "isa": _ops.isa_active(),
        "tensors": len(sizes),
        "rows": rows,
        "largest_weight_difference": max((w - first).abs().max().item() for w in weights.values()),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    result = run(args)
    facts = machine_facts()
    print(f"{facts['cpu']}, {args.threads} threads, {result['isa']}, {int(args.parameters):.3g} parameters")
    for row in result["rows"]:
        print(
            f"{row['variant']:>16}: {row['s_per_1e9_parameters']:.3f} s per 1e9 parameters, "
            f"{row['bytes_per_parameter']} bytes each, {row['gigabytes_per_s']:.1f} GB/s"
        )
    print(f"published weights differ by at most {result['largest_weight_difference']:.1e}")
    print(f"written: {write_result('optimizer', result, args.results)}")
    if (
        result["largest_weight_difference"] > 4e-3
    ):  # a few roundings of bfloat16; each step moves a weight by about the learning rate
        print("the variants do not compute the same", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
