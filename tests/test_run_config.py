"""Run configurations: what each field accepts, and how a call's settings are put together."""

import copy
import pickle

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from roundpipe.errors import ConfigError, ConfigTypeError
from roundpipe.plan import ModelExecutePlan
from roundpipe.run_config import RoundPipeRunConfig, resolve


def _f(*_):
    return None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"requires_grad": False},
        {"output_device": "cpu"},
        {"output_device": torch.device("cuda", 1)},
        {"output_device": 0},
        {"preserve_rng_state": True},
        {"recompute_grain": "stage"},
        {"recompute_grain": "layer"},
        {"num_microbatch": 1},
        {"split_input": (None, None)},
        {"split_input": ((TensorChunkSpec(1), _Replicate), {"x": TensorChunkSpec(0), "y": None})},
        {"split_input": [TensorChunkSpec(0), None]},
        {"split_input": _f},
        {"split_label": {"a": [TensorChunkSpec(0), _Replicate()]}},
        {"split_label": _Replicate},
        {"split_label": _f},
        {"merge_output": True},
        {"merge_output": False},
        {"merge_output": (TensorChunkSpec(0), _CustomReducer(0, max))},
        {"merge_output": _f},
        {"execute_plan": ModelExecutePlan()},
        {"on_oom": "raise"},
        {"on_oom": "adapt"},
    ],
)
def test_accepted(settings):
    config = RoundPipeRunConfig(**settings)
    for name, value in settings.items():
        assert getattr(config, name) is value
    assert copy.copy(config) == config


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"requires_grad": 1}, ConfigTypeError, "int"),
        ({"preserve_rng_state": "yes"}, ConfigTypeError, "'yes'"),
        ({"output_device": "gpu"}, ConfigError, "'gpu'"),
        ({"output_device": "meta"}, ConfigError, "meta"),
        ({"output_device": 1.0}, ConfigTypeError, "float"),
        ({"output_device": True}, ConfigTypeError, "bool"),
        ({"recompute_grain": "layers"}, ConfigError, "'stage' or 'layer'"),
        ({"recompute_grain": 3}, ConfigTypeError, "int"),
        ({"num_microbatch": 0}, ConfigError, "at least 1"),
        ({"num_microbatch": -2}, ConfigError, "-2"),
        ({"num_microbatch": 2.0}, ConfigTypeError, "float"),
        ({"num_microbatch": True}, ConfigTypeError, "bool"),
        ({"num_microbatch": "4"}, ConfigTypeError, "str"),
        ({"split_input": TensorChunkSpec(0)}, ConfigTypeError, "args_spec"),
        ({"split_input": {"x": TensorChunkSpec(0)}}, ConfigTypeError, "dict"),
        ({"split_input": (None,)}, ConfigError, "1 entries"),
        ({"split_input": (None, None, None)}, ConfigError, "3 entries"),
        ({"split_input": ((0,), None)}, ConfigTypeError, "args_spec"),
        ({"split_input": (None, {"x": "batch"})}, ConfigTypeError, "'batch'"),
        ({"split_input": ((_CustomReducer(0, max),), None)}, ConfigTypeError, "_CustomReducer"),
        ({"split_label": 0}, ConfigTypeError, "split_label"),
        ({"split_label": [TensorChunkSpec(0), 1]}, ConfigTypeError, "split_label"),
        ({"merge_output": "cat"}, ConfigTypeError, "'cat'"),
        ({"merge_output": 1}, ConfigTypeError, "merge_output"),
        ({"execute_plan": [range(3)]}, ConfigTypeError, "ModelExecutePlan"),
        ({"on_oom": "retry"}, ConfigError, "'raise'"),
    ],
)
def test_refused(settings, kind, said):
    with pytest.raises(kind) as info:
        RoundPipeRunConfig(**settings)
    assert next(iter(settings)) in str(info.value)
    assert said in str(info.value)
    assert isinstance(info.value, ValueError)


def test_unknown_names_are_type_errors():
    with pytest.raises(TypeError, match="num_microbatches"):
        RoundPipeRunConfig(num_microbatches=2)


def test_positional_order():
    plan = ModelExecutePlan()
    config = RoundPipeRunConfig(True, "cpu", False, "layer", 3, _f, _f, False, plan)
    assert (config.requires_grad, config.output_device, config.preserve_rng_state) == (True, "cpu", False)
    assert (config.recompute_grain, config.num_microbatch, config.merge_output) == ("layer", 3, False)
    assert config.split_input is _f
    assert config.split_label is _f
    assert config.execute_plan is plan


def test_frozen_and_picklable():
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain="layer")
    with pytest.raises(AttributeError):
        config.num_microbatch = 4
    assert pickle.loads(pickle.dumps(config)) == config


def test_integers_of_other_kinds_are_taken():
    assert type(RoundPipeRunConfig(num_microbatch=torch.tensor(3)).num_microbatch) is int


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("devices", [1, 4])
def test_defaults(grad, devices):
    resolved = resolve(RoundPipeRunConfig(), devices=devices, grad_enabled=grad)
    assert resolved.requires_grad is grad
    assert resolved.output_device == torch.device("cpu")
    assert resolved.preserve_rng_state is True
    assert resolved.recompute_grain == "stage"
    assert resolved.num_microbatch == devices + 1
    assert resolved.split_input is None
    assert resolved.split_label is None
    assert resolved.merge_output is True
    assert resolved.execute_plan is None
    assert resolved.on_oom == "raise"


def test_call_overrides_model():
    model = RoundPipeRunConfig(
        requires_grad=False, num_microbatch=2, merge_output=False, preserve_rng_state=False, recompute_grain="layer"
    )
    inherited = resolve(model, RoundPipeRunConfig(), devices=1, grad_enabled=True)
    assert (inherited.requires_grad, inherited.num_microbatch, inherited.merge_output) == (False, 2, False)
    assert (inherited.preserve_rng_state, inherited.recompute_grain) == (False, "layer")
    call = RoundPipeRunConfig(
        requires_grad=True, num_microbatch=5, merge_output=True, preserve_rng_state=True, recompute_grain="stage"
    )
    resolved = resolve(model, call, devices=1, grad_enabled=True)
    assert (resolved.requires_grad, resolved.num_microbatch, resolved.merge_output) == (True, 5, True)
    assert (resolved.preserve_rng_state, resolved.recompute_grain) == (True, "stage")


def test_requires_grad_under_no_grad_is_a_runtime_error():
    with pytest.raises(RuntimeError, match="grad mode is off"):
        resolve(RoundPipeRunConfig(), RoundPipeRunConfig(requires_grad=True), devices=1, grad_enabled=False)
    ours = resolve(RoundPipeRunConfig(requires_grad=True), RoundPipeRunConfig(False), devices=1, grad_enabled=False)
    assert ours.requires_grad is False


def test_resolve_refuses_other_types():
    with pytest.raises(ConfigTypeError, match="the call's config"):
        resolve(RoundPipeRunConfig(), {"num_microbatch": 2}, devices=1, grad_enabled=True)
    with pytest.raises(ConfigTypeError, match="the model's config"):
        resolve(3, devices=1, grad_enabled=True)
    with pytest.raises(ConfigTypeError, match="the model's config"):
        resolve(None, devices=1, grad_enabled=True)


def test_output_device_must_exist():
    missing = RoundPipeRunConfig(output_device=f"cuda:{torch.cuda.device_count()}")
    with pytest.raises(ConfigError, match="output_device"):
        resolve(missing, devices=1, grad_enabled=True)
