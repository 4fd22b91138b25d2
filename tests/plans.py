"""Random valid plans."""

from __future__ import annotations

import random

from roundpipe import ModelExecutePlan


def cut(start: int, stop: int, rng: random.Random) -> list[range]:
    """Consecutive ranges that cover [start, stop), ascending."""
    if start == stop:
        return []
    inner = sorted(rng.sample(range(start + 1, stop), rng.randint(0, stop - start - 1)))
    edges = [start, *inner, stop]
    return [range(a, b) for a, b in zip(edges, edges[1:], strict=False)]


def random_fused_plan(num_layers: int, seed: int) -> ModelExecutePlan:
    rng = random.Random(seed)
    fused_start = rng.randint(0, num_layers - 1)
    plan = ModelExecutePlan()
    plan.fwd_plan = cut(0, fused_start, rng)
    plan.bwd_plan = [range(fused_start, num_layers), *reversed(cut(0, fused_start, rng))]
    plan.check_valid(num_layers, "fused")
    return plan


def one_layer_stages(num_layers: int) -> ModelExecutePlan:
    """Every layer a stage of its own, the last one fused."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(num_layers - 1)]
    plan.bwd_plan = [range(i, i + 1) for i in reversed(range(num_layers))]
    return plan
