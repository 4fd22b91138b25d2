"""How much host memory does it take to train all weights of a model, where they and their optimizer state fill it?

    python benchmarks/large_finetune.py --model l8 --rows 8 --tokens 8192 --cap-gib 24
    python benchmarks/large_finetune.py --model tiny --rows 4 --tokens 64 --microbatches 4 --device host:1

The compact AdamW on one batch of random tokens again and again: the loss must fall. Exact steps by default;
``--steps-are announced`` needs two bytes a parameter less. Peaks are the operating system's: resident memory of the
process from its start, and on a GPU all that the process held. Exit status 1: the loss did not fall.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, gpu_memory, peak_held_bytes, wait_for_devices, write_result
from models import MODELS, build, random_batch

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="as in roundpipe.use_devices; default: the first GPU, else host:1")
    parser.add_argument("--model", choices=list(MODELS), default="l8")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--steps-are", choices=("exact", "announced", "async"), default="exact")
    parser.add_argument("--master", choices=("split", "float32"), default="split")
    parser.add_argument("--state-dtype", default="float32", help="of the moments: float32, bfloat16 or int8")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--cap-gib", type=float, help="cap the GPU")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() else "host:1"
    return args


def resident_bytes() -> dict[str, int]:
    """Of this process: now, and at most since it began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.split() for line in lines}
    return {"now": int(found["VmRSS"][1]) << 10, "at_most": int(found["VmHWM"][1]) << 10}


def run(args: argparse.Namespace) -> dict[str, Any]:
    roundpipe.use_devices(args.device)
    device = roundpipe.devices()[0]
    on_gpu = device.kind == "cuda"
    used_before = 0
    if on_gpu:
        free, total = torch.cuda.mem_get_info(device.device)
        used_before = total - free
    begin = time.perf_counter()
    result: dict[str, Any] = {
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "resident_bytes": {"at the start": resident_bytes()["now"]},
    }

    def note(what: str) -> None:
        held = resident_bytes()
        result["resident_bytes"][what] = held["now"]
        print(f"{time.perf_counter() - begin:7.1f} s  {what}: resident {held['now'] / 2**30:.1f} GiB", flush=True)

    model = build(MODELS[args.model], device=device.device)
    if on_gpu:
        torch.cuda.empty_cache()
        if args.cap_gib:
            torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / total, device.device)
        torch.cuda.reset_peak_memory_stats(device.device)
    result["parameters"] = sum(p.numel() for p in model.parameters())
    note(f"{result['parameters'] / 1e9:.2f}e9 parameters drawn")
    wrapped = RoundPipe(model, name=args.model)
    note("wrapped")
    optimizer = roundpipe.optim.AdamW(wrapped, lr=args.lr, master=args.master, state_dtype=args.state_dtype)
    batch = random_batch(MODELS[args.model], args.rows, args.tokens)
    config = RoundPipeRunConfig(num_microbatch=args.microbatches)
    announced = optimizer if args.steps_are == "announced" else None
    losses, times = [], []
    for step in range(args.steps):
        mark = time.perf_counter()
        loss = wrapped.forward_backward(
            batch, loss_fn=lambda loss, _: loss / args.microbatches, run_config=config, step=announced
        )
        if announced is None:
            wrapped.step(optimizer, is_async=args.steps_are == "async")
        losses.append(loss.item())
        wrapped.synchronize()
        wait_for_devices()
        times.append(time.perf_counter() - mark)
        note(f"step {step}: loss {losses[-1]:.4f}, {times[-1]:.1f} s")
    result |= {"losses": losses, "step_s": times, "tokens_per_s": args.rows * args.tokens / min(times)}
    peak = resident_bytes()["at_most"]
    beside = peak - result["resident_bytes"]["at the start"]
    result |= {"peak_resident_bytes": peak, "peak_bytes_per_parameter": beside / result["parameters"]}
    print(f"host: at most {peak / 2**30:.1f} GiB, {result['peak_bytes_per_parameter']:.2f} bytes a parameter")
    if on_gpu:
        memory = gpu_memory(device.ordinal)
        result["gpu"] = {**memory, "peak_held_bytes": peak_held_bytes(memory, used_before)}
        print(f"GPU: at most {result['gpu']['peak_held_bytes'] / 2**30:.1f} GiB")
    print(roundpipe.memory_report())
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    result = run(args)
    print(f"written: {write_result(f'large_finetune-{args.model}', result, args.results)}")
    if not result["losses"][-1] < result["losses"][0]:
        print("the loss did not fall", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
