"""The interpreter exits, or forks, with work in flight: no hang, no crash, no noise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PRELUDE = """
import os, sys, threading, time
import torch
from torch import nn
import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from tests.faults import WIDTH, five_layer_plan, trapped_model
roundpipe.use_devices("host:2")
model = RoundPipe(trapped_model(dropout=0.0))
traps = [layer.trap for layer in model.model]
with OptimizerCtx():
    optimizer = torch.optim.AdamW(model.parameters())
config = RoundPipeRunConfig(num_microbatch=3, execute_plan=five_layer_plan())
def call():
    return model.forward_backward(
        (torch.randn(12, WIDTH),), loss_fn=lambda out, _: out.square().mean(), run_config=config
    )
call()
model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
"""


def run_script(body: str, timeout_s: float = 60.0, **more: object) -> tuple[int, str, float]:
    """Exit code, stderr, and the seconds from the word READY (or the start) to the end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error::ResourceWarning", "-c", PRELUDE + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ROUNDPIPE_CHECK": "1"},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        began = time.monotonic()
        if more.get("interrupt"):
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert line == "READY\n", errors
    return process.returncode, errors, time.monotonic() - began


ENDINGS = {
    "idle": "model.synchronize()",
    "async step": """
started = threading.Event()
def step():
    started.set()
    for _ in range(50):
        optimizer.step()
        time.sleep(0.005)
call()
model.step(step)
started.wait()
""",
    "step that never ends": """
def step():
    while True:
        optimizer.step()
call()
model.step(step)
""",
    "backward": "traps[0].arm('backward', 2, sleep_s=0.5); call()",
    "sleeping layer": "traps[0].arm('backward', 2, sleep_s=100.0); call(); traps[0].sprung.wait()",
    "computing layer": """
seen = []
def endless(module, _):
    if roundpipe.doing_recompute():
        seen.append(1)
        while len(seen) == 3:
            torch.ones(64, 64) @ torch.ones(64, 64)
model.model[0].register_forward_pre_hook(endless)
call()
""",
    "failed call": "traps[0].arm('backward', 2, ValueError('late')); call(); time.sleep(0.5)",
    "another thread": """
def calls():
    try:
        while True:
            call()
    except roundpipe.errors.RoundPipeError as error:
        assert "closed" in str(error), error
threading.Thread(target=calls, daemon=True).start()
time.sleep(0.2)
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_exit_with_work_in_flight(ending: str) -> None:
    code, errors, seconds = run_script(ENDINGS[ending] + "\nprint('READY', flush=True)")
    assert code == 0, (code, errors)
    assert errors == "", errors
    assert seconds < 10, seconds


def test_an_exception_of_the_caller_is_all_that_is_shown() -> None:
    code, errors, seconds = run_script("call()\nprint('READY', flush=True)\nraise ValueError('the caller')")
    assert code == 1 and seconds < 10
    assert errors.startswith("Traceback") and errors.count("Traceback") == 1 and errors.endswith("the caller\n"), errors


def test_ctrl_c_ends_the_process() -> None:
    """SIGINT while a layer sleeps for long: one traceback, within seconds."""
    body = "traps[1].arm('forward', 1, sleep_s=100.0)\nprint('READY', flush=True)\ncall()"
    code, errors, seconds = run_script(body, interrupt=True)
    assert code == -signal.SIGINT, (code, errors)
    assert seconds < 10 and errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt"), errors


FORKED = """
import traceback, warnings
from torch.utils.data import DataLoader, Dataset
warnings.filterwarnings("ignore", "This process .* is multi-threaded")

class Rows(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.rand(WIDTH) + i

class UsesTheModel(Rows):
    def __getitem__(self, i):
        return model(torch.rand(2, WIDTH))

for epoch in range(2):
    for batch in DataLoader(Rows(), batch_size=12, num_workers=2, multiprocessing_context="fork", shuffle=True):
        assert batch.shape == (12, WIDTH)
        model.forward_backward((batch,), loss_fn=lambda out, _: out.square().mean(), run_config=config)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))
try:
    next(iter(DataLoader(UsesTheModel(), num_workers=1, multiprocessing_context="fork")))
except roundpipe.errors.RoundPipeError as error:
    assert "forked child" in str(error) and "spawn" in str(error), error
else:
    raise AssertionError("a forked worker used the model")

def in_child(function):
    pid = os.fork()
    if pid == 0:
        try:
            function()
        except roundpipe.errors.RoundPipeError as error:
            os._exit(7 if "forked child" in str(error) else 8)
        os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for function in (
    call, lambda: model(torch.rand(2, WIDTH)), model.synchronize, model.state_dict, model.zero_grad,
    lambda: model.step(print), lambda: list(model.optim_parameters()), lambda: RoundPipe(nn.Linear(2, 2)),
    lambda: model.load_state_dict({}),
):
    call()
    assert in_child(function) == 7, function
assert in_child(lambda: sys.exit(7)) == 7, "a child that leaves the engine alone exits as it likes"
call()
model.synchronize()
print("READY", flush=True)
"""


def test_forks_while_the_engine_runs() -> None:
    code, errors, _ = run_script(FORKED)
    assert code == 0 and errors == "", (code, errors)


def test_a_fork_before_the_engine_may_use_roundpipe() -> None:
    script = """
import os, sys
import torch, roundpipe
from torch import nn
roundpipe.use_devices("host:1")
pid = os.fork()
model = roundpipe.RoundPipe(nn.Sequential(nn.Linear(4, 4)))
model.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum())
model.synchronize()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0 and result.stderr == "", result.stderr
