"""The search against an exhaustive one on small models, its limits, and its speed."""

import itertools
import math
import random
import time

import pytest

from roundpipe.layer_cost import LayerCost, stage_bytes, with_estimates
from roundpipe.planner import Request, plan_stages, predicted_ms
from roundpipe.stage_search import Part


def _random_costs(rng, length, scale=1):
    return tuple(
        LayerCost(
            rng.randint(1, 9) * scale,
            rng.choice([0, rng.randint(1, 9) * scale]),
            rng.uniform(0.2, 4),
            rng.uniform(0.2, 4),
            rng.uniform(0.2, 8),
        )
        for _ in range(length)
    )


def _compositions(length):
    """All ways to cut ``length`` layers into consecutive stages."""
    for cuts in itertools.product([False, True], repeat=max(length - 1, 0)):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), length]
        yield [range(a, b) for a, b in itertools.pairwise(edges)] if length else []


def _job_ms(cost, phase):
    if phase == "forward":
        return cost.forward_ms
    return cost.backward_ms + (cost.forward_ms if phase == "fused" else cost.recompute_ms)


def _jobs(part, forward, backward):
    fused = part.fused and bool(backward)
    yield from (("forward", stage) for stage in forward)
    yield from (("fused" if fused and i == 0 else "backward", stage) for i, stage in enumerate(backward))


def _time(part, forward, backward, request):
    costs = with_estimates(part.costs)
    times = [sum(_job_ms(costs[layer], phase) for layer in stage) for phase, stage in _jobs(part, forward, backward)]
    return predicted_ms(len(times), max(times), sum(times), request)


def _fits(part, forward, backward, limit):
    return limit is None or all(
        len(stage) == 1 or stage_bytes(part.costs[stage.start : stage.stop], gradients=phase != "forward") <= limit
        for phase, stage in _jobs(part, forward, backward)
    )


def _all_plans(part):
    length = len(part.costs)
    if not part.backward:
        yield from ((forward, []) for forward in _compositions(length))
    elif not part.fused:
        yield from ((f, b[::-1]) for f in _compositions(length) for b in _compositions(length))
    else:
        for start in range(length):
            for forward in _compositions(start):
                for backward in _compositions(start):
                    yield forward, [range(start, length), *backward[::-1]]


def _assert_valid(part, plan):
    length = len(part.costs)
    start = plan.backward[0].start if part.fused else length
    assert [layer for stage in plan.forward for layer in stage] == list(range(start))
    covered = [layer for stage in reversed(plan.backward) for layer in stage]
    assert covered == (list(range(length)) if part.backward else [])
    assert all(len(stage) for stage in plan.forward + plan.backward)


@pytest.mark.parametrize("kind", ["infer", "train", "fused"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 12, 20])
def test_as_good_as_an_exhaustive_search(kind, devices, limit):
    rng = random.Random(f"{kind}{devices}{limit}")
    for length in (1, 2, 4, 5):
        part = Part(_random_costs(rng, length), kind != "infer", kind == "fused")
        request = Request(devices, 1, 1.0, limit)
        (plan,) = plan_stages([part], request)
        _assert_valid(part, plan)
        assert _fits(part, plan.forward, plan.backward, limit)
        best = min(_time(part, f, b, request) for f, b in _all_plans(part) if _fits(part, f, b, limit))
        got = _time(part, plan.forward, plan.backward, request)
        assert got <= best * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["infer", "train", "fused"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_least_number_of_stages(kind, devices):
    rng = random.Random(devices)
    for length, min_stages in itertools.product((1, 2, 3, 9), (1, 2, 5, 100)):
        part = Part(_random_costs(rng, length), kind != "infer", kind == "fused")
        (plan,) = plan_stages([part], Request(devices, min_stages, 1.1, 15))
        _assert_valid(part, plan)
        if kind == "fused":
            assert len(plan.forward) + len(plan.backward) >= min(min_stages, 2 * length - 1)
        else:
            assert len(plan.forward) >= min(min_stages, length)
            assert kind == "infer" or len(plan.backward) >= min(min_stages, length)


def test_one_device_prefers_the_largest_fused_stage():
    costs = tuple(LayerCost(10, 10, 1.0, 1.0, 2.0) for _ in range(20))
    (plan,) = plan_stages([Part(costs, True, True)], Request(1, 1, 1.1, None))
    assert (plan.forward, plan.backward) == ([], [range(20)])
    (plan,) = plan_stages([Part(costs, True, True)], Request(1, 1, 1.1, 100))
    assert plan.backward[0] == range(15, 20)
    assert len(plan.forward) == 2  # weights alone: ten layers fit
    assert len(plan.backward) == 4


def test_equal_layers_on_two_devices_are_balanced():
    costs = tuple(LayerCost(10, 10, 1.0, 1.0, 2.0) for _ in range(12))
    (plan,) = plan_stages([Part(costs, True, True)], Request(2, 2, 1.0, None))
    slowest = max(
        [1.0 * len(s) for s in plan.forward] + [3.0 * len(plan.backward[0])] + [3.0 * len(s) for s in plan.backward[1:]]
    )
    assert max(3.0 * len(s) for s in plan.backward) == slowest
    assert max(len(s) for s in plan.forward) - min(len(s) for s in plan.forward) <= 2


def test_threshold_trades_stages_for_balance():
    costs = tuple(LayerCost(10, 10, 1.0, 1.0, 2.0) for _ in range(32))
    part = Part(costs, True, True)
    counts = []
    for threshold in (1.0, 1.5, 2.0, 4.0):
        (plan,) = plan_stages([part], Request(4, 4, threshold, None))
        _assert_valid(part, plan)
        counts.append(len(plan.forward) + len(plan.backward))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


def test_shared_units_count_once_a_stage():
    shared = (("tied", 50, 0),)
    costs = tuple(LayerCost(60, 0, 1.0, 1.0, 1.0, units=(*shared, (i, 10, 0))) for i in range(5))
    assert stage_bytes(costs, gradients=False) == 100
    (plan,) = plan_stages([Part(costs, False, False)], Request(1, 1, 1.1, 100))
    assert plan.forward == [range(5)]
    (plan,) = plan_stages([Part(costs, False, False)], Request(1, 1, 1.1, 90))
    assert [len(stage) for stage in plan.forward] in ([4, 1], [3, 2])


def test_shared_units_at_a_distance():
    costs = [LayerCost(10, 0, 1.0, 1.0, 1.0, units=((i, 10, 0),)) for i in range(6)]
    costs[0] = costs[5] = LayerCost(40, 0, 1.0, 1.0, 1.0, units=(("tied", 40, 0),))
    (plan,) = plan_stages([Part(tuple(costs), False, False)], Request(1, 1, 1.1, 80))
    assert plan.forward == [range(6)]
    (plan,) = plan_stages([Part(tuple(costs), False, False)], Request(1, 1, 1.1, 79))
    assert len(plan.forward) == 2


def test_frozen_layers_take_no_gradient_bytes():
    frozen = tuple(LayerCost(10, 0, 1.0, 1.0, 1.0) for _ in range(10))
    trained = tuple(LayerCost(10, 10, 1.0, 1.0, 1.0) for _ in range(10))
    limit = Request(1, 1, 1.1, 100)
    assert plan_stages([Part(frozen, True, True)], limit)[0].backward == [range(10)]
    assert len(plan_stages([Part(trained, True, True)], limit)[0].backward) == 2


def test_several_models_are_planned_together():
    rng = random.Random(3)
    parts = [
        Part(_random_costs(rng, 6), True, False),
        Part(_random_costs(rng, 1), True, False),
        Part(_random_costs(rng, 9), True, True),
    ]
    plans = plan_stages(parts, Request(2, 2, 1.1, 30))
    for part, plan in zip(parts, plans, strict=True):
        _assert_valid(part, plan)
        assert _fits(part, plan.forward, plan.backward, 30)


def test_a_model_without_layers():
    assert plan_stages([Part((), False, False)], Request(2))[0].forward == []


def test_estimates_follow_bytes_and_measurements():
    unknown = with_estimates([LayerCost(100), LayerCost(300), LayerCost(0)])
    assert unknown[1].forward_ms == pytest.approx(3 * unknown[0].forward_ms)
    assert unknown[0].backward_ms == pytest.approx(2 * unknown[0].forward_ms)
    assert unknown[2].forward_ms > 0
    some = with_estimates([LayerCost(100, forward_ms=5.0), LayerCost(300)])
    assert (some[0].forward_ms, some[1].forward_ms) == (5.0, pytest.approx(15.0))


def test_hundred_layers_plan_quickly():
    rng = random.Random(0)
    seconds = math.inf
    costs = _random_costs(rng, 100, scale=10**8)
    for _ in range(5):  # the least of several: processor time, too, suffers from neighbours
        begin = time.thread_time()
        plan_stages([Part(costs, True, True)], Request(4, 4, 1.1, 2 * 10**9))
        seconds = min(seconds, time.thread_time() - begin)
    assert seconds < 0.05


def test_many_layers_with_few_candidates_are_still_valid():
    rng = random.Random(0)
    part = Part(_random_costs(rng, 400), True, True)
    (plan,) = plan_stages([part], Request(4, 4, 1.1, None))
    _assert_valid(part, plan)
