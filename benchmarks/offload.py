"""What does keeping saved activations in pinned host memory cost and save, beside plain autograd and checkpointing?

    python benchmarks/offload.py --model q17 --rows 4 --tokens 4096
    python benchmarks/offload.py --model tiny --tokens 64

One stack of decoder blocks, weights on the device, one forward and backward of a batch, no optimizer. Modes: plain;
checkpointed (every block is recomputed in backward); offloaded (roundpipe.offload_activations, nothing recomputed);
checkpointed_offloaded (recomputed from block inputs that wait on the host). A mode that does not fit says so. Losses
and gradients of all modes are compared first. Seconds an iteration after warm-up; peak GPU memory of torch's allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import torch
from baselines import Resident
from common import RESULTS, gpu_memory, iteration_times, machine_facts, summary, wait_for_devices, write_result
from models import MODELS, build, random_batch

import roundpipe

MODES = ("plain", "checkpointed", "offloaded", "checkpointed_offloaded")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--modes", default=",".join(MODES[:3]), help=f"comma separated, of {', '.join(MODES)}")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--min-kib", type=int, help="smallest tensor offloaded; default: 1024, on the CPU 1")
    parser.add_argument("--keep-mib", type=int, default=512, help="newest activations that stay on the device")
    parser.add_argument("--prefetch-mib", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.modes = args.modes.split(",")
    if unknown := set(args.modes) - set(MODES):
        parser.error(f"--modes: unknown {', '.join(sorted(unknown))}; expected {', '.join(MODES)}")
    if args.min_kib is None:
        args.min_kib = 1024 if args.device != "cpu" else 1
    return args


class Mode:
    """One way to run an iteration of the same model on the same batch."""

    def __init__(self, name: str, resident: Resident, batch: tuple[torch.Tensor, torch.Tensor], args) -> None:
        self.resident, self.batch = resident, batch
        self.checkpointed = name.startswith("checkpointed")
        self.offloaded = name.endswith("offloaded")
        self.sizes = dict(
            min_bytes=args.min_kib << 10, keep_bytes=args.keep_mib << 20, prefetch_bytes=args.prefetch_mib << 20
        )
        self.offloaded_bytes = 0

    def iterate(self) -> torch.Tensor:
        self.resident.checkpointed = self.checkpointed
        model = self.resident.model
        context = roundpipe.offload_activations(model, **self.sizes) if self.offloaded else contextlib.nullcontext()
        with context as session:
            loss = self.resident.forward_backward(*self.batch, microbatches=1)
        self.offloaded_bytes = session.offloaded_bytes if session is not None else 0
        return loss


def measure(mode: Mode, args: argparse.Namespace, on_gpu: bool) -> dict[str, Any]:
    """Loss, gradients (popped by the caller), times and memory; or that the device has no room for it."""
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(args.device)

    def iteration() -> None:
        mode.resident.zero_grad()
        mode.iterate()

    try:
        mode.resident.zero_grad()
        loss = mode.iterate().item()
        names = [name for name, _ in mode.resident.model.named_parameters()]
        gradients = mode.resident.gradients(names)
        measured = summary(iteration_times(iteration, args.iterations, args.warmup, wait_for_devices))
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).partition("\n")[0]}
    measured |= {"loss": loss, "gradients": gradients, "offloaded_bytes": mode.offloaded_bytes}
    if on_gpu:
        measured["memory"] = gpu_memory(torch.device(args.device).index or 0)
    return measured


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = wanted.float().norm()
    return ((got.float() - wanted.float()).norm() / scale).item() if scale > 0 else got.float().norm().item()


def run(args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    dims = MODELS[args.model]
    model = build(dims, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    resident = Resident(model, device, checkpointed=False)
    del model
    batch = random_batch(dims, args.rows, args.tokens)
    settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
    modes: dict[str, Any] = {}
    reference: tuple[float, dict[str, torch.Tensor]] | None = None
    agree = True
    for name in args.modes:
        measured = modes[name] = measure(Mode(name, resident, batch, args), args, on_gpu)
        if "out_of_memory" in measured:
            print(f"{name}: {measured['out_of_memory']}")
            continue
        loss, gradients = measured["loss"], measured.pop("gradients")
        reference = reference or (loss, gradients)
        worst = max(relative_error(gradients[key], wanted) for key, wanted in reference[1].items())
        measured["worst_gradient_error"] = worst
        agree = agree and worst <= (2e-2 if on_gpu else 1e-6) and abs(loss - reference[0]) <= 1e-3 * abs(reference[0])
        line = f"{name}: {measured['median_s']:.3f} s, {measured['offloaded_bytes'] / 2**30:.2f} GiB offloaded"
        if on_gpu:
            line += f", peak {measured['memory']['peak_allocated_bytes'] / 2**30:.2f} GiB allocated"
        print(line)
    return {"settings": settings, "modes": modes, "agree": agree}


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    print(machine_facts())
    result = run(args)
    print(f"written: {write_result(f'offload-{args.model}', result, args.results)}")
    return 0 if result["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
