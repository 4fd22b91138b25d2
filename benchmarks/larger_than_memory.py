"""Does a frozen model train adapters when its weights are larger than the memory that the process may have?

    python benchmarks/larger_than_memory.py --file-mib 1536 --limit-mib 896

Makes a file of weights, trains on it twice, and compares. Once without a limit, the weights copied into memory; once in
a control group whose limit is smaller than the file, the weights mapped and streamed (`pin_model="off"`). Losses and
adapters must be equal bit by bit. Beside them: the most memory that the group was charged, page cache included, the
most bytes of the file that were in memory, and the rate at which weights came, beside that of reading the file from the
disk in order, in the same group. Needs the right to make a control group (`--limit-mib 0` runs without one).
`--room-mib 256` sets the limit to what the process held before there was a model, and so much more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

if "--group" in sys.argv:  # before torch: what it takes is charged to the group too
    from memory_group import join

    join(sys.argv[sys.argv.index("--group") + 1])

import torch
from common import RESULTS, machine_facts, write_result
from file_weights import Looked, drop_pages, make_file, mapped_weights, read_rate, resident_bytes
from memory_group import NoGroups, memory_group
from torch import Tensor, nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops

WIDTH = 64
MIB = 1 << 20


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="", help="as in roundpipe.use_devices; default: the first GPU, else host:1")
    parser.add_argument("--file-mib", type=int, default=1536)
    parser.add_argument("--limit-mib", type=int, default=896, help="of the control group; 0: none is made")
    parser.add_argument("--room-mib", type=int, help="the limit, beyond what the process holds without a model")
    parser.add_argument("--layer-mib", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the file is made; default: a temporary one")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", nargs=2, metavar=("PIN_MODEL", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.device = args.device or ("cuda:0" if torch.cuda.is_available() else "host:1")
    return args


def plan(layers: int) -> ModelExecutePlan:
    made = ModelExecutePlan()
    made.fwd_plan = [range(i, i + 1) for i in range(layers - 1)]
    made.bwd_plan = [range(i, i + 1) for i in reversed(range(layers))]
    return made


def read_bytes() -> int:
    """What this process has read from disks, read-ahead included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no read_bytes")


def own_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Watch:
    """The most bytes of the weights that were in memory, looked at every 50 ms."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights, self._stop = weights, threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.05):
            self.most_bytes = max(self.most_bytes, resident_bytes(self._weights))

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.most_bytes


def train(args: argparse.Namespace, pin_model: str, path: Path) -> dict[str, Any]:
    roundpipe.use_devices(args.device)
    RoundPipe(nn.Linear(8, 8))  # opens the engine
    base_bytes = own_bytes()
    torch.manual_seed(0)
    count = args.file_mib // args.layer_mib
    weights = mapped_weights(path, count)
    model = RoundPipe(
        nn.Sequential(*(Looked(weight, WIDTH) for weight in weights)),
        pin_model=pin_model,
        model_run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=plan(count)),
    )
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, label = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    in_order = 0.0
    if pin_model == "off":
        drop_pages(path, weights)
        in_order = max(read_rate(path) for _ in range(2))
        drop_pages(path, weights)
    watch = Watch(weights) if pin_model == "off" else None
    read_before = read_bytes()
    losses = []
    begin = time.perf_counter()
    for _ in range(args.steps):
        loss = model.forward_backward(
            (batch,), label=label, loss_fn=lambda out, label: (out - label).square().sum() / 16
        )
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        losses.append(loss.item())
    model.synchronize()
    seconds = time.perf_counter() - begin
    adapters = torch.stack([layer.scale.detach() for layer in model.model]).double()
    # Every step brings each weight up once for its forward and once for its backward; the last stage's serve both.
    moved = sum(_ops.engine_bytes(roundpipe.engine.current().handle, 0)[:1])
    return {
        "base_bytes": base_bytes,
        "losses": losses,
        "adapters": [adapters.sum().item(), adapters.square().sum().item()],
        "weights_bytes": sum(weight.nbytes for weight in weights),
        "uploaded_bytes": moved,
        "seconds": seconds,
        "rate": moved / seconds,
        "read_bytes": read_bytes() - read_before,
        "read_in_order": in_order,
        "resident_bytes_at_most": 0 if watch is None else watch.end(),
    }


def run(args: argparse.Namespace, pin_model: str, path: Path, group: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", args.device, "--file-mib", str(args.file_mib)]
    command += ["--layer-mib", str(args.layer_mib), "--steps", str(args.steps), "--child", pin_model, str(path)]
    done = subprocess.run(command + ([] if group is None else ["--group", group]), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'pin_model="{pin_model}" ended with {done.returncode}: {done.stderr[-4000:]}')
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.child:
        print(json.dumps(train(args, args.child[0], Path(args.child[1]))))
        return 0
    print(machine_facts())
    result: dict[str, Any] = {"settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)}}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "weights.bin"
        make_file(path, args.file_mib * MIB)
        whole = result["without limit"] = run(args, "alloc", path, None)
        if args.room_mib:
            args.limit_mib = whole["base_bytes"] // MIB + args.room_mib
        if args.limit_mib >= args.file_mib:
            raise SystemExit(f"the limit of {args.limit_mib} MiB is not below the {args.file_mib} MiB of the file")
        if args.limit_mib:
            try:
                with memory_group(args.limit_mib * MIB) as group:
                    limited = run(args, "off", path, str(group.path))
                    limited["group_peak_bytes"] = group.peak_bytes
            except NoGroups as error:
                raise SystemExit(f"{error}; --limit-mib 0 runs without a limit") from error
        else:
            limited = run(args, "off", path, None)
        result["limited"] = limited | {"limit_bytes": args.limit_mib * MIB}
    result["equal"] = (limited["losses"], limited["adapters"]) == (whole["losses"], whole["adapters"])
    print(
        f"{args.file_mib} MiB of weights, limit {args.limit_mib} MiB: losses and adapters "
        f"{'equal' if result['equal'] else 'DIFFER'}, at most {limited['resident_bytes_at_most'] / MIB:.0f} MiB of the "
        f"file in memory, {limited['rate'] / 1e9:.2f} GB/s (read in order {limited['read_in_order'] / 1e9:.2f})"
    )
    print(f"written: {write_result('larger_than_memory', result, args.results)}")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
