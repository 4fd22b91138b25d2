"""A plan in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roundpipe.layer_cost import LayerCost, activation_bytes, activations_known, stage_bytes, with_estimates
from roundpipe.planner import Request, predicted_ms
from roundpipe.stage_search import Part

__all__ = ["PlanFacts", "describe"]


@dataclass(frozen=True)
class PlanFacts:
    """What a plan was made from, kept so that it can be explained, also after it was edited by hand."""

    part: Part
    request: Request


def _layers(stage: range) -> str:
    return f"layer {stage.start}" if len(stage) == 1 else f"layers {stage.start}-{stage.stop - 1}"


def _amount(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} KB"


def describe(forward: Sequence[range], backward: Sequence[range], facts: PlanFacts | None) -> str:
    """The text of ``ModelExecutePlan.explain``."""
    jobs = [("forward", i, stage) for i, stage in enumerate(forward)]
    # A first backward stage that begins where forward ends, and not at the bottom of a forward of its own, is fused.
    covered = forward[-1].stop if forward else 0
    fused = bool(backward) and backward[0].start == covered
    jobs += [("fused" if fused and i == 0 else "backward", i, stage) for i, stage in enumerate(backward)]
    lines = [
        f"plan: {len(forward)} forward and {len(backward)} backward stages" + (" (the first fused)" if fused else "")
    ]
    if facts is None:
        lines += [f"  {phase:<8} {i:>3}: {_layers(stage)}" for phase, i, stage in jobs]
        return "\n".join([*lines, "no costs are known: the plan was not made by ModelExecutePlan.auto"])

    costs, request = with_estimates(facts.part.costs), facts.request
    if max((stage.stop for _, _, stage in jobs), default=0) > len(costs):
        return "\n".join([*lines, f"the plan was edited and names layers beyond the {len(costs)} it was made for"])
    times, sizes = [], []
    for phase, i, stage in jobs:
        chosen = costs[stage.start : stage.stop]
        times.append(sum(_job_ms(phase, cost.forward_ms, cost.recompute_ms, cost.backward_ms) for cost in chosen))
        sizes.append(stage_bytes(chosen, gradients=phase != "forward"))
        lines.append(f"  {phase:<8} {i:>3}: {_layers(stage):<16} {_amount(sizes[-1]):>14} {times[-1]:>12.3f} ms")
    if jobs:
        slowest = max(range(len(jobs)), key=times.__getitem__)
        largest = max(range(len(jobs)), key=sizes.__getitem__)
        total = predicted_ms(len(jobs), times[slowest], sum(times), request)
        lines.append(
            f"predicted: {total:.3f} ms for {request.num_microbatch} microbatches on {request.num_devices} device(s); "
            f"slowest stage: {jobs[slowest][0]} {jobs[slowest][1]}"
        )
        activations = _activations(jobs, costs, request)
        if activations is not None:
            lines.append(activations.line)
        name = f"{jobs[largest][0]} {jobs[largest][1]}"
        lines.append(
            _memory_line(name, sizes[largest], request, activations is not None and activations.full, len(jobs))
        )
    measured = sum(cost.forward_ms is not None for cost in facts.part.costs)
    if measured < len(costs):
        lines.append(
            f"times of {len(costs) - measured} of {len(costs)} layers are estimated from their bytes: not measured yet"
        )
    return "\n".join(lines)


def _job_ms(phase: str, forward: float | None, recompute: float | None, backward: float | None) -> float:
    """Time of a layer in a stage of this phase; the three times are filled in by now."""
    if phase == "forward":
        return forward or 0.0
    return (backward or 0.0) + ((forward if phase == "fused" else recompute) or 0.0)


@dataclass(frozen=True)
class _Activations:
    """The backward stage with the most activations, beside the region of weights."""

    line: str
    full: bool  # one layer more would not fit


def _activations(
    jobs: Sequence[tuple[str, int, range]], costs: Sequence[LayerCost], request: Request
) -> _Activations | None:
    backward = [job for job in jobs if job[0] != "forward"]
    if not backward or not activations_known(costs):
        return None
    sizes = [activation_bytes(costs[stage.start : stage.stop], by_layer=request.by_layer) for _, _, stage in backward]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    phase, i, stage = backward[largest]
    line = f"most activations: {phase} {i} with {_amount(sizes[largest])} for one microbatch"
    if request.usable_bytes is None:
        return _Activations(line, False)
    region = 2 * max(stage_bytes(costs[s.start : s.stop], gradients=phase != "forward") for phase, _, s in jobs)
    line += f", beside {_amount(region)} of weights and gradients; {_amount(request.usable_bytes)} may be used"
    one_more = 0 if request.by_layer else max(cost.inner_bytes or 0 for cost in costs[stage.start : stage.stop])
    return _Activations(line, region + sizes[largest] + one_more > request.usable_bytes)


def _memory_line(name: str, size: int, request: Request, full: bool, num_stages: int) -> str:
    if request.stage_limit_bytes is None:
        return f"largest stage: {name} with {_amount(size)}; no memory limit. Bound by: time"
    bound = "memory" if 1.05 * size > request.stage_limit_bytes else "time"
    if full and bound == "time":
        bound = "activations"
    if request.num_devices == 1 and bound == "time":
        # Nothing but memory makes more stages than are asked for; one each of forward and backward are a plan's least.
        if num_stages > max(request.min_stages, 2):
            bound = "memory"
        else:
            bound = "the number of layers" if request.min_stages == 1 else "the least number of stages"
    return (
        f"largest stage: {name} with {_amount(size)} of {_amount(request.stage_limit_bytes)} (half the model "
        f"memory limit). Bound by: {bound}"
    )
