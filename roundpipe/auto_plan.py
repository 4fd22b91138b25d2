"""Plans from costs: the memory that a device has for weights and for activations, and the best plan within both.

Note [Memory of a device]
  A device holds the region of weights and gradients, which is as large as two of its largest jobs, and beside it the
  activations of the microbatch that it computes. Half of the model memory limit bounds the weights of one job. What is
  left beside the region bounds the activations of a backward stage, once they have been measured; one tenth of the
  device stays free for what nobody counts (workspaces, fragments, the loss's own temporaries). Smaller stages of
  weights leave more for activations, so several splits of the memory are tried where that of the limit does not fit.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roundpipe.call_site import caller_level
from roundpipe.errors import ConfigError, ConfigTypeError
from roundpipe.layer_cost import LayerCost, activation_bytes, activations_known, stage_bytes, with_estimates
from roundpipe.planner import Request, plan_stages, predicted_ms
from roundpipe.stage_search import Part, StageLists

__all__ = ["best_plans", "check_number", "check_positive", "fits", "iteration_ms", "stage_limit"]

_BYTES_NOT_GB = 1e6
"""No device has a petabyte."""

DEFAULT_MEMORY_SHARE = 0.6
"""Share of the smallest device that a plan may fill with weights and gradients; activations get the rest."""

USABLE_SHARE = 0.9
"""Share of a device that the planner gives away."""

_NO_ROOM = -1
"""A limit that no stage of two layers keeps, whatever is known of them."""

_SPLITS = (1.0, 0.6, 0.35, 0.2, 0.1)
"""Shares of the largest job's weights that are tried where activations do not fit beside all of them."""


def best_plans(parts: Sequence[Part], request: Request) -> list[StageLists]:
    """The fastest predicted plan whose weights and activations fit, see Note [Memory of a device]; where none fits,
    single layers where that helps.
    """
    plans = plan_stages(parts, request)
    if request.usable_bytes is None or fits(parts, plans, request):
        return plans
    largest = max(cost.stage_bytes(gradients=part.backward) for part in parts for cost in part.costs)
    most = _largest_job_bytes(parts, plans)
    found = []
    for share in _SPLITS:
        weights = max(int(share * most), largest)
        left = max(request.usable_bytes - 2 * weights, 0)
        plans = plan_stages(parts, replace(request, stage_limit_bytes=weights, activation_limit_bytes=left))
        found.append((not fits(parts, plans, request), iteration_ms(parts, plans, request), plans))
        if weights == largest:
            break
    return min(found, key=lambda entry: entry[:2])[2]


def fits(parts: Sequence[Part], plans: Sequence[StageLists], request: Request) -> bool:
    """Whether every backward stage's measured activations find room beside the region of weights. Stages of a single
    layer pass: there is nothing smaller.
    """
    if request.usable_bytes is None:
        return True
    room = request.usable_bytes - 2 * _largest_job_bytes(parts, plans)
    return all(
        len(costs) == 1 or activation_bytes(costs, by_layer=request.by_layer) <= room
        for costs, gradients in _jobs(parts, plans)
        if gradients
    )


def _jobs(parts: Sequence[Part], plans: Sequence[StageLists]) -> Iterator[tuple[tuple[LayerCost, ...], bool]]:
    """(layers, whether gradients come with them) of every stage."""
    for part, plan in zip(parts, plans, strict=True):
        yield from ((part.costs[stage.start : stage.stop], False) for stage in plan.forward)
        yield from ((part.costs[stage.start : stage.stop], True) for stage in plan.backward)


def _largest_job_bytes(parts: Sequence[Part], plans: Sequence[StageLists]) -> int:
    return max((stage_bytes(costs, gradients=gradients) for costs, gradients in _jobs(parts, plans)), default=0)


def iteration_ms(parts: Sequence[Part], plans: Sequence[StageLists], request: Request) -> float:
    """Predicted time of one iteration of all parts, in milliseconds."""
    times = []
    for part, plan in zip(parts, plans, strict=True):
        costs = with_estimates(part.costs)
        forward = [cost.forward_ms or 0.0 for cost in costs]
        backward = [(cost.backward_ms or 0.0) + (cost.recompute_ms or 0.0) for cost in costs]
        fused = [(cost.backward_ms or 0.0) + (cost.forward_ms or 0.0) for cost in costs]
        times += [sum(forward[stage.start : stage.stop]) for stage in plan.forward]
        for i, stage in enumerate(plan.backward):
            times.append(sum((fused if part.fused and i == 0 else backward)[stage.start : stage.stop]))
    return predicted_ms(len(times), max(times, default=0.0), sum(times), request)


def cautious(request: Request, parts: Sequence[Part]) -> Request:
    """While nobody knows how much room activations take and memory is limited: backward one layer a stage, and no stage
    with more weights than the largest layer has.
    """
    unknown = not all(activations_known(part.costs) for part in parts if part.backward)
    if unknown and request.usable_bytes is not None:
        largest = max(cost.stage_bytes(gradients=part.backward) for part in parts for cost in part.costs)
        activations = request.activation_limit_bytes if request.by_layer else _NO_ROOM
        return replace(request, activation_limit_bytes=activations, stage_limit_bytes=largest)
    return request


def stage_limit(
    parts: Sequence[Part], limit_gb: float | None, memories: Sequence[int | None], *, warns: bool
) -> int | None:
    """Bytes of one stage: half of the limit, raised where one layer alone needs more, with a warning if ``warns``.
    None: no limit.
    """
    if limit_gb is not None:
        limit = check_number("model_memory_limit", limit_gb, 0.0) * 1e9
        if limit == 0:
            raise ConfigError("model_memory_limit: got 0 GB, expected more")
        if limit_gb >= _BYTES_NOT_GB:
            raise ConfigError(
                f"model_memory_limit: got {limit_gb:g} GB, expected GB, not bytes; perhaps {limit_gb / 1e9:g}"
            )
    else:
        known = [memory for memory in memories if memory]
        if not known:
            return None
        limit = DEFAULT_MEMORY_SHARE * min(known)
    stage = int(limit / 2)
    needs = [
        (cost.stage_bytes(gradients=part.backward), m, i)
        for m, part in enumerate(parts)
        for i, cost in enumerate(part.costs)
    ]
    most, m, i = max(needs, default=(0, 0, 0))
    if most > stage:
        name = parts[m].costs[i].name
        where = f"layer {i}" + (f" ({name})" if name else "") + (f" of model {m}" if len(parts) > 1 else "")
        if warns:
            warnings.warn(
                f"{where} needs {_gb(most)} in a stage of its own, but half of the model memory limit of {_gb(limit)} "
                f"is {_gb(stage)}; the limit is raised to {_gb(2 * most)}. Split the layer, or give a larger "
                "model_memory_limit, if devices run out of memory",
                stacklevel=caller_level(),
            )
        stage = most
    return stage


def _gb(size_bytes: float) -> str:
    size = size_bytes / 1e9
    return f"{size:.3f} GB" if size >= 0.01 else f"{size:.3g} GB"


def usable_bytes(memories: Sequence[int | None]) -> int | None:
    """Of the smallest device; None: no limit."""
    known = [memory for memory in memories if memory]
    return int(USABLE_SHARE * min(known)) if known else None


def check_positive(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # that is what is found out here
    except TypeError:
        raise ConfigTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an integer") from None
    if count < 1:
        raise ConfigError(f"{name}: got {count}, expected at least 1")
    return count


def check_number(name: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a number")
    if not math.isfinite(value) or value < least:
        raise ConfigError(f"{name}: got {value}, expected a finite number of at least {least}")
    return float(value)
