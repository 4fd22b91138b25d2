"""Weights belong to one wrapper: sharing with a second is an error, wrapping the same model again a takeover."""

from __future__ import annotations

import copy
import gc
import time

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError, StageError

from . import oracle
from .at_rest import at_rest


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def train_once(wrapped: RoundPipe, lr: float = 0.1) -> torch.Tensor:
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    loss = wrapped.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: out.square().sum())
    wrapped.step(optimizer.step)
    return loss


def shares_a_module() -> tuple[nn.Module, nn.Module]:
    block = nn.Linear(4, 4)
    return nn.Sequential(block, nn.Tanh()), nn.Sequential(nn.Linear(4, 4), block)


def shares_a_parameter() -> tuple[nn.Module, nn.Module]:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return one, two


def is_a_part() -> tuple[nn.Module, nn.Module]:
    whole = net()
    return whole, whole[2]


def is_a_whole() -> tuple[nn.Module, nn.Module]:
    whole = net()
    return whole[2], whole


@pytest.mark.parametrize("make", [shares_a_module, shares_a_parameter, is_a_part, is_a_whole])
def test_sharing_in_part_is_refused_while_the_other_lives(make) -> None:
    one, two = make()
    first = RoundPipe(one, name="the first")
    plain = copy.deepcopy(one)
    with pytest.raises(ConfigError, match=r"parameter '.*' already belongs to the living wrapper 'the first'"):
        RoundPipe(two)
    x = torch.randn(4, next(one.parameters()).shape[-1])
    first(x).sum().backward()
    plain(x).sum().backward()
    first.synchronize()
    oracle.assert_same_gradients(one, plain)
    del first
    gc.collect()
    RoundPipe(two)


def test_wrapping_the_same_model_again_takes_it_over() -> None:
    model, plain = net(), net()
    old = RoundPipe(model, name="old")
    with OptimizerCtx():
        optimizer = torch.optim.SGD(old.parameters(), lr=0.1)
    late = old(torch.ones(4, 4)).sum()
    old.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: out.square().sum())
    old.step(lambda: (time.sleep(0.1), optimizer.step()))  # still runs when the next wrapper is made
    old.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: out.square().sum())
    new = RoundPipe(model, name="new")
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for piece in torch.ones(4, 4).tensor_split(3):
        plain(piece).square().sum().backward()
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    oracle.assert_same_state(new.model, plain)
    assert all(p.grad is None for p in model.parameters()), "gradients of the old window are dropped"
    uses = [
        lambda: old(torch.ones(4, 4)),
        lambda: old.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: out.sum()),
        lambda: old.step(optimizer.step),
        old.synchronize,
        old.state_dict,
        lambda: list(old.optim_parameters()),
        old.zero_grad,
        lambda: copy.deepcopy(old),
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="'old' was replaced when its model was wrapped again, by 'new'"):
            use()
    with pytest.raises(RuntimeError, match="weights changed"):
        late.backward()
    # Who only wrapped again and kept the old optimizer must not train nothing in silence.
    new.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: out.square().sum())
    with pytest.raises(ConfigError, match="no optimizer parameters"):
        new.step(optimizer.step)
    new.zero_grad()
    train_once(new)
    new.synchronize()
    for piece in torch.ones(4, 4).tensor_split(3):
        plain(piece).square().sum().backward()
    plain_optimizer.step()
    oracle.assert_same_state(new.model, plain)


def test_a_cell_that_failed_can_be_run_again() -> None:
    class Breaks(nn.Module):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise ValueError("on purpose")
            return x

    model = nn.Sequential(nn.Linear(4, 4), Breaks())
    wrapped = RoundPipe(model)
    train_once(wrapped)
    model[1].broken = True
    with pytest.raises(StageError):
        wrapped(torch.ones(4, 4))
    model[1].broken = False
    weights = copy.deepcopy(wrapped.state_dict())

    def fails() -> None:
        raise ValueError("in the step")

    wrapped.step(fails)
    with pytest.warns(UserWarning, match="in the step"):
        wrapped = RoundPipe(model)
    assert all(torch.equal(value, weights[name]) for name, value in wrapped.state_dict().items())
    train_once(wrapped)
    wrapped.synchronize()


def test_a_preset_can_be_wrapped_again() -> None:
    pytest.importorskip("transformers")
    from . import causal_models

    model = causal_models.make_model("llama", tied=True)
    old = wrap_model_to_roundpipe(model)
    new = wrap_model_to_roundpipe(model)
    with pytest.raises(ConfigError, match="was replaced"):
        old.synchronize()
    new.synchronize()


def test_a_takeover_lets_go_of_the_old_memory() -> None:
    from roundpipe import _ops

    model = nn.Linear(512, 512)
    wrapped = RoundPipe(model, optim_dtype=torch.float32)
    train_once_wide(wrapped)
    wrapped.synchronize()
    at_rest()
    before = _ops.host_stats()
    kept = [wrapped]
    for _ in range(3):
        wrapped = RoundPipe(model)
        train_once_wide(wrapped)
        wrapped.synchronize()
        kept.append(wrapped)
    at_rest()
    after = _ops.host_stats()
    assert after[2] - before[2] < 512 * 512 * 4, (before, after)


def train_once_wide(wrapped: RoundPipe) -> None:
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    config = RoundPipeRunConfig(num_microbatch=1)
    wrapped.forward_backward((torch.ones(2, 512),), loss_fn=lambda out, _: out.mean(), run_config=config)
    wrapped.step(optimizer.step, is_async=False)
