"""Weights, gradients and steps of a wrapped model between calls: loading, editing, freezing, clearing."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe
from roundpipe.errors import ConfigError, StageError

from . import oracle
from .test_model import assert_same, mlp, step_both

LR = 0.1


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def sgd(wrapped: RoundPipe) -> torch.optim.Optimizer:
    with OptimizerCtx():
        return torch.optim.SGD(wrapped.parameters(), lr=LR)


def plain_sgd(plain: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)


def update(optimizer: torch.optim.Optimizer) -> Any:
    return lambda: (optimizer.step(), optimizer.zero_grad())


# -- state dicts -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefix", ["", "model."])
def test_load_while_an_async_step_runs_is_never_reverted(prefix: str) -> None:
    wrapped, plain = RoundPipe(mlp(0), optim_dtype=torch.float64), mlp(1)
    optimizer = sgd(wrapped)
    wrapped.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())
    wrapped.step(lambda: (time.sleep(0.3), optimizer.step(), optimizer.zero_grad()))
    result = wrapped.load_state_dict({prefix + name: value for name, value in plain.state_dict().items()})
    assert not result.missing_keys and not result.unexpected_keys
    plain_optimizer = plain_sgd(plain)
    for seed in range(3):
        step_both(wrapped, plain, seed)
        wrapped.step(update(optimizer), is_async=False)
        update(plain_optimizer)()
    assert_same(wrapped, plain)


def test_state_dict_has_the_newest_weights_under_the_models_names() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
    step_both(wrapped, plain)
    wrapped.step(lambda: (time.sleep(0.2), *update(optimizer)()))
    update(plain_optimizer)()
    state = wrapped.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        oracle.assert_close_to_scale(state[name], value, name) if value.is_floating_point() else None
    with pytest.raises(RuntimeError, match="Missing key"):
        wrapped.load_state_dict({"0.weight": state["0.weight"]})
    assert "0.bias" in wrapped.load_state_dict({"0.weight": state["0.weight"]}, strict=False).missing_keys
    assert wrapped.state_dict(prefix="net.").keys() == {f"net.{name}" for name in state}


def test_a_partial_load_keeps_the_finer_values_of_the_rest() -> None:
    """Weights that were not loaded are not rounded to the model's dtype in the optimizer's copy."""
    wrapped = RoundPipe(mlp().bfloat16(), optim_dtype=torch.float32)
    optimizer = sgd(wrapped)
    wrapped.forward_backward((torch.randn(8, 6, dtype=torch.bfloat16),), loss_fn=lambda out, _: out.sum())
    wrapped.step(update(optimizer), is_async=False)
    before = {name: p.detach().clone() for name, p in wrapped.optim_named_parameters()}
    new = torch.randn(8, 6).bfloat16()
    wrapped.load_state_dict({"0.weight": new}, strict=False)
    after = dict(wrapped.optim_named_parameters())
    assert torch.equal(after["0.weight"], new.float())
    assert any(not torch.equal(p, p.bfloat16().float()) for p in before.values())
    assert all(torch.equal(after[name], value) for name, value in before.items() if name != "0.weight")


def test_load_with_assign_keeps_the_parameters() -> None:
    wrapped, other = RoundPipe(mlp(0)), mlp(1)
    parameters = list(wrapped.model.parameters())
    wrapped.load_state_dict(other.state_dict(), assign=True)
    assert all(a is b for a, b in zip(parameters, wrapped.model.parameters(), strict=True))
    step_both(wrapped, other)
    assert_same(wrapped, other)


# -- edits -------------------------------------------------------------------------------------------------------------
def scale_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)
        model[3].running_mean.add_(1.0)


def scale_data(model: nn.Module) -> None:
    model[0].weight.data.mul_(0.5)
    model[3].running_mean.data.add_(1.0)


def replace_data(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 0.5
    model[3].running_mean = model[3].running_mean + 1.0


def load_a_layer(model: nn.Module) -> None:
    state = {name: value * 0.5 for name, value in model[0].state_dict().items()}
    model[0].load_state_dict(state)


def initialise(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)


@pytest.mark.parametrize("edit", [scale_in_place, scale_data, replace_data, load_a_layer, initialise])
def test_edits_between_calls_are_seen(edit: Any) -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    step_both(wrapped, plain)
    wrapped.synchronize()  # or the backward under way might compute with the edited weights
    edit(wrapped.model)
    edit(plain)
    step_both(wrapped, plain, 1)
    assert_same(wrapped, plain)


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("edit", [scale_in_place, replace_data, load_a_layer, initialise])
def test_edits_reach_the_optimizer(edit: Any, is_async: bool) -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
    step_both(wrapped, plain)
    wrapped.step(update(optimizer), is_async=is_async)
    update(plain_optimizer)()
    wrapped.synchronize()
    edit(wrapped.model)
    edit(plain)
    for seed in (1, 2):
        step_both(wrapped, plain, seed)
        wrapped.step(update(optimizer), is_async=is_async)
        update(plain_optimizer)()
        wrapped.synchronize()
    assert_same(wrapped, plain)


# -- freezing ----------------------------------------------------------------------------------------------------------
def test_requires_grad_may_change_inside_a_window() -> None:
    """What has accumulated stays, whatever is frozen or unfrozen meanwhile."""
    wrapped, plain = RoundPipe(mlp()), mlp()
    changes: list[Any] = [
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: m[2].requires_grad_(False),
        lambda m: m[0].requires_grad_(True),
        lambda m: m[4].bias.requires_grad_(False),
        lambda m: m.requires_grad_(True),
    ]
    for seed, change in enumerate(changes):
        step_both(wrapped, plain, seed)
        change(wrapped.model)
        change(plain)
    step_both(wrapped, plain, 9)
    assert_same(wrapped, plain)
    for seed, change in enumerate(changes):  # the same with gradients shown in between
        step_both(wrapped, plain, seed)
        wrapped.synchronize()
        change(wrapped.model)
        change(plain)
    step_both(wrapped, plain, 9)
    assert_same(wrapped, plain)


@pytest.mark.parametrize("is_async", [True, False])
def test_frozen_and_unfrozen_under_an_optimizer(is_async: bool) -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    wrapped.model[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)

    def train(seed: int) -> None:
        step_both(wrapped, plain, seed)
        wrapped.step(update(optimizer), is_async=is_async)
        update(plain_optimizer)()

    train(0)
    wrapped.synchronize()
    wrapped.model[2].weight.requires_grad_(False)
    plain[2].weight.requires_grad_(False)
    train(1)
    wrapped.synchronize()
    wrapped.model[0].requires_grad_(True)
    plain[0].requires_grad_(True)
    train(2)  # in no optimizer yet: not trained, as in PyTorch
    wrapped.synchronize()
    plain[0].zero_grad()
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    new = [p for p in wrapped.optim_parameters() if id(p) not in known]
    assert len(new) == 2
    for parameter in new:
        parameter.grad = None
    optimizer.add_param_group({"params": new})
    plain_optimizer.add_param_group({"params": list(plain[0].parameters())})
    train(3)
    assert_same(wrapped, plain)


def test_a_pending_update_of_a_parameter_that_is_then_frozen_is_not_lost() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
    step_both(wrapped, plain)
    wrapped.step(update(optimizer))
    update(plain_optimizer)()
    wrapped.model[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    step_both(wrapped, plain, 1)
    assert_same(wrapped, plain)


# -- gradients and steps -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_is_accumulated_under_way_and_in_the_optimizer(set_to_none: bool) -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer = sgd(wrapped)
    step_both(wrapped, copy.deepcopy(plain))
    wrapped.step(lambda: None)  # takes the gradients and leaves them
    with torch.no_grad():
        for a, b in zip(wrapped.model.buffers(), plain.buffers(), strict=True):
            a.copy_(b)
    wrapped.forward_backward((torch.zeros(8, 6),), loss_fn=lambda out, _: out.sum())
    wrapped.zero_grad(set_to_none=set_to_none)
    with torch.no_grad():
        for a, b in zip(wrapped.model.buffers(), plain.buffers(), strict=True):
            a.copy_(b)
    wrapped.synchronize()
    assert all(p.grad is None for p in wrapped.model.parameters())
    for parameter in wrapped.optim_parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()
    step_both(wrapped, plain, 1)
    wrapped.step(update(optimizer), is_async=False)
    update(plain_sgd(plain))()
    assert_same(wrapped, plain)


def test_gradients_shown_may_change_places() -> None:
    wrapped, plain = RoundPipe(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))), None
    plain = copy.deepcopy(wrapped.model)
    x = torch.randn(8, 6)
    for model in (wrapped, plain):
        if model is wrapped:
            model.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
            model.synchronize()
        else:
            for piece in x.tensor_split(3):
                plain(piece).square().sum().backward()
        layers = list(model.layers) if model is wrapped else list(plain)
        layers[0].weight.grad, layers[2].weight.grad = layers[2].weight.grad, layers[0].weight.grad
        layers[1].weight.grad = layers[1].weight.grad.t()
        layers[1].bias.grad = layers[1].weight.grad[0]
    assert wrapped.model[0].weight.grad.data_ptr() != wrapped.model[2].weight.grad.data_ptr()
    wrapped.forward_backward((torch.zeros(8, 6),), loss_fn=lambda out, _: 0.0 * out.sum())
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


def test_gradients_shown_may_be_changed_replaced_and_cleared() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    step_both(wrapped, plain)
    wrapped.synchronize()
    for model in (wrapped.model, plain):
        model[0].weight.grad.mul_(2.0)
        model[2].weight.grad = torch.ones_like(model[2].weight)
        model[4].bias.grad = None
    step_both(wrapped, plain, 1)
    assert_same(wrapped, plain)
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
    wrapped.step(update(optimizer), is_async=False)
    update(plain_optimizer)()
    assert_same(wrapped, plain)


def test_steps_without_gradients_and_twice() -> None:
    """As in PyTorch: nothing to do is no error, and a gradient that was left counts again."""
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
    for is_async in (False, True):
        wrapped.step(update(optimizer), is_async=is_async)
        update(plain_optimizer)()
    step_both(wrapped, plain)
    for is_async in (False, True, True):
        wrapped.step(optimizer.step, is_async=is_async)  # does not clear
        plain_optimizer.step()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain)


def test_step_arguments_and_parameters_inside_a_step_function() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)

    def clip_and_step(limit: float, *, seen: list[Any]) -> None:
        seen.append(nn.utils.clip_grad_norm_(wrapped.parameters(), limit))
        assert [id(p) for p in wrapped.optim_parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
        update(optimizer)()

    wrapped.step(lambda: wrapped.zero_grad(), is_async=False)
    for is_async in (False, True):
        seen: list[Any] = []
        step_both(wrapped, plain)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        update(plain_optimizer)()
        wrapped.step(clip_and_step, is_async, 0.1, seen=seen)
        wrapped.synchronize()
        oracle.assert_close_to_scale(seen[0], norm, "norm")
        assert_same(wrapped, plain)


def test_waiting_inside_a_step_function_is_an_error_not_a_deadlock() -> None:
    wrapped = RoundPipe(mlp())
    sgd(wrapped)

    def call(wrapped: RoundPipe) -> None:
        wrapped.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())

    for wait in (wrapped.synchronize, wrapped.state_dict, lambda: wrapped.step(lambda: None), lambda: call(wrapped)):
        for is_async in (True, False):
            with pytest.raises(StageError, match="a step function used"):
                wrapped.step(wait, is_async=is_async)
                wrapped.synchronize()


def test_gradients_without_optimizer_parameters_are_an_error() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    with pytest.warns(UserWarning, match="OptimizerCtx"):
        wrong = torch.optim.SGD(wrapped.parameters(), lr=LR)
    step_both(wrapped, plain)
    for is_async in (True, False):
        with pytest.raises(ConfigError, match="OptimizerCtx"):
            wrapped.step(wrong.step, is_async=is_async)
    step_both(wrapped, plain, 1)
    assert_same(wrapped, plain)  # and nothing was lost
