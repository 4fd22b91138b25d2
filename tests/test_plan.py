"""Plans: validity for each kind of run, the automatic choice, and behaviour as an object."""

import copy
import pickle
import warnings

import pytest

from roundpipe.errors import ConfigError, ConfigTypeError, PlanError
from roundpipe.plan import LayerCost, ModelExecutePlan


def _plan(forward, backward=()):
    plan = ModelExecutePlan()
    plan.fwd_plan = list(forward)
    plan.bwd_plan = list(backward)
    return plan


class _Model:
    def __init__(self, costs, devices=2, memory=None):
        self.costs, self.devices, self.memory = costs, devices, memory

    def _layer_costs(self, run_type):
        return list(self.costs)

    def _plan_limits(self):
        return self.devices, self.memory

    def _plan_run(self):
        return None, "stage"


def _equal_layers(count, size=10**9, gradients=None):
    return [LayerCost(size, size if gradients is None else gradients) for _ in range(count)]


def test_a_new_plan_is_empty_and_editable():
    plan = ModelExecutePlan()
    assert (plan.fwd_plan, plan.bwd_plan) == ([], [])
    plan.fwd_plan.append(range(3))
    plan.check_valid(3, "infer")
    assert ModelExecutePlan().fwd_plan == []


@pytest.mark.parametrize(
    ("run_type", "forward", "backward"),
    [
        ("infer", [range(4)], []),
        ("infer", [range(0, 1), range(1, 4)], [range(9, 11)]),
        ("train", [range(0, 1), range(1, 4)], [range(2, 4), range(0, 2)]),
        ("train", [range(4)], [range(4)]),
        ("fused", [range(0, 2)], [range(2, 4), range(1, 2), range(0, 1)]),
        ("fused", [], [range(4)]),
        ("fused", [range(0, 3)], [range(3, 4), range(0, 3)]),
    ],
)
def test_valid_plans(run_type, forward, backward):
    _plan(forward, backward).check_valid(4, run_type)


@pytest.mark.parametrize(
    ("run_type", "forward", "backward", "said"),
    [
        ("infer", [], [], "layer 0 is missing"),
        ("infer", [range(0, 2)], [], "layer 2 is missing"),
        ("infer", [range(0, 2), range(3, 4)], [], "layer 2 is missing"),
        ("infer", [range(0, 2), range(1, 4)], [], "layer 1 of"),
        ("infer", [range(2, 4), range(0, 2)], [], "layer 0 is missing"),
        ("infer", [range(0, 5)], [], "layer 4, but the model has 4"),
        ("infer", [range(-1, 4)], [], "layer -1"),
        ("infer", [range(0, 2), range(2, 2), range(2, 4)], [], "is empty"),
        ("infer", [range(0, 4, 2)], [], "step 2"),
        ("infer", [range(3, -1, -1)], [], "step -1"),
        ("infer", [[0, 1, 2, 3]], [], "list"),
        ("infer", (i for i in ()), [], "generator"),
        ("train", [range(4)], [], "bwd_plan: layer 0 is missing"),
        ("train", [range(4)], [range(0, 2), range(2, 4)], "layer 0 is missing"),
        ("train", [range(4)], [range(2, 4), range(0, 1)], "layer 1 is missing"),
        ("train", [range(4)], [range(2, 4), range(0, 3)], "layer 2 of"),
        ("train", [range(0, 2)], [range(2, 4), range(0, 2)], "layer 2 is missing"),
        ("fused", [range(4)], [], "layer 3 needs a stage"),
        ("fused", [range(4)], [range(2, 4), range(0, 2)], "fwd_plan: layer 2 is there twice"),
        ("fused", [range(0, 1)], [range(2, 4), range(0, 2)], "fwd_plan: layer 1 is missing"),
        ("fused", [range(0, 2)], [range(2, 4)], "bwd_plan: layer 0 is missing"),
        ("fused", [range(0, 2)], [range(2, 3), range(0, 2)], "bwd_plan: layer 3 is missing"),
    ],
)
def test_invalid_plans_name_the_layer(run_type, forward, backward, said):
    plan = _plan([], backward)
    plan.fwd_plan = forward
    with pytest.raises(PlanError) as info:
        plan.check_valid(4, run_type)
    assert said in str(info.value)
    assert isinstance(info.value, ValueError)


def test_unknown_run_type():
    with pytest.raises(ConfigError, match="'predict'"):
        _plan([range(1)]).check_valid(1, "predict")
    with pytest.raises(ConfigError, match="'predict'"):
        ModelExecutePlan.auto("predict", _Model(_equal_layers(1)))


def test_object_behaviour():
    plan = ModelExecutePlan.auto("fused", _Model(_equal_layers(6)))
    for twin in (copy.copy(plan), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert twin == plan
        assert repr(twin) == repr(plan)
        assert twin.explain() == plan.explain()
        twin.fwd_plan.append(range(6, 7))
        assert twin != plan
    assert plan != 3
    assert repr(_plan([range(2)])) == "ModelExecutePlan(fwd_plan=[range(0, 2)], bwd_plan=[])"


@pytest.mark.parametrize("run_type", ["infer", "train", "fused"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_auto_is_valid_and_within_memory(run_type, devices):
    memory = 10 * 10**9
    plan = ModelExecutePlan.auto(run_type, _Model(_equal_layers(12, size=5 * 10**8), devices, memory))
    plan.check_valid(12, run_type)
    half = 0.6 * memory / 2
    assert all(len(stage) * 5e8 <= half for stage in plan.fwd_plan)
    assert all(len(stage) * 1e9 <= half for stage in plan.bwd_plan)
    assert len(plan.fwd_plan) + len(plan.bwd_plan) >= devices


def test_auto_limit_is_in_units_of_1e9_bytes():
    model = _Model(_equal_layers(8), devices=1, memory=10**12)
    assert [len(s) for s in ModelExecutePlan.auto("infer", model, model_memory_limit=4.0).fwd_plan] == [2, 2, 2, 2]
    assert [len(s) for s in ModelExecutePlan.auto("fused", model, model_memory_limit=4).bwd_plan] == [1] * 8


def test_auto_warns_of_a_layer_above_the_limit():
    costs = _equal_layers(4)
    costs[2] = LayerCost(3 * 10**9, 3 * 10**9, name="Embedding")
    with pytest.warns(UserWarning, match=r"layer 2 \(Embedding\) needs 6.000 GB .* raised to 12.000 GB"):
        plan = ModelExecutePlan.auto("fused", _Model(costs, 1), model_memory_limit=4)
    plan.check_valid(4, "fused")
    assert max(len(stage) for stage in plan.bwd_plan) > 1  # the raised limit holds for all stages
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ModelExecutePlan.auto("infer", _Model(costs, 1), model_memory_limit=6)


def test_auto_for_several_models():
    models = [_Model(_equal_layers(n)) for n in (3, 1, 5)]
    plans = ModelExecutePlan.auto("fused", *models, model_memory_limit=8)
    assert isinstance(plans, list)
    for plan, length, run_type in zip(plans, (3, 1, 5), ("train", "train", "fused"), strict=True):
        plan.check_valid(length, run_type)
    same = _Model(_equal_layers(2))
    first, second = ModelExecutePlan.auto("fused", same, same)
    first.check_valid(2, "train")
    second.check_valid(2, "fused")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"min_stages": 0}, ConfigError),
        ({"min_stages": 1.5}, ConfigTypeError),
        ({"min_stages": True}, ConfigTypeError),
        ({"upper_threshold": 0.9}, ConfigError),
        ({"upper_threshold": "1"}, ConfigTypeError),
        ({"model_memory_limit": 0}, ConfigError),
        ({"model_memory_limit": -1.0}, ConfigError),
        ({"model_memory_limit": float("nan")}, ConfigError),
    ],
)
def test_auto_checks_its_arguments(arguments, kind):
    with pytest.raises(kind, match=next(iter(arguments))):
        ModelExecutePlan.auto("fused", _Model(_equal_layers(2)), **arguments)


def test_auto_wants_wrapped_models():
    with pytest.raises(ConfigTypeError, match="no model"):
        ModelExecutePlan.auto("infer")
    with pytest.raises(ConfigTypeError, match="int"):
        ModelExecutePlan.auto("infer", 3)


def test_explain_shows_stages_bytes_times_and_the_bound():
    costs = [LayerCost(10**9, 10**9, 1.0, 1.25, 2.0) for _ in range(6)]
    text = ModelExecutePlan.auto("fused", _Model(costs, 1), model_memory_limit=8).explain()
    assert "fused      0: layers 4-5" in text
    assert "4,000.0 MB" in text
    assert "6.000 ms" in text  # fused: two layers of forward 1.0 + backward 2.0, no recompute
    assert "6.500 ms" in text  # backward: recompute 1.25 + backward 2.0
    assert "Bound by: memory" in text
    assert "estimated" not in text
    # forward 4.0, fused 6.0, backward 13.0, for the two microbatches that one device gets
    assert "predicted: 46.000 ms for 2 microbatches on 1 device(s)" in text


def test_explain_of_estimates_of_edited_and_of_hand_made_plans():
    plan = ModelExecutePlan.auto("infer", _Model(_equal_layers(3)))
    assert "3 of 3 layers are estimated" in plan.explain()
    plan.fwd_plan.append(range(3, 9))
    assert "beyond the 3" in plan.explain()
    assert "no costs are known" in _plan([range(2)], [range(2, 3), range(0, 2)]).explain()
    assert "(the first fused)" in _plan([range(2)], [range(2, 3), range(0, 2)]).explain()
    assert "fused" not in _plan([range(2)], [range(0, 2)]).explain()
