"""The wrapper as a module: construction, names, attributes, parameters, modes, dtypes, copies."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError, ConfigTypeError

from . import oracle


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


def step_both(wrapped: RoundPipe, plain: nn.Sequential, seed: int = 0, microbatches: int = 2) -> None:
    torch.manual_seed(seed)
    x, label = torch.randn(8, 6), torch.randn(8, 4)
    state = torch.get_rng_state()
    config = RoundPipeRunConfig(num_microbatch=microbatches)
    got = wrapped.forward_backward((x,), label=label, loss_fn=F.mse_loss, run_config=config)
    torch.set_rng_state(state)
    want = oracle.forward_backward(list(plain), (x,), label=label, loss_fn=F.mse_loss, num_microbatch=microbatches)
    oracle.assert_close_to_scale(got, want, "loss")


def assert_same(wrapped: RoundPipe, plain: nn.Module, tolerance: float = 1e-6) -> None:
    wrapped.synchronize()
    for (name, got), want in zip(wrapped.model.named_parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(got.grad, want.grad, f"gradient of {name}", tolerance)
    oracle.assert_same_state(wrapped.model, plain, tolerance)


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


# -- construction ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: RoundPipe("model"), TypeError, "expected an nn.Module"),
        (lambda: RoundPipe(nn.Sequential()), ValueError, "at least one layer"),
        (lambda: RoundPipe(RoundPipe(mlp())), ValueError, "already wrapped"),
        (lambda: RoundPipe(nn.Sequential(RoundPipe(mlp()), nn.Tanh())), ValueError, "contains a wrapped model"),
        (lambda: RoundPipe(mlp(), pin_model="yes"), ValueError, "pin_model"),
        (lambda: RoundPipe(mlp(), optim_dtype=torch.int32), ValueError, "optim_dtype"),
        (lambda: RoundPipe(mlp(), optim_dtype="float32"), ValueError, "optim_dtype"),
        (lambda: RoundPipe(mlp(), model_run_config={"num_microbatch": 2}), TypeError, "RoundPipeRunConfig"),
        (lambda: RoundPipe(nn.Linear(2, 2, device="meta")), ValueError, "meta"),
        (lambda: RoundPipe(nn.LazyLinear(2)), ValueError, "not initialised"),
    ],
)
def test_constructor_refuses(make, kind, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=says) as caught:
        make()
    assert isinstance(caught.value, kind)


def test_default_name_is_the_place_of_construction() -> None:
    wrapped = RoundPipe(mlp())
    assert wrapped.name.startswith(f"{__file__}:")
    line = int(wrapped.name.rpartition(":")[2])
    with open(__file__) as source:
        assert "wrapped = RoundPipe(mlp())" in source.readlines()[line - 1]
    assert RoundPipe(mlp(), name="mine").name == "mine"


def test_layers_of_a_sequential_and_of_any_other_module() -> None:
    model = mlp()
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    wrapped = RoundPipe(model)
    assert wrapped.model is model and wrapped.num_layers == 5 and wrapped.layers == list(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(parameters, values, strict=True))
    body = Body()
    single = RoundPipe(body)
    assert single.num_layers == 1 and single.layers == [body]
    plain = copy.deepcopy(body)
    x = torch.randn(8, 6)
    with torch.no_grad():
        oracle.assert_close_to_scale(single(x), plain(x), "output")


def test_a_module_has_one_living_wrapper() -> None:
    model = mlp()
    wrapped = RoundPipe(model, name="the first")
    with pytest.raises(ConfigError, match="the first"):
        RoundPipe(nn.Sequential(model[0]))
    wrapped.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())
    del wrapped
    gc.collect()
    again, plain = RoundPipe(model), copy.deepcopy(model)
    again.zero_grad()
    step_both(again, plain)
    assert_same(again, plain)


def test_a_deleted_wrapper_leaves_nothing_behind() -> None:
    wrapped = RoundPipe(mlp())
    wrapped.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())
    weak = [weakref.ref(layer) for layer in wrapped.model]
    del wrapped
    from roundpipe import engine as engines

    engines.current().wait_idle()
    done = RoundPipe(nn.Linear(2, 2))
    for _ in range(2):  # on one device after the other: comes after what each worker still does
        done.forward_backward((torch.randn(3, 2),), loss_fn=lambda out, _: out.sum())
    done.synchronize()
    gc.collect()
    assert all(ref() is None for ref in weak)


# -- attributes --------------------------------------------------------------------------------------------------------
def test_attributes_are_those_of_the_model() -> None:
    body = Body()
    wrapped = RoundPipe(body)
    assert wrapped.scale == 2.0 and wrapped.first is body.first
    wrapped.scale = 3.0
    assert body.scale == 3.0 and "scale" not in wrapped.__dict__
    wrapped.note = "new"
    assert body.note == "new"
    del wrapped.note
    assert not hasattr(body, "note") and not hasattr(wrapped, "note")
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = wrapped.nothing_like_this
    with pytest.raises(AttributeError):
        del wrapped.nothing_like_this
    wrapped.name = "renamed"
    assert wrapped.name == "renamed" and not hasattr(body, "name")
    x = torch.randn(8, 6)
    with torch.no_grad():
        oracle.assert_close_to_scale(wrapped(x), body(x), "an attribute counts in the next call")


def test_attributes_of_the_original_model() -> None:
    body = Body()
    wrapped = RoundPipe(nn.Sequential(body.first, nn.Tanh(), body.second))
    wrapped.set_original_model(body)
    assert wrapped.scale == 2.0 and wrapped.second is body.second
    wrapped.scale = 5.0
    assert body.scale == 5.0
    wrapped.other = 1
    assert wrapped.model.other == 1 and not hasattr(body, "other")
    assert list(wrapped.state_dict()) == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert [n for n, _ in wrapped.optim_named_parameters()] == list(wrapped.state_dict())


# -- parameters --------------------------------------------------------------------------------------------------------
def test_parameters_inside_and_outside_an_optimizer_context() -> None:
    model = mlp()
    model[0].bias.requires_grad_(False)
    wrapped = RoundPipe(model, optim_dtype=torch.float64)
    with pytest.warns(UserWarning, match="OptimizerCtx"):
        outside = list(wrapped.parameters())
    assert all(a is b for a, b in zip(outside, model.parameters(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with OptimizerCtx():
            inside = dict(wrapped.named_parameters())
            assert list(wrapped.parameters()) == list(inside.values())
        own = dict(wrapped.optim_named_parameters())
        prefixed = [name for name, _ in wrapped.optim_named_parameters(prefix="net")]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(inside) == list(own) == list(trainable) and prefixed == [f"net.{name}" for name in trainable]
    for name, parameter in inside.items():
        host = trainable[name]
        assert own[name] is parameter and parameter is not host and parameter.dtype == torch.float64
        assert parameter.requires_grad and torch.equal(parameter.float(), host)
        assert parameter.shape == host.shape and parameter.stride() == host.stride()


def test_attributes_on_parameters_reach_the_optimizers() -> None:
    model = mlp()
    model[0].weight.no_decay = True
    wrapped = RoundPipe(model)
    first = next(wrapped.optim_parameters())
    assert first.no_decay


# -- modes and dtypes --------------------------------------------------------------------------------------------------
def test_train_and_eval_reach_every_layer() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    assert wrapped.training and wrapped.eval() is wrapped and not wrapped.training
    assert not any(m.training for m in wrapped.model.modules())
    plain.eval()
    step_both(wrapped, plain)
    assert_same(wrapped, plain)
    wrapped.train()
    plain.train()
    assert wrapped.training and all(m.training for m in wrapped.model.modules())
    step_both(wrapped, plain, 1)
    assert_same(wrapped, plain)
    wrapped.model[3].eval()
    plain[3].eval()
    step_both(wrapped, plain, 2)
    assert_same(wrapped, plain)


def test_dtype_changes_before_training_only() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    assert wrapped.float() is wrapped and wrapped.to("cpu") is wrapped
    assert wrapped.double() is wrapped
    plain.double()
    assert {p.dtype for p in wrapped.model.parameters()} == {torch.float64}
    x, label = torch.randn(8, 6, dtype=torch.double), torch.randn(8, 4, dtype=torch.double)
    state = torch.get_rng_state()
    got = wrapped.forward_backward((x,), label=label, loss_fn=F.mse_loss)
    torch.set_rng_state(state)
    want = oracle.forward_backward(list(plain), (x,), label=label, loss_fn=F.mse_loss, num_microbatch=3)
    oracle.assert_close_to_scale(got, want, "loss")
    with pytest.raises(ConfigError, match="before the first call"):
        wrapped.half()
    with pytest.raises(ConfigError, match="cannot be moved"):
        wrapped.to("meta")
    assert_same(wrapped, plain)


# -- copies ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
@pytest.mark.parametrize("optim_dtype", [None, torch.float64])
def test_copies_are_independent(how, optim_dtype) -> None:  # type: ignore[no-untyped-def]
    config = RoundPipeRunConfig(num_microbatch=2)
    wrapped = RoundPipe(mlp(), name="origin", optim_dtype=optim_dtype, model_run_config=config)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    plain = mlp()
    step_both(wrapped, plain)
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))  # a step may still run
    twin = how(wrapped)
    assert type(twin) is RoundPipe and twin.name == "origin" and twin._config == config
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    assert all(torch.equal(before[name], value) for name, value in wrapped.state_dict().items())
    for a, b in zip(wrapped.optim_parameters(), twin.optim_parameters(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a is not b
    wrapped.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    assert all(torch.equal(before[name], value) for name, value in twin.state_dict().items())
    reference = mlp()
    reference.load_state_dict(twin.state_dict())
    step_both(twin, reference, 2)
    assert_same(twin, reference)


def test_copies_keep_tied_weights_and_the_original_model() -> None:
    body = Body()
    body.second.weight = nn.Parameter(torch.randn(8, 8))
    body.second.bias = nn.Parameter(torch.randn(8))
    last = nn.Linear(8, 8)
    last.weight = body.second.weight
    body.last = last
    wrapped = RoundPipe(nn.Sequential(body.first, body.second, nn.Tanh(), last))
    wrapped.set_original_model(body)
    twin = copy.deepcopy(wrapped)
    assert twin.original_model.second is twin.model[1] and twin.original_model is not body
    assert twin.model[1].weight is twin.model[3].weight
    size = len(pickle.dumps(wrapped))
    numbers = sum(p.numel() for p in wrapped.model.parameters()) * 4
    assert size < 3 * numbers + 20_000, "parameters were written with the memory of their neighbours"


def test_wrong_calls_are_type_errors() -> None:
    wrapped = RoundPipe(mlp())
    x = torch.randn(8, 6)
    with pytest.raises(ConfigTypeError, match="input_args"):
        wrapped.forward_backward(x)
    with pytest.raises(ConfigTypeError, match="loss_fn"):
        wrapped.forward_backward((x,), loss_fn="mse")
    with pytest.raises(ConfigTypeError, match="step_fn"):
        wrapped.step(None)
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients disabled"):
        wrapped.forward_backward((x,))


def test_parameters_that_appear_after_the_wrapping_are_an_error() -> None:
    wrapped = RoundPipe(mlp())
    x = torch.randn(8, 6)
    loss = lambda out, _: out.sum()  # noqa: E731
    wrapped.forward_backward((x,), loss_fn=loss)
    old, wrapped.model[0].weight = wrapped.model[0].weight, nn.Parameter(torch.randn(8, 6))
    with pytest.raises(ConfigError, match=r"module 0 \(Linear\).*wrap it afterwards"):
        wrapped.forward_backward((x,), loss_fn=loss)
    wrapped.model[0].weight = old
    wrapped.model[2].add_module("adapter", nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"module 2 \(Linear\)"):
        wrapped.forward_backward((x,), loss_fn=loss)
    del wrapped.model[2].adapter
    wrapped.model[2].add_module("harmless", nn.Tanh())
    wrapped.forward_backward((x,), loss_fn=loss)
