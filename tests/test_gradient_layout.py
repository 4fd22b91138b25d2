"""Freezing and unfreezing inside an accumulation window, and what the step does with gradients from before."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim
from roundpipe.errors import ConfigError

from . import oracle
from .plans import one_layer_stages
from .test_model import assert_same, mlp, step_both

LR = 0.1


class Steps:
    """The same training on a wrapped model and on its plain twin, by an optimizer of one kind."""

    def __init__(self, kind: str, is_async: bool, devices: int = 2) -> None:
        roundpipe.use_devices(f"host:{devices}")
        self.wrapped, self.plain = RoundPipe(mlp()), mlp()
        self.is_async = is_async
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=LR, momentum=0.5)
        self.what: Any
        if kind == "function":
            with OptimizerCtx():
                optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=LR, momentum=0.5)
            self.what = lambda: (optimizer.step(), optimizer.zero_grad())
        else:
            limit = float("inf") if kind == "compact with a norm" else None
            self.what = optim.SGD(self.wrapped, lr=LR, momentum=0.5, max_grad_norm=limit)

    def both(self, change: Any) -> None:
        change(self.wrapped.model)
        change(self.plain)

    def step(self) -> None:
        self.wrapped.step(self.what, is_async=self.is_async)
        self.wrapped.synchronize()  # so that the next iteration has the newest weights in either mode
        norms = [p.grad.norm() for p in self.plain.parameters() if p.grad is not None]
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        if getattr(self.what, "max_grad_norm", None) is not None and norms:
            assert self.what.grad_norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)


KINDS = ["function", "compact", "compact with a norm"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_the_gradient_of_a_parameter_that_was_frozen_since(kind: str, is_async: bool) -> None:
    """As in PyTorch, where an optimizer looks at ``.grad`` alone."""
    steps = Steps(kind, is_async)
    step_both(steps.wrapped, steps.plain, 0)
    steps.both(lambda m: m[2].requires_grad_(False))
    step_both(steps.wrapped, steps.plain, 1)  # adds nothing to the frozen layer
    before = steps.wrapped.model[2].weight.clone()
    steps.step()
    assert not torch.equal(steps.wrapped.model[2].weight, before)
    assert steps.wrapped.model[2].weight.grad is None
    assert_same(steps.wrapped, steps.plain)
    step_both(steps.wrapped, steps.plain, 2)
    steps.step()
    steps.both(lambda m: m[2].requires_grad_(True))  # the old gradient does not come back
    step_both(steps.wrapped, steps.plain, 3)
    assert_same(steps.wrapped, steps.plain)


@pytest.mark.parametrize("kind", KINDS)
def test_any_freezing_between_calls_and_steps(kind: str) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        steps = Steps(kind, is_async=seed % 2 == 1, devices=seed % 3 + 1)
        for number in range(12):
            layer, wanted = rng.choice([0, 2, 4]), rng.random() < 0.5
            if wanted or any(p.requires_grad for i in {0, 2, 4} - {layer} for p in steps.plain[i].parameters()):
                steps.both(lambda m, i=layer, w=wanted: m[i].requires_grad_(w))
            step_both(steps.wrapped, steps.plain, number)
            if rng.random() < 0.2:
                steps.wrapped.synchronize()  # shows the gradients
            if rng.random() < 0.4:
                steps.step()
        steps.wrapped.synchronize()
        assert_same(steps.wrapped, steps.plain)


def test_a_frozen_parameter_that_no_optimizer_knows_keeps_its_gradient() -> None:
    roundpipe.use_devices("host:2")
    wrapped, plain = RoundPipe(mlp()), mlp()
    step_both(wrapped, plain, 0)
    for model in (wrapped.model, plain):
        model[2].requires_grad_(False)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    plain_optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    assert wrapped.model[2].weight.grad is not None
    wrapped.synchronize()
    assert_same(wrapped, plain)


def test_a_failed_step_leaves_frozen_gradients_where_they_were() -> None:
    steps = Steps("compact", is_async=False)
    step_both(steps.wrapped, steps.plain, 0)
    steps.both(lambda m: m[2].requires_grad_(False))
    steps.wrapped.synchronize()
    kept = steps.wrapped.model[2].weight.grad.clone()
    # The call has returned, or will, when this fails; so the step that follows is cancelled.
    handle = steps.wrapped.model[0].register_forward_pre_hook(lambda *_: 1 / 0 if roundpipe.doing_recompute() else None)
    with pytest.raises(roundpipe.errors.StageError):
        steps.wrapped.forward_backward(
            (torch.randn(8, 6),),
            loss_fn=lambda out, _: out.sum(),
            run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(5)),
        )
        steps.wrapped.step(steps.what)
        steps.wrapped.synchronize()
    handle.remove()
    steps.wrapped.synchronize()
    oracle.assert_close_to_scale(steps.wrapped.model[2].weight.grad, kept, "kept gradient", 0.0)
    steps.step()
    assert_same(steps.wrapped, steps.plain)


def test_an_announced_step_refuses_frozen_gradients() -> None:
    steps = Steps("compact", is_async=False)
    step_both(steps.wrapped, steps.plain, 0)
    steps.both(lambda m: m[2].requires_grad_(False))
    x = torch.randn(8, 6)
    with pytest.raises(ConfigError, match=r"'2\.\w+' was frozen after"):
        steps.wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum(), step=steps.what)
    steps.step()  # nothing was lost
    assert_same(steps.wrapped, steps.plain)


def test_layers_frozen_from_the_start_are_no_matter_of_steps() -> None:
    roundpipe.use_devices("host:1")
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    wrapped = RoundPipe(model)
    optimizer = optim.SGD(wrapped, lr=LR)
    before = model[0].weight.clone()
    model[0].weight.grad = torch.ones(4, 4)  # the user's own business
    wrapped.forward_backward((torch.ones(2, 4),), loss_fn=lambda out, _: out.sum())
    wrapped.step(optimizer, is_async=False)
    wrapped.synchronize()
    assert torch.equal(model[0].weight, before) and torch.equal(model[0].weight.grad, torch.ones(4, 4))


class Gate(nn.Module):
    """Its backward waits for ``open``, if it was closed."""

    open: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad and self.open is not None:
            open_ = self.open
            x = x * 1.0
            x.register_hook(lambda grad: (open_.wait(30), None)[1])
        return x


def test_a_gradient_left_on_a_host_weight_clears_no_sum_that_a_call_still_loads() -> None:
    """Two calls of a window and an asynchronous step are dispatched; the second call has yet to load the sum of the
    first when the next window begins with a gradient of the caller's own."""
    roundpipe.use_devices("host:1")
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(6)]
    plain = nn.Sequential(*copy.deepcopy(layers[:4]), Gate(), *copy.deepcopy(layers[4:]))
    wrapped = RoundPipe(nn.Sequential(*layers[:4], Gate(), *layers[4:]))
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(7))
    batches = [torch.randn(4, 64) for _ in range(3)]

    def call(x: torch.Tensor) -> None:
        wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum(), run_config=config)

    call(batches[0])
    wrapped.synchronize()
    wrapped.model[4].open = threading.Event()
    call(batches[1])
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    (layers[0].weight * 2.0).sum().backward()
    timer = threading.Timer(0.3, wrapped.model[4].open.set)
    timer.start()
    call(batches[2])
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
    timer.join()

    def plain_loss(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.square().sum() for part in plain(x).split(2)]).sum()

    plain_loss(batches[0]).backward()
    plain_loss(batches[1]).backward()
    # The third call computes with the weights of before the step.
    stale = copy.deepcopy(plain)
    plain_optimizer.step()
    plain_optimizer.zero_grad()
    stale.zero_grad()
    (stale[0].weight * 2.0).sum().backward()
    torch.stack([part.square().sum() for part in stale(batches[2]).split(2)]).sum().backward()
    for parameter, other in zip(plain.parameters(), stale.parameters(), strict=True):
        parameter.grad = other.grad
    plain_optimizer.step()
    oracle.assert_same_state(wrapped.model, plain)
