"""Saving takes no second copy of the state, by what the system says of the process; and it ends before that does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from roundpipe.checkpoint.manifest import open_checkpoint

ROOT = Path(__file__).parents[1]

SCRIPT = """
import json, sys
from pathlib import Path
import torch, roundpipe
from roundpipe.checkpoint import snapshot
from torch import nn

def status(name):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024

def peak_of(work):
    '''Bytes that the process held at most during it, above what it held before.'''
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status("VmRSS:")
    work()
    return status("VmHWM:") - before

roundpipe.use_devices("host:1")
found = {}
for how in ("compact", "torch"):
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(18)]
    layers[3].weight = nn.Parameter(layers[3].weight.detach().t())  # in an order that is not written as it is
    model = roundpipe.RoundPipe(nn.Sequential(*layers).bfloat16(), optim_dtype=torch.float32)
    if how == "compact":
        optimizer = roundpipe.optim.AdamW(model, master="float32")
        step = lambda: model.step(optimizer, True)
    else:
        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters())
        step = lambda: model.step(lambda: (optimizer.step(), optimizer.zero_grad()), True)
    for _ in range(2):
        model.forward_backward((torch.randn(4, 1024).bfloat16(),), loss_fn=lambda out, _: out.float().square().mean())
        step()
    snapshot.settle(model._state)
    target = Path(sys.argv[1]) / how
    peak = peak_of(lambda: roundpipe.save(model, optimizer, None, target).wait())
    found[how] = (peak, sum(path.stat().st_size for path in target.iterdir()))
    if how == "compact":
        del model, optimizer, step, layers
print(json.dumps(found))
roundpipe.save(model, optimizer, None, Path(sys.argv[1]) / "at exit")
"""


def test_peak_memory_and_exit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for how, (peak, written) in json.loads(done.stdout).items():
        assert written > 290e6, how  # weights of two steps, masters, moments
        assert peak < written / 5, f"{how}: {peak:,} bytes more while {written:,} were written"
    # The last one was under way when the interpreter exited.
    assert open_checkpoint(tmp_path / "at exit").kinds["optimizer"].specs
    assert done.stderr == "" and len(list(tmp_path.iterdir())) == 3
