"""How close is an estimate of memory to what a run takes?

    python benchmarks/estimate.py
    python benchmarks/estimate.py --device host:1@2GiB --configurations tiny-stage,tiny-layer

Each configuration runs in a process of its own, under a cap of the GPU's memory where it names one: the estimate comes
first, from a model that has been built but not wrapped, then a few iterations with the settings that it was made for.
On the device the peak of torch's allocator is compared (of a simulated one: the counted peak), on the host what
`memory_report()` knows and the peak that the system counts. A difference above 10 % is marked.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, write_result
from models import MODELS, add_lora, build, random_batch

import roundpipe
from roundpipe import RoundPipe, _ops
from roundpipe import engine as engines

GIB = float(1 << 30)
WANTED = 0.1

# grain, optimizer and rank of adapters as in roundpipe.estimate_memory; cap_gib: of the GPU; accumulates: no step.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "q06-8x2048": dict(model="q06", rows=8, tokens=2048, pieces=4, cap_gib=24),
    "q17-16x4096": dict(model="q17", rows=16, tokens=4096, pieces=8, cap_gib=24),
    "q17-4x4096-whole": dict(model="q17", rows=4, tokens=4096, pieces=4),
    "q17-1x65536-layer": dict(model="q17", rows=1, tokens=65536, pieces=1, grain="layer", cap_gib=24),
    "q4-8x4096-int8": dict(model="q4", rows=8, tokens=4096, pieces=8, optimizer="compact:split/int8", cap_gib=40),
    "l8-4x8192-lora": dict(model="l8", rows=4, tokens=8192, pieces=4, lora=16, cap_gib=48),
    "tiny-stage": dict(model="tiny", rows=8, tokens=128, pieces=4),
    "tiny-layer": dict(model="tiny", rows=8, tokens=128, pieces=4, grain="layer", optimizer="adamw"),
    "tiny-lora": dict(model="tiny", rows=8, tokens=128, pieces=2, lora=4),
}
DEFAULT = [name for name in CONFIGURATIONS if not name.startswith("tiny")]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", help="devices as in roundpipe.use_devices; default: the first GPU, else host:1@2GiB"
    )
    parser.add_argument(
        "--configurations", help=f"comma separated; default: {','.join(DEFAULT)}; without a GPU tiny ones"
    )
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.device is None:
        args.device = "cuda:0" if torch.cuda.is_available() else "host:1@2GiB"
    names = args.configurations or ",".join(DEFAULT if args.device.startswith("cuda") else ["tiny-stage", "tiny-layer"])
    args.configurations = names.split(",")
    if unknown := [name for name in args.configurations if name not in CONFIGURATIONS]:
        parser.error(f"--configurations: unknown {', '.join(unknown)}; known: {', '.join(CONFIGURATIONS)}")
    return args


def peak_resident_bytes(reset: bool = False) -> int:
    """Of this process since the start or the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def warm_up() -> None:
    """Contexts, threads and libraries are there afterwards: what they take is the process's, not the model's."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    x = torch.ones(2, 8)
    roundpipe.estimate_memory(model, 2, inputs=((x,), {}), loss_fn=lambda out, _: out.sum())
    wrapped = RoundPipe(model)
    step = roundpipe.optim.AdamW(wrapped, lr=1e-6)
    wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum())
    wrapped.step(step)
    wrapped.synchronize()
    gc.collect()


def measure_here(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Estimates and runs one configuration in this process."""
    settings = CONFIGURATIONS[name]
    roundpipe.use_devices(args.device)
    (device,) = roundpipe.devices()
    on_gpu = device.kind == "cuda"
    if on_gpu and "cap_gib" in settings:
        total = torch.cuda.get_device_properties(device.device).total_memory
        torch.cuda.set_per_process_memory_fraction(settings["cap_gib"] * GIB / total, device.device)
    dims = MODELS[settings["model"]]
    batch = random_batch(dims, settings["rows"], settings["tokens"])
    warm_up()
    process = peak_resident_bytes(reset=True) - roundpipe.memory_report().host.idle_bytes  # which the model will use
    model = build(dims, device=device.device)
    if "lora" in settings:
        add_lora(model, settings["lora"])
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    pieces = settings["pieces"]

    def loss_fn(loss: torch.Tensor, _: Any) -> torch.Tensor:
        return loss / pieces

    optimizer = settings.get("optimizer", "compact:split/float32")
    estimate = roundpipe.estimate_memory(
        model,
        settings["rows"],
        inputs=(batch, {}),
        loss_fn=loss_fn,
        num_microbatch=pieces,
        recompute_grain=settings.get("grain", "stage"),
        optimizer=optimizer,
        process_bytes=process,
    )
    wrapped = RoundPipe(model, optim_dtype=torch.float32)
    step: Any
    if optimizer.startswith("compact"):
        master, _, state = optimizer.partition(":")[2].partition("/")
        step = roundpipe.optim.AdamW(wrapped, lr=1e-6, master=master, state_dtype=state)
    else:
        with roundpipe.OptimizerCtx():
            torch_optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-6, fused=True)
        step = lambda: (torch_optimizer.step(), torch_optimizer.zero_grad())  # noqa: E731
    config = estimate.asked.configuration.run_config()
    gc.collect()
    roundpipe.memory.reset_device_peaks()
    peak_resident_bytes(reset=True)
    for _ in range(args.iterations):
        wrapped.forward_backward(batch, loss_fn=loss_fn, run_config=config)
        wrapped.step(step)
    report = roundpipe.memory_report()  # before the end of the last step gives anything back
    wrapped.synchronize()
    (measured,) = roundpipe.memory_report().devices
    simulated = 0 if on_gpu else measured.peak_bytes or 0
    return {
        "estimate": estimate.as_dict(),
        "device_estimated_bytes": estimate.device.total_bytes,
        "device_measured_bytes": measured.peak_bytes,
        "device_report": vars(measured),
        "activations_estimated_bytes": estimate.host.activations_bytes,
        "activations_measured_bytes": _ops.engine_live(engines.current().handle)[2],
        "host_estimated_bytes": estimate.host.total_bytes,
        "host_measured_bytes": peak_resident_bytes() - simulated,
        "host_report": vars(report.host),
        "process_bytes": process,
    }


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", args.device, "--iterations", str(args.iterations), "--child", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.child:
        print(json.dumps(measure_here(args, args.child)))
        return 0
    print(machine_facts())
    print(f"{'':<20}" + "".join(f"{what:>26}" for what in ("device, GiB", "kept activations, GiB", "host, GiB")))
    results: dict[str, Any] = {}
    for name in args.configurations:
        found = results[name] = measure(args, name)
        if "error" in found:
            print(f"{name:<20} failed: {found['error']}")
            continue
        cells = []
        for what in ("device", "activations", "host"):
            estimated, measured = found[f"{what}_estimated_bytes"], found[f"{what}_measured_bytes"]
            found[f"{what}_ratio"] = ratio = estimated / max(measured, 1)
            mark = " " if abs(ratio - 1) <= WANTED else "!"
            cells.append(f"{estimated / GIB:9.3f} {measured / GIB:9.3f} {ratio:5.2f}{mark}")
        print(f"{name:<20}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    print("(estimated, measured, ratio)")
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    print(f"written: {write_result('estimate', {'settings': settings, 'configurations': results}, args.results)}")
    return 0 if all("error" not in found for found in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
