"""Bytes that move in each direction are those that plan and shapes demand, and nobody copies tensors besides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.boundary import Traffic
from roundpipe.units import align

from .faults import plan_of

WIDTHS = [8, 12, 20, 20, 16, 4]  # of the boundaries; layer i maps WIDTHS[i] to WIDTHS[i + 1]
ROWS = 7
FLOAT = 4


class Block(nn.Module):
    """Contiguous in and out; ``steps`` is a buffer that no forward writes."""

    def __init__(self, width_in: int, width_out: int, frozen: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width_in, width_out)
        self.register_buffer("shift", torch.randn(width_out))
        self.linear.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + self.shift


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(a, b, i == 2) for i, (a, b) in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False))))


def parameter_bytes(layer: nn.Module, trainable: bool) -> int:
    """Of the packed image: each tensor at a multiple of the alignment."""
    return sum(align(p.numel() * FLOAT) for p in layer.parameters() if p.requires_grad or not trainable)


def buffer_bytes(layer: nn.Module) -> int:
    return sum(b.numel() * FLOAT for b in layer.buffers())


Key = tuple[str, Traffic]


def expected_bytes(
    model: nn.Sequential, plan: ModelExecutePlan, grain: str, devices: int, calls: int, start: int
) -> list[Counter[Key]]:
    """By device: bytes of one call, written down from the description of a run and not from the executor.

    ``calls``: how many of the window came before. ``start``: the device of the first job. Inputs require no grad.
    """
    moved: list[Counter[Key]] = [Counter() for _ in range(devices)]
    up = lambda device, kind, n: moved[device].update({("up", kind): n})  # noqa: E731
    down = lambda device, kind, n: moved[device].update({("down", kind): n})  # noqa: E731
    buffers_there: set[tuple[int, int]] = set()
    jobs = [("forward", s) for s in plan.fwd_plan]
    jobs += [("fused" if i == 0 else "backward", s) for i, s in enumerate(plan.bwd_plan)]
    boundary = lambda i: ROWS * WIDTHS[i] * FLOAT  # noqa: E731
    backward_starts = {s.start for s in plan.bwd_plan[1:]}
    saved = {x for s in plan.bwd_plan for x in s} if grain == "layer" else backward_starts
    for number, (kind, stage) in enumerate(jobs):
        device = (start + number) % devices
        for layer in stage:
            up(device, Traffic.WEIGHTS, parameter_bytes(model[layer], trainable=False))
            if (device, layer) not in buffers_there:
                buffers_there.add((device, layer))
                up(device, Traffic.BUFFERS, buffer_bytes(model[layer]))
            if kind != "forward":
                gradients = parameter_bytes(model[layer], trainable=True)
                down(device, Traffic.GRADIENTS, gradients)
                up(device, Traffic.GRADIENTS, gradients if calls else 0)
        entry = Traffic.INPUTS if stage.start == 0 else Traffic.ACTIVATIONS
        if kind == "forward":
            up(device, entry, boundary(stage.start))
            # The output, and the inputs that recompute starts from; what came from the host is there already.
            written = {stage.stop} | {x for x in saved if x in stage and x != stage.start}
            down(device, Traffic.ACTIVATIONS, sum(map(boundary, written)))
        elif kind == "fused":
            up(device, entry, boundary(stage.start))
            up(device, Traffic.INPUTS, boundary(stage.stop))  # labels
            down(device, Traffic.ACTIVATIONS, MICROBATCHES * FLOAT)  # losses
            if grain == "layer" and len(stage) > 1:
                # All but the last layer are recomputed: their inputs after the first go down and come back.
                inner = sum(map(boundary, range(stage.start + 1, stage.stop - 1)))
                down(device, Traffic.ACTIVATIONS, inner)
                up(device, Traffic.ACTIVATIONS, inner)
                up(device, entry, boundary(stage.start))
            if stage.start > 0:
                down(device, Traffic.ACTIVATIONS, boundary(stage.start))  # gradient of the stage's input
        else:
            up(device, Traffic.ACTIVATIONS, boundary(stage.stop))  # gradient of the stage's output
            for layer in stage if grain == "layer" else [stage.start]:
                up(device, Traffic.INPUTS if layer == 0 else Traffic.ACTIVATIONS, boundary(layer))
            if stage.start > 0:
                down(device, Traffic.ACTIVATIONS, boundary(stage.start))
    return moved


MICROBATCHES = 3

PLANS = {
    "one layer a stage": plan_of([(0, 1), (1, 2), (2, 3), (3, 4)], [(4, 5), (3, 4), (2, 3), (1, 2), (0, 1)]),
    "pairs": plan_of([(0, 2), (2, 3)], [(3, 5), (1, 3), (0, 1)]),
    "all fused": plan_of([], [(0, 5)]),
    "different cuts": plan_of([(0, 1), (1, 4)], [(4, 5), (0, 4)]),
}


def measured() -> list[Counter[Key]]:
    engine = engines.current()
    engine.wait_idle()
    found = []
    for device in range(engine.device_count):
        numbers = _ops.engine_bytes(engine.handle, device)
        counter: Counter[Key] = Counter()
        for kind in Traffic:
            counter["up", kind] = numbers[kind]
            counter["down", kind] = numbers[len(Traffic) + kind]
        found.append(+counter)
    return found


def run(wrapped: RoundPipe, plan: ModelExecutePlan, grain: str) -> None:
    wrapped.forward_backward(
        (torch.randn(ROWS, WIDTHS[0]),),
        label=torch.randn(ROWS, WIDTHS[-1]),
        loss_fn=F.mse_loss,
        run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES, recompute_grain=grain, execute_plan=plan),
    )


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", PLANS)
def test_bytes_of_training(name: str, devices: int, grain: str) -> None:
    roundpipe.use_devices(f"host:{devices}")
    model = make_model()
    wrapped = RoundPipe(model)
    plan = PLANS[name]
    engine = engines.current()
    buffers_before: list[set[int]] = [set() for _ in range(devices)]
    for calls in range(3):
        start = engine.peek(0)
        _ops.engine_reset_bytes(engine.handle)
        run(wrapped, plan, grain)
        wrapped.synchronize() if calls == 2 else [c.wait_jobs() for c in wrapped._state._calls]
        want = expected_bytes(model, plan, grain, devices, calls, start)
        # Buffers that a device loaded in an earlier call stay there while nobody writes them.
        for device, layers in enumerate(layers_by_device(plan, devices, start)):
            known = sum(buffer_bytes(model[x]) for x in layers & buffers_before[device])
            want[device]["up", Traffic.BUFFERS] -= known
            buffers_before[device] |= layers
        assert measured() == [+counter for counter in want], f"call {calls}"


def layers_by_device(plan: ModelExecutePlan, devices: int, start: int) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(devices)]
    for number, stage in enumerate([*plan.fwd_plan, *plan.bwd_plan]):
        found[(start + number) % devices] |= set(stage)
    return found


@pytest.mark.parametrize("devices", [1, 2])
def test_bytes_of_inference(devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    model = make_model()
    wrapped = RoundPipe(model)
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(0, 2), range(2, 5)]
    engine = engines.current()
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    for _ in range(2):
        _ops.engine_reset_bytes(engine.handle)
        with torch.no_grad():
            wrapped(torch.randn(ROWS, WIDTHS[0]), roundpipe_run_config=config)
        total: Counter[Key] = sum(measured(), Counter())
        total.pop(("up", Traffic.BUFFERS), None)
        assert total == {
            ("up", Traffic.WEIGHTS): sum(parameter_bytes(layer, trainable=False) for layer in model),
            ("up", Traffic.INPUTS): ROWS * WIDTHS[0] * FLOAT,
            ("up", Traffic.ACTIVATIONS): ROWS * WIDTHS[2] * FLOAT,
            ("down", Traffic.ACTIVATIONS): ROWS * (WIDTHS[2] + WIDTHS[5]) * FLOAT,
        }


class Counting(TorchDispatchMode):
    """Counts operators that copy."""

    COPIES = ("copy_", "_to_copy", "clone", "contiguous", "cat", "empty_like", "zeros", "zeros_like", "fill_", "zero_")

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.COPIES:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies_on_workers(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    from roundpipe.stage_job import StageJob

    seen: Counter[str] = Counter()
    inner = StageJob._run

    def counted(self: StageJob, worker: Any) -> None:
        with Counting(seen):
            inner(self, worker)

    monkeypatch.setattr(StageJob, "_run", counted)
    return seen


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 3])
def test_executor_copies_no_tensor(devices: int, grain: str, copies_on_workers: Counter[str]) -> None:
    """All that moves is moved by the engine; gradients are accumulated where they go down from."""
    roundpipe.use_devices(f"host:{devices}")
    wrapped = RoundPipe(make_model())
    for _ in range(2):
        run(wrapped, PLANS["pairs"], grain)
    wrapped.synchronize()
    # mse_loss makes its own scalar gradient; nothing else may appear.
    assert not copies_on_workers, dict(copies_on_workers)


def test_the_counter_of_copies_sees_copies(copies_on_workers: Counter[str]) -> None:
    roundpipe.use_devices("host:1")

    class Copies(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), Copies()))
    wrapped.forward_backward((torch.randn(2, 4),), loss_fn=lambda out, _: out.sum())
    wrapped.synchronize()
    assert copies_on_workers["clone"] == 2
