"""Choosing contiguous stages: a search over the time that the slowest stage may take.

Note [Predicted time]
S jobs (forward, fused and backward stages) go round N devices, each with M microbatches, and follow each other at the
pace of the slowest one, t_max per microbatch. One iteration takes (M * S + N * (N - 1)) * t_max / N: the work, and the
time in which the first and the last jobs leave devices idle. A backward stage costs recompute + backward, the fused
stage forward + backward: what it saves in recompute is in its own cost. On one device nothing waits for anything, so
the time is M times the sum of all jobs, balance is worthless, and the fused stage is made as large as memory allows.

Note [Search]
Only sums of consecutive layers can be t_max. For a given t_max packing greedily from layer 0 up needs the fewest
stages, since any part of a permitted stage is permitted. The number of stages never rises with t_max, so between two
candidates no better plan exists than one with the smaller t_max and the larger one's stages: most intervals of
candidates are ruled out by that bound without looking inside.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundpipe.stage_search import TOLERANCE, Direction, Part, PartSearch, StageLists

__all__ = ["Request", "plan_stages", "predicted_ms"]

_MAX_CANDIDATES = 20_000
"""More candidates than this (about 140 layers) are thinned out to evenly spaced ones; the loss is far below what
measured times are good for."""


@dataclass(frozen=True)
class Request:
    """What a plan must respect, see ``ModelExecutePlan.auto``.

    Attributes:
        num_devices: N.
        min_stages: fewest stages.
        upper_threshold: how much slower than in the fastest plan the slowest stage may be.
        stage_limit_bytes: most bytes of weights, and of gradients where there are any, of one stage; None: no limit.
        microbatches: M; None: the default of a run, one more than there are devices.
        activation_limit_bytes: most bytes of activations of one microbatch in a backward stage; None: no limit.
        usable_bytes: what weights, gradients and activations of one device may fill together; None: no limit.
        by_layer: backward goes layer by layer (recompute_grain "layer"), so that activations of one count at a time.
    """

    num_devices: int
    min_stages: int = 1
    upper_threshold: float = 1.1
    stage_limit_bytes: int | None = None
    microbatches: int | None = None
    activation_limit_bytes: int | None = None
    usable_bytes: int | None = None
    by_layer: bool = False

    @property
    def num_microbatch(self) -> int:
        return self.num_devices + 1 if self.microbatches is None else self.microbatches


def predicted_ms(num_stages: int, slowest_ms: float, total_ms: float, request: Request) -> float:
    """Time of one iteration, see Note [Predicted time].

    Args:
        num_stages: jobs of the iteration.
        slowest_ms: time of the slowest job for one microbatch.
        total_ms: time of all jobs together for one microbatch; counts on one device only.
    """
    devices, microbatches = request.num_devices, request.num_microbatch
    if devices == 1:
        return microbatches * total_ms
    return (microbatches * num_stages + devices * (devices - 1)) * slowest_ms / devices


def plan_stages(parts: Sequence[Part], request: Request) -> list[StageLists]:
    """The stages of ``parts``, which run one after the other, chosen together; see Note [Search]."""
    searches = [PartSearch(part, request.stage_limit_bytes, request.activation_limit_bytes) for part in parts]
    if not any(search.length for search in searches):
        return [StageLists([], []) for _ in parts]
    limit_ms = math.inf if request.num_devices == 1 else _best_limit(searches, request)
    plans = [_tighten(search, search.stages(limit_ms)) for search in searches]
    return _at_least(searches, plans, request.min_stages)


def _best_limit(searches: Sequence[PartSearch], request: Request) -> float:
    candidates = _candidates(searches)
    least = bisect_left(candidates, True, key=lambda t: all(search.feasible(t) for search in searches))
    candidates = candidates[min(least, len(candidates) - 1) :]
    most = _most_jobs(searches)
    wanted = request.min_stages * (2 if _separate(searches) else 1)
    counts: dict[int, int] = {}

    def count(i: int) -> int:
        if i not in counts:
            # Where there would be too few jobs, stages are cut in two afterwards.
            counts[i] = max(sum(search.count(candidates[i]) for search in searches), min(wanted, most))
        return counts[i]

    def predicted(i: int, jobs: int) -> float:
        return predicted_ms(jobs, candidates[i], 0.0, request)

    best = min((0, len(candidates) - 1), key=lambda i: (predicted(i, count(i)), i))
    intervals = [(0, len(candidates) - 1)]
    while intervals:
        low, high = intervals.pop()
        if high - low < 2 or count(low) == count(high):
            continue
        if predicted(low + 1, count(high)) >= predicted(best, count(best)):
            continue
        middle = (low + high) // 2
        best = min((best, middle), key=lambda i: (predicted(i, count(i)), i))
        intervals += [(low, middle), (middle, high)]
    return _fewer_stages(candidates, best, count, request.upper_threshold)


def _fewer_stages(candidates: Sequence[float], best: int, count: Callable[[int], int], threshold: float) -> float:
    """A somewhat slower slowest stage, where fewer stages then do the same work in no more time.

    While iterations follow each other the devices stay busy, and only M * S * t_max / N counts. Each stage less saves
    a trip of the boundary activations to the host and back, which the prediction leaves out.
    """
    work = count(best) * candidates[best] * (1 + TOLERANCE)
    end = bisect_right(candidates, candidates[best] * threshold * (1 + TOLERANCE))
    chosen = i = best
    while i < end:
        if count(i) * candidates[i] <= work:
            chosen = i
        # On to the first candidate with fewer stages; those between need the same number and more time.
        i += 1 + bisect_left(range(i + 1, end), -count(i) + 1, key=lambda j: -count(j))
    return candidates[chosen]


def _candidates(searches: Sequence[PartSearch]) -> list[float]:
    values: set[float] = set()
    for search in searches:
        for direction in (search.forward, search.backward) if search.part.backward else (search.forward,):
            prefix = direction.prefix
            for start in range(search.length):
                base = prefix[start]
                values.update([end - base for end in prefix[start + 1 : direction.reach[start] + 1]])
        if search.part.fused:
            values.update(search.fused.prefix[-1] - base for base in search.fused.prefix[search.fused_from : -1])
    ordered = sorted(values)
    if len(ordered) > _MAX_CANDIDATES:
        step = (len(ordered) - 1) / (_MAX_CANDIDATES - 1)
        ordered = [ordered[round(i * step)] for i in range(_MAX_CANDIDATES)]
    # Sums that differ by rounding alone are one candidate; the largest of them admits all of their stages.
    following = [*ordered[1:], math.inf]
    return [t for t, larger in zip(ordered, following, strict=True) if larger > t * (1 + TOLERANCE)]


def _separate(searches: Sequence[PartSearch]) -> bool:
    """Whether forward and backward are calls of their own, each of which must keep all devices busy."""
    return searches[-1].part.backward and not searches[-1].part.fused


def _most_jobs(searches: Sequence[PartSearch]) -> int:
    total = 0
    for search in searches:
        alone = search.length - (1 if search.part.fused and search.length else 0)
        total += alone * (2 if search.part.backward else 1) + (search.length - alone)
    return total


def _tighten(search: PartSearch, plan: StageLists) -> StageLists:
    """The same numbers of stages with the least possible slowest forward and slowest backward stage."""
    start = search.length
    fused, backward = [], plan.backward
    if search.part.fused and plan.backward:
        fused, backward = plan.backward[:1], plan.backward[1:]
        start = fused[0].start
    forward = _balanced(search.forward, start, len(plan.forward))
    return StageLists(forward, fused + (_balanced(search.backward, start, len(backward))[::-1] if backward else []))


def _balanced(direction: Direction, end: int, count: int) -> list[range]:
    if count == 0:
        return []
    low, high = max(direction.times[:end]), direction.prefix[end]
    for _ in range(50):
        middle = (low + high) / 2
        if high - low <= TOLERANCE * high:
            break
        low, high = (low, middle) if direction.count(end, middle) <= count else (middle, high)
    return direction.pack(end, high)


def _at_least(searches: Sequence[PartSearch], plans: list[StageLists], min_stages: int) -> list[StageLists]:
    """Cuts the slowest stages in two until there are enough; a fused stage gives up its first layer last of all."""
    forward = [_Cuttable(plan.forward, search.forward) for search, plan in zip(searches, plans, strict=True)]
    backward = [
        _Cuttable(plan.backward, search.backward, descending=True, kept=int(search.part.fused))
        for search, plan in zip(searches, plans, strict=True)
    ]
    for group in (forward, backward) if _separate(searches) else (forward + backward,):
        while sum(len(item.stages) for item in group) < min_stages:
            choices = [(item.direction.cost(item.stages[i]), item, i) for item in group for i in item.choices()]
            if choices:
                _, item, i = max(choices, key=lambda choice: choice[0])
                item.cut(i)
            elif not _shrink_fused(searches[-1], plans[-1]):
                break
    return plans


@dataclass
class _Cuttable:
    """A list of stages of which all but the first ``kept`` may be cut in two."""

    stages: list[range]
    direction: Direction
    descending: bool = False
    kept: int = 0

    def choices(self) -> list[int]:
        return [i for i, stage in enumerate(self.stages) if i >= self.kept and len(stage) > 1]

    def cut(self, i: int) -> None:
        stage, prefix = self.stages[i], self.direction.prefix
        middle = (prefix[stage.start] + prefix[stage.stop]) / 2
        layer = min(stage[1:], key=lambda j: abs(prefix[j] - middle))
        halves = [range(stage.start, layer), range(layer, stage.stop)]
        self.stages[i : i + 1] = halves[::-1] if self.descending else halves


def _shrink_fused(search: PartSearch, plan: StageLists) -> bool:
    if not search.part.fused or not plan.backward or len(plan.backward[0]) < 2:
        return False
    first = plan.backward[0]
    freed = range(first.start, first.start + 1)
    plan.forward.append(freed)
    plan.backward[:1] = [range(first.start + 1, first.stop), freed]
    return True
