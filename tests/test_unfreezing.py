"""Weights that are unfrozen after a model was wrapped: an optimizer that gets them trains them, others warn."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe

from . import oracle

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
LR = 0.1


def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, label, reduction="sum") / len(Y)


def models(frozen: tuple[int, ...]) -> tuple[RoundPipe, nn.Sequential]:
    roundpipe.use_devices("host:2")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for layer in frozen:
        net[layer].requires_grad_(False)
    plain = copy.deepcopy(net)
    return RoundPipe(net), plain


def optimizer_of(model: RoundPipe) -> torch.optim.Optimizer:
    with OptimizerCtx():
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train(model: RoundPipe, optimizer: torch.optim.Optimizer, plain: nn.Module, other: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model.forward_backward((X,), label=Y, loss_fn=loss_fn)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        loss_fn(plain(X), Y).backward()
        other.step()
        other.zero_grad()
    model.synchronize()
    for mine, theirs in zip(model.model.parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(mine, theirs, "weight", 1e-6)


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("frozen", [(0,), (0, 2)])
def test_an_optimizer_built_again_trains_them(frozen: tuple[int, ...], trained_before: bool) -> None:
    model, plain = models(frozen)
    if trained_before and frozen == (0,):
        train(model, optimizer_of(model), plain, torch.optim.SGD(plain[2].parameters(), lr=LR, momentum=0.9))
    else:
        assert len(list(model.optim_parameters())) == 4 - 2 * len(frozen)
    for net in (model, plain):
        net.requires_grad_(True)
    optimizer = optimizer_of(model)
    assert len(optimizer.param_groups[0]["params"]) == 4
    with OptimizerCtx():
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    train(model, optimizer, plain, torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9))


def test_a_group_of_them_trains_them() -> None:
    model, plain = models((0,))
    optimizer, other = optimizer_of(model), torch.optim.SGD(plain[2].parameters(), lr=LR, momentum=0.9)
    train(model, optimizer, plain, other)
    for net in (model.model, plain):
        net[0].requires_grad_(True)
    with OptimizerCtx():
        optimizer.add_param_group(
            {"params": [p for n, p in model.named_parameters() if n.startswith("0.")], "lr": 0.05}
        )
    other.add_param_group({"params": list(plain[0].parameters()), "lr": 0.05})
    train(model, optimizer, plain, other)


def test_a_step_whose_optimizer_cannot_hold_them_warns_once() -> None:
    model, plain = models((0,))
    optimizer = optimizer_of(model)
    model.requires_grad_(True)
    before = model.model[0].weight.detach().clone()

    def step() -> None:
        model.forward_backward((X,), label=Y, loss_fn=loss_fn)
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

    with pytest.warns(UserWarning, match=r"2 parameters \('0.weight', '0.bias'\) require grad since") as caught:
        step()
    assert caught[0].filename == __file__
    step()  # a second warning would be an error here
    model.synchronize()
    assert torch.equal(before, model.model[0].weight)
    model.zero_grad()  # of what no optimizer holds gradients add up, as in PyTorch
    plain.load_state_dict(model.model.state_dict())
    plain.requires_grad_(True)
    train(model, optimizer_of(model), plain, torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9))
