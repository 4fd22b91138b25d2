"""Layer times: what a record and an estimate are, which layers and phases a call brings, and that nothing waits."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelTimer, OptimizerCtx, RoundPipe, RoundPipeRunConfig, job_probe, timer

from .plans import one_layer_stages, random_fused_plan

LINE = re.compile(r"^Layer (\d+) (fwd|re|bwd)  new record: (\d+\.\d{3}) ms  new estimate: (\d+\.\d{3}) ms$")


def test_one_class_at_both_places() -> None:
    assert roundpipe.ModelTimer is timer.ModelTimer
    assert ModelTimer.VERBOSE is False


def test_an_estimate_outvotes_disturbances_and_follows_a_change() -> None:
    times = ModelTimer(2)
    assert times.estimate_ms("fwd", 0) is None
    estimates = []
    for ms in (900.0, 10.0, 11.0, 500.0, 10.0, 9.0, 10.0):
        times.record([("fwd", 0, ms)])
        estimates.append(times.estimate_ms("fwd", 0))
    assert estimates[0] == 900.0  # all that is known
    assert all(e is not None and e <= 11.0 for e in estimates[1:])
    for _ in range(7):
        times.record([("fwd", 0, 40.0)])
    assert times.estimate_ms("fwd", 0) == 40.0
    assert times.iterations == 14
    assert times.estimate_ms("bwd", 0) is None and times.estimate_ms("fwd", 1) is None


def test_several_times_of_a_layer_in_one_iteration_are_added() -> None:
    times = ModelTimer(1)
    times.record([("bwd", 0, 1.0), ("re", 0, 5.0), ("bwd", 0, 2.5)])
    assert times.estimate_ms("bwd", 0) == 3.5
    assert times.iterations == 1


class _Event:
    """An event that a device passes when told to."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.passed, self.waited = at_ms, False, False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = self.waited = True

    def elapsed_time(self, end: _Event) -> float:
        assert self.passed and end.passed
        return end.at_ms - self.at_ms


def test_events_are_read_once_passed_and_in_order() -> None:
    times = ModelTimer(1)
    calls = [[("fwd", 0, _Event(0.0), _Event(ms))] for ms in (3.0, 4.0)]
    for call in calls:
        times.ended(call)
    for begin, end in ((i[2], i[3]) for i in calls[1]):
        begin.passed = end.passed = True
    times.read()
    assert times.iterations == 0  # the first call is still on its way
    for begin, end in ((i[2], i[3]) for i in calls[0]):
        begin.passed = end.passed = True
    times.read()
    assert times.iterations == 2
    assert not any(event.waited for call in calls for interval in call for event in interval[2:])


def test_unread_calls_do_not_pile_up() -> None:
    times = ModelTimer(1)
    for ms in range(100):
        times.ended([("fwd", 0, _Event(0.0), _Event(ms))])
    assert len(times._waiting) < 10


class Clock:
    """The time that the engine sees; only layers make it pass. They compute one at a time, under a lock."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(job_probe, "time", made)
    return made


class _TakesTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, seconds: float) -> torch.Tensor:  # type: ignore[override]
        ctx.clock, ctx.seconds = clock, seconds
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        ctx.clock.now += ctx.seconds
        return grad, None, None


class Slow(nn.Module):
    """Takes ``forward_s`` (in recompute twice that) and ``backward_s``, the latter at the entry of its graph."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def __deepcopy__(self, memo: Any) -> Slow:
        return Slow(self.clock, self.forward_s, self.backward_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.forward_s * (2 if roundpipe.doing_recompute() else 1)
        return torch.tanh(self.linear(_TakesTime.apply(x, self.clock, self.backward_s)))


def _measured(wrapped: RoundPipe) -> ModelTimer:
    measurements = wrapped._state.measurements
    measurements.read()
    return measurements.training


DELAYS = [(2.0, 0.5), (0.25, 6.0), (4.0, 2.0), (0.5, 1.0), (2.0, 4.0)]


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_times_are_those_of_each_layer(grain: str, microbatches: int, clock: Clock) -> None:
    """Several layers in each stage, on two devices that compute at the same time."""
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(nn.Sequential(*(Slow(clock, *d) for d in DELAYS)))
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(0, 3)], [range(3, 5), range(0, 3)]

    def loss_fn(out: torch.Tensor, label: Any) -> torch.Tensor:
        clock.now += 16.0
        return out.sum()

    wrapped.forward_backward(
        (torch.randn(5, 4, requires_grad=True),),
        loss_fn=loss_fn,
        run_config=RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan, recompute_grain=grain),
    )
    wrapped.synchronize()
    times = _measured(wrapped)
    assert times.iterations == 1
    recomputed = {0, 1, 2} | ({3} if grain == "layer" else set())
    for layer, (forward_s, backward_s) in enumerate(DELAYS):
        assert times.estimate_ms("fwd", layer) == 1e3 * forward_s
        assert times.estimate_ms("re", layer) == (2e3 * forward_s if layer in recomputed else None)
        # The loss counts where a plan has it: in the last layer's backward.
        assert times.estimate_ms("bwd", layer) == 1e3 * (backward_s + (16.0 if layer == 4 else 0.0))


def test_autograd_calls_and_inference_are_timed_too(clock: Clock) -> None:
    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(*(Slow(clock, *d) for d in DELAYS)))
    with torch.no_grad():
        wrapped(torch.randn(2, 4))
    inference = wrapped._state.measurements.inference
    inference.read()
    assert [inference.estimate_ms("fwd", i) for i in range(5)] == [1e3 * d[0] for d in DELAYS]
    assert inference.estimate_ms("bwd", 0) is None
    assert _measured(wrapped).iterations == 0  # inference may run with quite another batch
    wrapped(torch.randn(2, 4)).sum().backward()
    wrapped.synchronize()
    assert [_measured(wrapped).estimate_ms("fwd", i) for i in range(5)] == [1e3 * d[0] for d in DELAYS]
    assert [_measured(wrapped).estimate_ms("bwd", i) for i in range(1, 5)] == [1e3 * d[1] for d in DELAYS[1:]]


def test_the_wall_clock_is_what_simulated_devices_are_timed_by() -> None:
    inside: list[float] = []  # of the layer, by microbatch

    class Sleeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            began = time.perf_counter()
            time.sleep(0.03)
            out = super().forward(x)
            inside.append(1e3 * (time.perf_counter() - began))
            return out

    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), Sleeps(4, 4)))
    began = time.perf_counter()
    wrapped.forward_backward(
        (torch.randn(2, 4),), loss_fn=lambda out, _: out.sum(), run_config=RoundPipeRunConfig(num_microbatch=1)
    )
    wrapped.synchronize()
    whole = 1e3 * (time.perf_counter() - began)
    first, second = (_measured(wrapped).estimate_ms("fwd", layer) for layer in range(2))
    assert first is not None and second is not None
    assert 30 <= inside[0] <= second and 0 < first <= whole - second


@pytest.mark.parametrize("seed", range(3))
def test_verbose_prints_a_line_a_layer_and_phase(
    seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelTimer, "VERBOSE", True)
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    plan = random_fused_plan(5, seed) if seed else one_layer_stages(5)
    lines = []
    for _ in range(2):
        wrapped.forward_backward(
            (torch.randn(6, 4),),
            loss_fn=lambda out, _: out.sum(),
            run_config=RoundPipeRunConfig(execute_plan=plan),
        )
        wrapped.step(optimizer.step, is_async=False)  # ends the iteration
        out, err = capsys.readouterr()
        assert out == ""
        lines.append([LINE.match(line) for line in err.splitlines()])
    fused = set(plan.bwd_plan[0])
    expected = {(layer, phase) for layer in range(5) for phase in ("fwd", "bwd")}
    expected |= {(layer, "re") for layer in range(5) if layer not in fused}
    for iteration in lines:
        assert None not in iteration
        assert Counter((int(m[1]), m[2]) for m in iteration if m) == Counter(expected)
    first, second = ({(m[1], m[2]): (float(m[3]), float(m[4])) for m in i if m} for i in lines)
    assert all(record == estimate for record, estimate in first.values())
    assert all(estimate == min(first[key][0], record) for key, (record, estimate) in second.items())


def test_a_failed_call_is_no_iteration_and_the_next_one_counts() -> None:
    roundpipe.use_devices("host:1")

    class Fails(nn.Linear):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise ValueError("not yet")
            return super().forward(x)

    layer = Fails(4, 4)
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), layer))
    with pytest.raises(roundpipe.errors.StageError, match="not yet"):
        wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum())
    assert _measured(wrapped).iterations == 0
    layer.fails = False
    wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum())
    wrapped.synchronize()
    assert _measured(wrapped).iterations == 1
    assert _measured(wrapped).estimate_ms("bwd", 1) is not None
    assert wrapped._state.measurements.sizes.known


@pytest.mark.needs_cuda
def test_times_of_a_gpu_without_waiting_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that keep the GPU busy for known numbers of cycles; no one may wait for an event or a stream."""

    class Spins(nn.Module):
        def __init__(self, cycles: int) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.cycles = cycles

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            if self.cycles:
                torch.cuda._sleep(self.cycles)
            return x

    roundpipe.use_devices("cuda:0")
    wrapped = RoundPipe(nn.Sequential(*(Spins(c) for c in (0, 20_000_000, 0, 40_000_000))))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a measurement waited for the device")

    monkeypatch.setattr(torch.cuda.Event, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    for _ in range(3):
        wrapped.forward_backward(
            (torch.randn(4, 4),),
            loss_fn=lambda out, _: out.sum(),
            run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(4)),
        )
    wrapped.synchronize()
    times = _measured(wrapped)
    assert times.iterations == 3
    forward = [times.estimate_ms("fwd", layer) or 0.0 for layer in range(4)]
    assert forward[1] > 2 and 1.5 < forward[3] / forward[1] < 2.5
    assert max(forward[0], forward[2]) < forward[1] / 4
    assert (times.estimate_ms("re", 1) or 0.0) > forward[1] / 2
    assert all(times.estimate_ms("bwd", layer) is not None for layer in range(4))
