"""``model(...)`` as part of autograd: outputs, gradients of parameters and inputs, chains of models, misuse."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig

from . import oracle
from .at_rest import at_rest
from .model_zoo import CASES
from .plans import cut


def random_train_plan(num_layers: int, seed: int) -> ModelExecutePlan:
    rng = random.Random(seed)
    plan = ModelExecutePlan()
    plan.fwd_plan = cut(0, num_layers, rng)
    plan.bwd_plan = list(reversed(cut(0, num_layers, rng)))
    plan.check_valid(num_layers, "train")
    return plan


def plain_outputs(plain: nn.Sequential, args: tuple[Any, ...], microbatches: int) -> list[torch.Tensor]:
    """The outputs of the microbatches, with the random numbers that RoundPipe gives each layer."""
    from roundpipe import random_state

    call_seed = random_state.draw_call_seed()
    outputs = []
    for m, piece in enumerate(oracle.split(args, microbatches)):
        value: Any = piece[0]
        for index, layer in enumerate(plain):
            with oracle.seeded(random_state.layer_seed(call_seed, m, index), "cpu"):
                value = layer(value)
        outputs.append(value)
    return outputs


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_backward_through_merged_outputs(name: str, devices: int, grain: str) -> None:
    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    for seed in range(3):
        config = RoundPipeRunConfig(
            num_microbatch=3, recompute_grain=grain, execute_plan=random_train_plan(len(model), seed)
        )
        torch.manual_seed(seed)
        args, label = case.batch(6)
        state = torch.get_rng_state()
        got = wrapped(*args, roundpipe_run_config=config)
        case.loss_fn(got, label).backward()
        torch.set_rng_state(state)
        want = torch.cat(plain_outputs(plain, args, 3))
        case.loss_fn(want, label).backward()
        oracle.assert_close_to_scale(got.detach(), want.detach(), "output")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


@pytest.mark.parametrize("devices", [1, 2])
def test_input_gradients_and_two_models_in_a_chain(devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    second = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 2))
    plain = copy.deepcopy(nn.ModuleList([first, second]))
    one, two = RoundPipe(first), RoundPipe(second)
    x = torch.randn(5, 4, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    middle = torch.nn.Parameter(torch.ones(8))
    middle_plain = copy.deepcopy(middle)
    for _ in range(2):
        two(one(x * 2) * middle).square().mean().backward()
        plain[1](plain[0](other * 2) * middle_plain).square().mean().backward()
    one.synchronize()
    two.synchronize()
    oracle.assert_close_to_scale(x.grad, other.grad, "input gradient")
    oracle.assert_close_to_scale(middle.grad, middle_plain.grad, "gradient between the models")
    oracle.assert_same_gradients(first, plain[0])
    oracle.assert_same_gradients(second, plain[1])


def test_training_by_loss_backward_equals_plain() -> None:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(10):
        torch.manual_seed(step)
        x = torch.randn(6, 4)
        wrapped(x).square().mean().backward()
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain(x).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain, 1e-5)


@pytest.fixture
def wrapped() -> RoundPipe:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    return RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))


def check_still_right(wrapped: RoundPipe) -> None:
    wrapped.zero_grad()
    x = torch.randn(4, 4)
    plain = copy.deepcopy(wrapped.model)
    wrapped(x).sum().backward()
    plain(x).sum().backward()
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


def test_second_backward_is_refused(wrapped: RoundPipe) -> None:
    loss = wrapped(torch.randn(4, 4)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    check_still_right(wrapped)


def test_autograd_grad_and_backward_with_inputs_are_refused(wrapped: RoundPipe) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"autograd\.grad"):
        torch.autograd.grad(wrapped(x).sum(), x)
    with pytest.raises(RuntimeError, match=r"backward\(inputs"):
        wrapped(x).sum().backward(inputs=[x])
    check_still_right(wrapped)


def test_weights_changed_between_forward_and_backward(wrapped: RoundPipe) -> None:
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.randn(4, 4)).sum().backward()
    late = wrapped(torch.randn(4, 4)).sum()
    wrapped.step(optimizer.step, is_async=False)
    with pytest.raises(RuntimeError, match="weights changed"):
        late.backward()
    wrapped.synchronize()
    check_still_right(wrapped)


def test_outputs_without_backward_leave_nothing_behind(wrapped: RoundPipe) -> None:
    from roundpipe import _ops
    from roundpipe import engine as engines

    at_rest()
    before = _ops.engine_live(engines.current().handle)
    for _ in range(3):
        wrapped(torch.randn(4, 4))
    wrapped.synchronize()
    at_rest(collects=False)
    after = _ops.engine_live(engines.current().handle)
    assert (after[0], after[4]) == (before[0], before[4]), (before, after)
    check_still_right(wrapped)


def test_requires_grad_of_the_config(wrapped: RoundPipe) -> None:
    out = wrapped(torch.randn(4, 4), roundpipe_run_config=RoundPipeRunConfig(requires_grad=False))
    assert not out.requires_grad
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires_grad=True"):
        wrapped(torch.randn(4, 4), roundpipe_run_config=RoundPipeRunConfig(requires_grad=True))
    with torch.inference_mode():
        assert not wrapped(torch.randn(4, 4)).requires_grad
    check_still_right(wrapped)


def test_a_failing_backward_is_typed_and_the_next_call_works() -> None:
    class Breaks(torch.autograd.Function):
        broken = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if Breaks.broken:
                raise ValueError("on purpose")
            return grad

    class Layer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Breaks.apply(x)

    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 2)))
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(roundpipe.errors.StageError, match="on purpose"):
        wrapped(x).sum().backward()
    Breaks.broken = False
    check_still_right(wrapped)


def test_output_can_be_written_in_place(wrapped: RoundPipe) -> None:
    x = torch.randn(4, 4)
    plain = copy.deepcopy(wrapped.model)
    wrapped(x).mul_(2).sum().backward()
    plain(x).mul_(2).sum().backward()
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)
