"""What `wrap_model_to_roundpipe` makes of a model, and what it says to models that cannot be streamed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError, ConfigTypeError


@pytest.fixture(autouse=True)
def one_simulated_device():
    roundpipe.use_devices("host:1")
    yield
    roundpipe.use_devices(None)


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = sequential()

    def forward(self, x):
        return self.inner(x) + 1


def test_sequential_keeps_its_children_as_layers():
    model = sequential()
    wrapped = wrap_model_to_roundpipe(model, name="mine", optim_dtype=torch.float64)
    assert isinstance(wrapped, RoundPipe)
    assert (wrapped.num_layers, wrapped.name) == (3, "mine")
    assert next(wrapped.optim_parameters()).dtype == torch.float64
    x = torch.randn(6, 4)
    torch.testing.assert_close(wrapped(x), model(x))


def test_small_modules_are_one_layer_and_configs_apply():
    model = Two()
    config = RoundPipeRunConfig(num_microbatch=3)
    wrapped = wrap_model_to_roundpipe(model, upper_threshold=10**6, override_config={model: config})
    assert type(wrapped) is RoundPipe and wrapped.num_layers == 1
    pieces = []
    wrapped.forward_backward((torch.randn(6, 4),), loss_fn=lambda out, _: pieces.append(len(out)) or out.sum())
    assert sorted(pieces) == [2, 2, 2]


def test_name_defaults_to_the_line_of_the_call():
    assert wrap_model_to_roundpipe(sequential()).name.startswith(f"{__file__}:")


@pytest.mark.parametrize("model", [sequential(), Two()], ids=["sequential", "module"])
def test_a_forced_preset_must_exist(model):
    with pytest.raises(NotImplementedError, match="no preset for"):
        wrap_model_to_roundpipe(model, use_sequential_preset=True)


def _dispatched() -> nn.Module:
    model = sequential()
    model[0]._hf_hook = object()
    return model


def _compiled_in_place() -> nn.Module:
    model = sequential()
    model.compile()
    return model


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: 3, ConfigTypeError, "got int, expected an nn.Module"),
        (lambda: wrap_model_to_roundpipe(sequential()), ConfigError, "already wrapped"),
        (lambda: torch.compile(sequential()), ConfigError, "_orig_mod"),
        (_compiled_in_place, ConfigError, "not compiled"),
        (_dispatched, ConfigError, "device_map"),
        (lambda: nn.Linear(2, 2, device="meta"), ConfigError, "weight is on the meta device.*load the weights"),
    ],
)
def test_models_that_cannot_be_streamed_hear_why(make, kind, message):
    with pytest.raises(kind, match=message):
        wrap_model_to_roundpipe(make())


@pytest.mark.parametrize(
    ("thresholds", "kind", "message"),
    [
        (dict(lower_threshold=-1), ConfigError, "lower_threshold=-1"),
        (dict(lower_threshold="16k"), ConfigTypeError, "lower_threshold='16k'"),
        (dict(upper_threshold=True), ConfigTypeError, "upper_threshold=True"),
    ],
)
def test_wrong_thresholds_are_named(thresholds, kind, message):
    with pytest.raises(kind, match=message):
        wrap_model_to_roundpipe(sequential(), **thresholds)
