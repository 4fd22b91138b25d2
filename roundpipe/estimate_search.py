"""Plans and settings for a model of which only sizes are known: what fits, and what of it should be quickest.

Note [Times without measurements]
  Only the order of times matters here. A layer's forward takes a moment for the call, and then its floating-point
  operations at a nominal rate, or the time to launch its operators where those are many and small; recompute as long
  again, backward twice as long where weights are trained, else once. An iteration takes as long as the slowest of
  compute, the way up and the way down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .auto_plan import DEFAULT_MEMORY_SHARE, best_plans, iteration_ms, stage_limit, usable_bytes
from .layer_cost import LayerCost, stage_bytes
from .layer_memory import Measured
from .layer_run import Work
from .memory_model import DevicePeak, Run, predict_peak
from .planner import Request, plan_stages
from .stage_search import Part, StageLists

__all__ = ["Machine", "Planned", "Profile", "automatic_plan", "fastest_plan", "predict"]

_RATES = {"cuda": (4e14, 4e-3, 5e10), "host": (5e10, 2e-2, 5e9)}
"""Operations a second, milliseconds to launch an operator, bytes a second and direction of a link."""

_CALL_MS = 0.1
"""Of every call of a layer."""

_WEIGHT_SHARES = (1.0, 0.6, 0.35, 0.2, 0.1, 0.0)
_ACTIVATION_SHARES = (1.0, 0.75, 0.5, 0.3, 0.15, 0.0)


@dataclass(frozen=True)
class Machine:
    """``kind``: "cuda" or "host". ``memory_bytes``: of one device; None: no limit."""

    kind: str
    num_devices: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Profile:
    """A model cut into microbatches of one size: costs with nominal times, memory, the lowest layer that is trained."""

    costs: tuple[LayerCost, ...]
    memory: Measured
    num_microbatch: int
    lowest: int

    @staticmethod
    def of(
        costs: Sequence[LayerCost], memory: Measured, work: Sequence[Work], num_microbatch: int, lowest: int, kind: str
    ) -> Profile:
        flops_per_s, launch_ms, _ = _RATES[kind]
        filled = []
        for cost, layer, done in zip(costs, memory.layers, work, strict=True):
            forward = _CALL_MS + max(done.flops / flops_per_s * 1e3, done.operators * launch_ms)
            filled.append(
                replace(
                    cost,
                    forward_ms=forward,
                    recompute_ms=forward,
                    backward_ms=forward * (2 if cost.gradient_bytes else 1),
                    input_bytes=layer.input_bytes,
                    inner_bytes=layer.graph_bytes + layer.output_bytes,
                )
            )
        return Profile(tuple(filled), memory, num_microbatch, lowest)

    @property
    def part(self) -> Part:
        return Part(self.costs, backward=True, fused=True)


@dataclass(frozen=True)
class Planned:
    """A plan with its peak on the device that needs most, whether that fits, and a time for comparison."""

    stages: StageLists
    grain: str
    peak: DevicePeak
    fits: bool
    ms: float


def predict(profile: Profile, machine: Machine, stages: StageLists, grain: str) -> Planned:
    """One plan's memory and time."""
    run = Run(
        "fused",
        stages.forward,
        stages.backward,
        profile.num_microbatch,
        grain,
        machine.num_devices,
        profile.lowest,
        in_flight=1 if machine.kind == "cuda" else 0,
    )
    usable = usable_bytes([machine.memory_bytes])
    peak = predict_peak(profile.costs, profile.memory, run)
    return Planned(
        stages, grain, peak, usable is None or peak.total_bytes <= usable, _ms(profile, machine, stages, grain)
    )


def automatic_plan(profile: Profile, machine: Machine, grain: str) -> Planned:
    """The plan that a call without one runs with, once its first iterations have measured activations."""
    (stages,) = best_plans([profile.part], _request(profile, machine, grain))
    return predict(profile, machine, stages, grain)


def fastest_plan(profile: Profile, machine: Machine, grain: str) -> Planned:
    """The quickest plan that fits; where none does, the one that needs least memory."""
    found = [predict(profile, machine, stages, grain) for stages in _candidates(profile, machine, grain)]
    fitting = [planned for planned in found if planned.fits]
    if fitting:
        return min(fitting, key=lambda planned: planned.ms)
    return min(found, key=lambda planned: planned.peak.total_bytes)


def _request(profile: Profile, machine: Machine, grain: str) -> Request:
    return Request(
        num_devices=machine.num_devices,
        min_stages=machine.num_devices,
        stage_limit_bytes=stage_limit([profile.part], None, [machine.memory_bytes], warns=False),
        microbatches=profile.num_microbatch,
        usable_bytes=usable_bytes([machine.memory_bytes]),
        by_layer=grain == "layer",
    )


def _candidates(profile: Profile, machine: Machine, grain: str) -> Iterator[StageLists]:
    request = _request(profile, machine, grain)
    (automatic,) = best_plans([profile.part], request)
    yield automatic
    usable = request.usable_bytes
    if usable is None:
        return
    largest = max(cost.stage_bytes(gradients=True) for cost in profile.costs)
    most = max(int(DEFAULT_MEMORY_SHARE / 2 * usable), largest)
    seen = {_key(automatic)}
    for share in _WEIGHT_SHARES:
        weights = max(int(share * most), largest)
        for part in (1.0,) if grain == "layer" else _ACTIVATION_SHARES:
            room = int(part * max(usable - 2 * weights, 0)) or -1
            limits = replace(
                request, stage_limit_bytes=weights, activation_limit_bytes=None if grain == "layer" else room
            )
            (stages,) = plan_stages([profile.part], limits)
            if _key(stages) not in seen:
                seen.add(_key(stages))
                yield stages
        if weights == largest:
            return


def _key(stages: StageLists) -> tuple[range, ...]:
    return (*stages.forward, *stages.backward)


def _ms(profile: Profile, machine: Machine, stages: StageLists, grain: str) -> float:
    request = Request(machine.num_devices, microbatches=profile.num_microbatch)
    compute = iteration_ms([profile.part], [stages], request)
    ran = [s for s in stages.backward if s.stop > profile.lowest] or stages.backward[:1]
    layers, pieces = profile.memory.layers, profile.num_microbatch
    saved = [s.start for s in ran]
    if grain == "layer":
        fused = ran[0]
        again = sum(profile.costs[layer].forward_ms or 0.0 for layer in fused[:-1])
        compute += pieces * again / machine.num_devices
        saved = [layer for s in ran for layer in s][1:]
    kept = pieces * sum(layers[layer].input_bytes for layer in saved)
    handed = pieces * sum(layers[s.start].input_bytes for s in (*stages.forward, *ran))
    up = sum(stage_bytes([profile.costs[i] for i in s], gradients=False) for s in (*stages.forward, *ran))
    down = sum(sum(profile.costs[i].gradient_bytes for i in s) for s in ran)
    link = _RATES[machine.kind][2] * machine.num_devices / 1e3
    return max(compute, (up + kept + handed) / link, (down + kept + handed) / link)
