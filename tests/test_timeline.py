"""Timelines: what ran is in them once, in order, on one clock; nothing is kept without one; misuse."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, errors, spans

LAYERS, MICROBATCHES = 4, 3


def loss_of(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().sum()


def plan() -> ModelExecutePlan:
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(0, 2)]
    plan.bwd_plan = [range(2, 4), range(0, 2)]
    return plan


def train(model: RoundPipe, optimizer: Any, steps: int = 2) -> None:
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan())
    for _ in range(steps):
        model.forward_backward((torch.randn(6, 32),), loss_fn=loss_of, run_config=config)
        model.step(optimizer)
    model.synchronize()


def complete(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@pytest.fixture(params=["compact", "torch"])
def trained(request: pytest.FixtureRequest) -> tuple[RoundPipe, Any]:
    roundpipe.use_devices("host:1")
    model = RoundPipe(nn.Sequential(*[nn.Linear(32, 32) for _ in range(LAYERS)]))
    if request.param == "compact":
        return model, roundpipe.optim.AdamW(model, lr=1e-3)
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, lambda: (optimizer.step(), optimizer.zero_grad())


@pytest.mark.parametrize("devices", ["host:1", "host:3", pytest.param("cuda:0", marks=pytest.mark.needs_cuda)])
def test_everything_that_ran_is_there(devices: str, trained: tuple[RoundPipe, Any], tmp_path: Path) -> None:
    roundpipe.use_devices(devices)
    model, optimizer = trained
    train(model, optimizer)
    before = time.monotonic_ns()
    with roundpipe.trace(tmp_path / "out.json"):
        train(model, optimizer)
    after = time.monotonic_ns()
    events = complete(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]
    for event in events:
        assert (
            before / 1e3 - 1e3 <= event["ts"] and event["dur"] >= 0 and event["ts"] + event["dur"] <= after / 1e3 + 1e3
        )
    seen = sorted((e["cat"], e["args"]["layer"], e["args"]["microbatch"]) for e in events if e["cat"] in ("fwd", "re"))
    wanted = [("fwd", layer, m) for layer in range(LAYERS) for m in range(MICROBATCHES) for _ in range(2)]
    wanted += [("re", layer, m) for layer in range(2) for m in range(MICROBATCHES) for _ in range(2)]
    assert seen == sorted(wanted)
    backward = {(e["args"]["layer"], e["args"]["microbatch"]) for e in events if e["cat"] == "bwd"}
    assert backward == {(layer, m) for layer in range(LAYERS) for m in range(MICROBATCHES)}
    jobs = [e["name"] for e in events if e["cat"] == "job" and "layers" in e["name"]]
    assert sorted(jobs) == sorted(["forward layers 0-1", "fused layers 2-3", "backward layers 0-1"] * 2)
    calls = [e["name"] for e in events if e["cat"] == "call"]
    assert sorted(calls) == ["forward_backward"] * 2 + ["step"] * 2
    weight_bytes = sum(p.numel() * p.element_size() for p in model.model.parameters())
    copied = sum(e["args"]["bytes"] for e in events if e["cat"] == "copy" and e["name"] == "upBlk")
    assert copied >= 2 * 1.5 * weight_bytes  # two iterations: all layers forward, half of them again
    assert any(e["cat"] == "update" for e in events)


@pytest.mark.parametrize("devices", ["host:2"])
def test_layers_of_a_device_follow_each_other(devices: str, trained: tuple[RoundPipe, Any], tmp_path: Path) -> None:
    roundpipe.use_devices(devices)
    model, optimizer = trained
    with roundpipe.trace(tmp_path / "out.json"):
        train(model, optimizer, 4)
    by_track: dict[int, list[dict[str, Any]]] = {}
    for event in complete(tmp_path / "out.json"):
        if event["cat"] in ("fwd", "re", "bwd"):
            by_track.setdefault(event["tid"], []).append(event)
    assert len(by_track) == 2
    for events in by_track.values():
        events.sort(key=lambda e: e["ts"])
        for one, other in zip(events, events[1:], strict=False):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3  # float64 microseconds since the machine's start


def test_an_exception_passes_and_the_file_is_there(trained: tuple[RoundPipe, Any], tmp_path: Path) -> None:
    roundpipe.use_devices("host:1")
    model, optimizer = trained

    def fails(output: torch.Tensor, _: Any) -> torch.Tensor:
        raise KeyError("no such label")

    with pytest.raises(errors.StageError, match="no such label"), roundpipe.trace(tmp_path / "out.json"):
        model.forward_backward((torch.randn(6, 32),), loss_fn=fails)
    assert any(event["cat"] == "fwd" for event in complete(tmp_path / "out.json"))
    assert spans.active is None
    train(model, optimizer)
    with roundpipe.trace(tmp_path / "out.json"):  # over the old file
        pass
    assert not [e for e in complete(tmp_path / "out.json") if e["cat"] in ("fwd", "re", "bwd", "copy")]


def test_threads_and_devices_are_named(trained: tuple[RoundPipe, Any], tmp_path: Path) -> None:
    roundpipe.use_devices("host:2")
    with roundpipe.trace(str(tmp_path / "out.json")):
        train(*trained)
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert used <= names.keys()
    assert {"host:0 compute", "host:1 compute", "MainThread", "roundpipe-host:0"} <= set(names.values())


def test_only_the_newest_spans_of_the_core_are_kept(trained: tuple[RoundPipe, Any], tmp_path: Path) -> None:
    roundpipe.use_devices("host:1")
    with roundpipe.trace(tmp_path / "out.json", max_spans=5):
        train(*trained)
    core = [e for e in complete(tmp_path / "out.json") if e["cat"] == "copy" or "unit" in e["args"]]
    assert len(core) == 5


def test_misuse(tmp_path: Path) -> None:
    roundpipe.use_devices("host:1")
    with pytest.raises(errors.ConfigError, match="cannot write"):
        roundpipe.trace(tmp_path / "nowhere" / "out.json").__enter__()
    with pytest.raises(errors.ConfigError, match="cannot write"):
        roundpipe.trace(tmp_path).__enter__()
    with pytest.raises(errors.ConfigError, match="max_spans"):
        roundpipe.trace(tmp_path / "out.json", max_spans=0)
    with roundpipe.trace(tmp_path / "out.json"), pytest.raises(errors.ConfigError, match="already"):
        roundpipe.trace(tmp_path / "other.json").__enter__()
    assert (tmp_path / "out.json").exists() and not (tmp_path / "other.json").exists()


SCRIPT = """
import sys
import torch, roundpipe, helper
roundpipe.use_devices("host:1")
model = roundpipe.RoundPipe(torch.nn.Linear(4, 4))
for _ in range(int(sys.argv[1])):
    model.forward_backward((torch.ones(4, 4),), loss_fn=helper.loss)
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("exit_code", [0, 3])
def test_a_script_runs_under_the_command(exit_code: int, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def loss(output, _):\n    return output.sum()\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    options = [
        "-o",
        str(tmp_path / "out.json"),
        str(tmp_path / "script.py"),
        "3",
        *([str(exit_code)] if exit_code else []),
    ]
    done = subprocess.run([sys.executable, "-m", "roundpipe", "trace", *options], capture_output=True, text=True)
    assert done.returncode == exit_code, done.stderr
    calls = [e for e in complete(tmp_path / "out.json") if e["cat"] == "call"]
    assert [e["name"] for e in calls] == ["forward_backward"] * 3


def test_the_command_refuses_what_it_cannot_run(tmp_path: Path) -> None:
    for options in (["nowhere.py"], ["-o", str(tmp_path / "no" / "out.json"), __file__], []):
        done = subprocess.run([sys.executable, "-m", "roundpipe", "trace", *options], capture_output=True, text=True)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
