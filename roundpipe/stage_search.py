"""The stages of one model as a function of the time that its slowest stage may take."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from roundpipe.layer_cost import LayerCost, with_estimates

__all__ = ["TOLERANCE", "Direction", "Part", "PartSearch", "StageLists", "activation_reach", "reach_of"]

TOLERANCE = 1e-9
"""Relative; sums of the same layers in different order may differ by rounding."""


@dataclass(frozen=True)
class Part:
    """A model to plan for: its layers, whether there is a backward, and whether its last stage is fused."""

    costs: tuple[LayerCost, ...]
    backward: bool
    fused: bool


@dataclass(frozen=True)
class StageLists:
    """The stages of one part; ``backward`` descends and begins with the fused stage if there is one."""

    forward: list[range]
    backward: list[range]


class Direction:
    """Greedy packing of a sequence of layers under a time and a memory limit."""

    def __init__(self, times: Sequence[float], reach: Sequence[int]) -> None:
        self.times = list(times)
        self.prefix = [0.0, *accumulate(times)]
        self.reach = reach  # reach[i]: the end of the longest stage from layer i that memory allows

    def pack(self, end: int, limit_ms: float) -> list[range]:
        """Stages of the layers below ``end``, ascending, as few as possible; a layer above the limit stands alone."""
        prefix, reach = self.prefix, self.reach
        stages = []
        start = 0
        while start < end:
            by_time = bisect_right(prefix, prefix[start] + limit_ms * (1 + TOLERANCE), start + 2) - 1
            stop = min(by_time, reach[start], end)
            stages.append(range(start, stop))
            start = stop
        return stages

    def count(self, end: int, limit_ms: float) -> int:
        """Number of stages that :meth:`pack` makes; the search asks this hundreds of times."""
        prefix, reach = self.prefix, self.reach
        slack = limit_ms * (1 + TOLERANCE)
        start = stages = 0
        while start < end:
            by_time = bisect_right(prefix, prefix[start] + slack, start + 2) - 1
            start = by_time if by_time < reach[start] else reach[start]
            stages += 1
        return stages

    def cost(self, stage: range) -> float:
        """Time of a stage in milliseconds for one microbatch."""
        return self.prefix[stage.stop] - self.prefix[stage.start]


class PartSearch:
    """One part's stages as a function of t_max."""

    def __init__(self, part: Part, stage_limit_bytes: int | None, activation_limit_bytes: int | None = None) -> None:
        costs = with_estimates(part.costs)
        forward = [cost.forward_ms or 0.0 for cost in costs]
        recompute = [cost.recompute_ms or 0.0 for cost in costs]
        backward = [cost.backward_ms or 0.0 for cost in costs]
        self.part = part
        self.length = len(costs)
        self.forward = Direction(forward, reach_of(costs, stage_limit_bytes, gradients=False))
        with_gradients = reach_of(costs, stage_limit_bytes, gradients=True)
        if activation_limit_bytes is not None:
            activations = activation_reach(costs, activation_limit_bytes)
            with_gradients = [min(pair) for pair in zip(with_gradients, activations, strict=True)]
        self.backward = Direction([r + b for r, b in zip(recompute, backward, strict=True)], with_gradients)
        self.fused = Direction([f + b for f, b in zip(forward, backward, strict=True)], with_gradients)
        # The earliest layer from which memory holds everything to the end in one stage.
        self.fused_from = next((i for i, end in enumerate(with_gradients) if end == self.length), self.length)

    def fused_start(self, limit_ms: float) -> int:
        """The first layer of the fused stage, or the number of layers where there is none."""
        if not self.part.fused or self.length == 0:
            return self.length
        prefix = self.fused.prefix
        by_time = bisect_left(prefix, prefix[-1] - limit_ms * (1 + TOLERANCE))
        return min(max(by_time, self.fused_from), self.length - 1)

    def slowest_layer(self, start: int) -> float:
        """The least t_max with the fused stage at ``start``."""
        single = self.forward.times[:start] + (self.backward.times[:start] if self.part.backward else [])
        fused = [self.fused.cost(range(start, self.length))] if start < self.length else []
        return max([*single, *fused], default=0.0)

    def feasible(self, limit_ms: float) -> bool:
        """Whether every stage can keep the limit."""
        return self.slowest_layer(self.fused_start(limit_ms)) <= limit_ms * (1 + TOLERANCE)

    def count(self, limit_ms: float) -> int:
        """Number of stages that :meth:`stages` makes."""
        start = self.fused_start(limit_ms)
        backward = self.backward.count(start, limit_ms) if self.part.backward else 0
        return self.forward.count(start, limit_ms) + backward + (start < self.length)

    def stages(self, limit_ms: float) -> StageLists:
        """The fewest stages within the limit."""
        start = self.fused_start(limit_ms)
        forward = self.forward.pack(start, limit_ms)
        fused = [range(start, self.length)] if start < self.length else []
        backward = self.backward.pack(start, limit_ms)[::-1] if self.part.backward else []
        return StageLists(forward, fused + backward)


def reach_of(costs: Sequence[LayerCost], limit_bytes: int | None, *, gradients: bool) -> list[int]:
    """For each layer the end of the longest stage from it within the limit; at least the layer itself."""
    length = len(costs)
    if limit_bytes is None:
        return [length] * length
    sizes = [
        {unit: weights + (grads if gradients else 0) for unit, weights, grads in cost.own_units(i)}
        for i, cost in enumerate(costs)
    ]
    users: dict[object, int] = {}
    reach = []
    used = end = 0
    for start in range(length):
        while end < length:
            added = sum(size for unit, size in sizes[end].items() if users.get(unit, 0) == 0)
            if end > start and used + added > limit_bytes:
                break
            for unit in sizes[end]:
                users[unit] = users.get(unit, 0) + 1
            used += added
            end += 1
        reach.append(end)
        for unit, size in sizes[start].items():
            users[unit] -= 1
            if users[unit] == 0:
                used -= size
    return reach


def activation_reach(costs: Sequence[LayerCost], limit_bytes: int) -> list[int]:
    """For each layer the end of the longest backward stage from it whose activations stay within the limit; at least
    the layer itself. The sizes are those of ``activation_bytes``.
    """
    inner = [cost.inner_bytes or 0 for cost in costs]
    inputs = [cost.input_bytes or 0 for cost in costs]
    prefix = [0, *accumulate(inner)]
    reach = []
    for start in range(len(costs)):
        largest_inner = largest_input = 0
        end = start
        while end < len(costs):
            largest_inner, largest_input = max(largest_inner, inner[end]), max(largest_input, inputs[end])
            if end > start and 3 * largest_input + prefix[end + 1] - prefix[start] + largest_inner > limit_bytes:
                break
            end += 1
        reach.append(end)
    return reach
