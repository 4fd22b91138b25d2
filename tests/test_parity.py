"""What RoundPipe computes is what a plain loop computes: losses, gradients, buffers, on 1-4 simulated devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig

from . import oracle
from .model_zoo import CASES, Case
from .plans import one_layer_stages, random_fused_plan


def make_pair(case: Case, seed: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
    """The model to wrap, and its twin for the oracle."""
    torch.manual_seed(seed)
    model = case.make()
    return model, copy.deepcopy(model)


def run_both(
    case: Case,
    wrapped: RoundPipe,
    plain: nn.Sequential,
    rows: int,
    microbatches: int,
    config: RoundPipeRunConfig,
    seed: int = 1,
    calls: int = 1,
) -> None:
    """The same calls on both; losses and gradients are compared after the last."""
    for call in range(calls):
        torch.manual_seed(seed + call)
        args, label = case.batch(rows)
        state = torch.get_rng_state()
        got = wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
        torch.set_rng_state(state)
        want = oracle.forward_backward(
            list(plain), args, label=label, loss_fn=case.loss_fn, num_microbatch=min(rows, microbatches)
        )
        oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=not case.shared)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_one_layer_stages(name: str, devices: int, grain: str) -> None:
    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    model, plain = make_pair(case)
    config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=one_layer_stages(len(model)))
    run_both(case, RoundPipe(model), plain, 6, 3, config)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_automatic_plan(name: str, devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    model, plain = make_pair(case)
    run_both(case, RoundPipe(model), plain, 8, 4, RoundPipeRunConfig(num_microbatch=4))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES)),
    devices=st.integers(1, 4),
    grain=st.sampled_from(["stage", "layer"]),
    plan_seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    microbatches=st.integers(1, 5),
    calls=st.integers(1, 3),
)
def test_any_plan(
    name: str, devices: int, grain: str, plan_seed: int, rows: int, microbatches: int, calls: int
) -> None:
    """Random plans, uneven and too small batches, accumulation over several calls."""
    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    model, plain = make_pair(case, plan_seed)
    config = RoundPipeRunConfig(
        num_microbatch=microbatches, recompute_grain=grain, execute_plan=random_fused_plan(len(model), plan_seed)
    )
    run_both(case, RoundPipe(model), plain, rows, microbatches, config, seed=plan_seed, calls=calls)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", "cnn", "decoder"])
def test_random_delays(name: str, devices: int) -> None:
    """Copies that take any time change nothing, and the checker stays silent."""
    from roundpipe import _ops
    from roundpipe import engine as engines

    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    model, plain = make_pair(case)
    wrapped = RoundPipe(model)
    engine = engines.current()
    _ops.engine_inject(engine.handle, "delay", 7, 300)
    try:
        for seed in range(3):
            config = RoundPipeRunConfig(num_microbatch=3, execute_plan=random_fused_plan(len(model), seed))
            run_both(case, wrapped, plain, 6, 3, config, seed)
    finally:
        _ops.engine_inject(engine.handle, "delay", 0, 0)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlp", "cnn", "decoder", "frozen", "unused"])
def test_exact_training_equals_plain(name: str, devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    model, plain = make_pair(case)
    wrapped = RoundPipe(model)
    with OptimizerCtx():
        optimizer = adamw(wrapped.parameters())
    plain_optimizer = adamw([p for p in plain.parameters() if p.requires_grad])
    for step in range(20):
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=random_fused_plan(len(model), step % 4))
        torch.manual_seed(step)
        args, label = case.batch(6)
        state = torch.get_rng_state()
        wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        torch.set_rng_state(state)
        oracle.forward_backward(list(plain), args, label=label, loss_fn=case.loss_fn, num_microbatch=3)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain, 1e-6 if not case.shared else 1e-4)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["mlp", "decoder", "frozen", "recurrent"])
def test_async_training_is_one_step_stale(name: str, devices: int) -> None:
    """Iteration t computes with the weights of step t-2's result; the oracle keeps a stale copy for that."""
    roundpipe.use_devices(f"host:{devices}")
    case = CASES[name]
    model, plain = make_pair(case)
    newest = copy.deepcopy(plain)
    wrapped = RoundPipe(model)
    with OptimizerCtx():
        optimizer = adamw(wrapped.parameters())
    newest_optimizer = adamw([p for p in newest.parameters() if p.requires_grad])
    for step in range(20):
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=random_fused_plan(len(model), step % 4))
        torch.manual_seed(step)
        args, label = case.batch(6)
        state = torch.get_rng_state()
        got = wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
        torch.set_rng_state(state)
        want = oracle.forward_backward(list(plain), args, label=label, loss_fn=case.loss_fn, num_microbatch=3)
        oracle.assert_close_to_scale(got, want, f"loss of step {step}", 1e-6 if not case.shared else 1e-4)
        # What ran used `plain`, the weights one step behind; now `plain` becomes what `newest` is before this step.
        gradients = [p.grad for p in plain.parameters()]
        plain.load_state_dict(newest.state_dict())
        for parameter, gradient in zip(newest.parameters(), gradients, strict=True):
            parameter.grad = gradient
        newest_optimizer.step()
        newest_optimizer.zero_grad()
        for parameter in plain.parameters():
            parameter.grad = None
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, newest, 1e-6 if not case.shared else 1e-4)


def test_three_calls_a_step_equal_one_sum() -> None:
    roundpipe.use_devices("host:2")
    case = CASES["mlp"]
    model, plain = make_pair(case)
    run_both(case, RoundPipe(model), plain, 6, 3, RoundPipeRunConfig(num_microbatch=3), calls=3)


class Recorder(nn.Module):
    """Notes where its weight was and how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.addresses: list[int] = []
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.addresses.append(self.linear.weight.data_ptr())
        self.runs += 1
        return self.linear(x)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_engine_runs_the_layers_on_device_weights_as_often_as_planned(devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    model = nn.Sequential(Recorder(), Recorder(), Recorder())
    wrapped = RoundPipe(model)
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(0, 1), range(1, 2)]
    plan.bwd_plan = [range(2, 3), range(1, 2), range(0, 1)]
    wrapped.forward_backward(
        (torch.randn(6, 4),),
        loss_fn=lambda out, _: out.square().mean(),
        run_config=RoundPipeRunConfig(num_microbatch=3, execute_plan=plan),
    )
    wrapped.synchronize()
    assert [layer.runs for layer in model] == [6, 6, 3]
    for layer in model:
        host = {p.data_ptr() for p in wrapped.model.parameters()}
        assert len(layer.addresses) == layer.runs and not host & set(layer.addresses)
