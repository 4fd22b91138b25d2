"""The interpreter exits, or forks, with work in flight: no hang, no crash, no noise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roundpipe import engine

IMPORTS = """
import gc, json, multiprocessing, os, sys, threading, time, traceback, warnings
import torch, torch._dynamo  # which torch.optim imports at its first use
from torch import nn
import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from tests.faults import WIDTH, five_layer_plan, trapped_model
"""

PRELUDE = """
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
model.synchronize()
"""

FORKED = """
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
gc.collect()  # ends that loader's iterator
for process in multiprocessing.active_children():
    process.join()  # a child forked below that exits would try to join them too, and complain

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
"""

# A trap in a backward acts on the last microbatch: simulated devices compute under one lock, and the losses must come.
# What must not hold the process up would do so for longer than DRIVER waits.
ENDINGS = {
    "idle": "",
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
    "sleeping layer": "traps[0].arm('backward', 2, sleep_s=1000.0); call(); traps[0].sprung.wait()",
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
    "failed call": """
traps[0].arm('backward', 2, ValueError('late'), hangs=True)
call()
traps[0].release()
model._state.drain()
assert model._state._calls[-1].error is not None
""",
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
    "forks": FORKED,
    "layer that waits for a fork": """
def forks(*_):
    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
handle = model.model[1].register_forward_pre_hook(forks)
model.eval()
with torch.no_grad():
    model(torch.randn(6, WIDTH))
handle.remove()
call()
""",
    "exception of the caller": "call()\nraise ValueError('the caller')",
}

# One process imports everything, and a child of it, forked before there is an engine, goes through each ending.
DRIVER = """
results = {}
for name, ending in json.loads(sys.argv[1]).items():
    log = f"{sys.argv[2]}/{len(results)}.txt"
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY, 0o600), 2)
        exec(sys.argv[3] + ending)
        sys.exit(0)
    began, ended = time.monotonic(), 0
    while not ended and time.monotonic() - began < 100:
        time.sleep(0.05)
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, 9)
        _, status = os.waitpid(pid, 0)
    results[name] = [os.waitstatus_to_exitcode(status), open(log).read()]
print(json.dumps(results))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "ROUNDPIPE_CHECK": "1"}


def finished(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own that has ended well."""
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parent.parent,
        env=environment(),
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code (-9: it did not end) and stderr by ending."""
    result = finished(IMPORTS + DRIVER, json.dumps(ENDINGS), str(tmp_path_factory.mktemp("log")), PRELUDE)
    return json.loads(result.stdout)  # type: ignore[no-any-return]


HEARD = ("exception of the caller", "failed call", "forks")  # of which something is to be heard, or more to be checked


@pytest.mark.timeout(300)
def test_a_failed_call_is_told_at_the_exit(endings: dict[str, tuple[int, str]]) -> None:
    code, errors = endings["failed call"]
    assert code == 0 and errors.startswith("the program ends after a failure that no call has raised"), errors
    assert errors.count("the program ends") == 1


@pytest.mark.timeout(300)  # the first one runs them all
@pytest.mark.parametrize("ending", [name for name in ENDINGS if name not in HEARD])
def test_exit_with_work_in_flight(ending: str, endings: dict[str, tuple[int, str]]) -> None:
    code, errors = endings[ending]
    assert (code, errors) == (0, ""), errors


@pytest.mark.parametrize("told", [False, True])
def test_an_error_of_the_last_step_is_told_at_the_exit(told: bool) -> None:
    program = """
def bad():
    raise KeyError("in the last step")
call()
model.step(bad)
while all(task.error is None for task in model._state._tasks):  # or the exit may come before the step
    time.sleep(0.01)
"""
    if told:
        program += """
try:
    model.synchronize()
except roundpipe.errors.StageError:
    pass
"""
    result = finished(IMPORTS + PRELUDE + program)
    if told:
        assert result.stderr == ""
    else:
        assert "synchronize()" in result.stderr and "KeyError: 'in the last step'" in result.stderr


def test_an_exit_waits_for_seconds_at_most() -> None:
    assert engine._PATIENCE_S + engine._FORK_PATIENCE_S <= 5


@pytest.mark.timeout(300)
def test_an_exception_of_the_caller_is_all_that_is_shown(endings: dict[str, tuple[int, str]]) -> None:
    code, errors = endings["exception of the caller"]
    assert code == 1 and errors.startswith("Traceback") and errors.count("Traceback") == 1, errors
    assert errors.endswith("the caller\n"), errors


def run_interrupted(script: str) -> tuple[int, str]:
    """Exit code and stderr of a process of its own that gets SIGINT after the word READY."""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert line == "READY\n", errors
    return process.returncode, errors


def test_ctrl_c_ends_the_process() -> None:
    """SIGINT while a layer sleeps for long: one traceback, not at its end, and the exit code of any Python program."""
    body = "traps[1].arm('forward', 1, sleep_s=1000.0)\nprint('READY', flush=True)\ncall()"
    code, errors = run_interrupted(IMPORTS + PRELUDE + body)
    # What others run at exit decides it: in Python 3.12 code executed then makes it 1 instead of the signal.
    plain, _ = run_interrupted(IMPORTS + "print('READY', flush=True)\ntime.sleep(1000)")
    assert code == plain, (code, errors)
    assert errors.count("Traceback") == 1 and errors.rstrip().endswith("KeyboardInterrupt"), errors


def test_forks_while_the_engine_runs(endings: dict[str, tuple[int, str]]) -> None:
    """DataLoader workers do their work; a child that uses a model of its parent gets an error, not a deadlock."""
    code, errors = endings["forks"]
    assert (code, errors) == (0, ""), errors
