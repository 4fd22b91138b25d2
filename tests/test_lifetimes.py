"""Memory goes with its last user and does not wait for Python's cycle collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops, wrap_model_to_roundpipe
from roundpipe import engine as engines

from .at_rest import at_rest
from .auto_models import Trunk
from .plans import one_layer_stages


class Watches(nn.Module):
    """Notes every tensor that passes, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen += [weakref.ref(x), weakref.ref(y)]
        return y


@pytest.fixture
def without_collector() -> Iterator[None]:
    at_rest()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", ["forward_backward", "forward", "no_grad", "dropped"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_nothing_waits_for_the_collector(kind: str, grain: str) -> None:
    roundpipe.use_devices("host:2")
    model = nn.Sequential(Watches(), Watches(), Watches())
    wrapped = RoundPipe(model)
    handle = engines.current().handle
    before = _ops.engine_live(handle)
    plan = one_layer_stages(3)
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain, execute_plan=plan)
    if kind == "forward_backward":
        wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum(), run_config=config)
    else:
        plan.fwd_plan = [range(i, i + 1) for i in range(3)]
        with torch.set_grad_enabled(kind != "no_grad"):
            out = wrapped(torch.randn(4, 4), roundpipe_run_config=config)
        if kind == "forward":
            out.sum().backward()
        del out
    wrapped.synchronize()
    at_rest(collects=False)
    assert _ops.engine_live(handle)[0] == before[0], "records are left"
    assert _ops.engine_live(handle)[4] <= before[4], "handles are left"
    for layer in model:
        assert layer.seen and not [tensor for ref in layer.seen if (tensor := ref()) is not None]


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", ["layers", "parts"])
def test_a_wrapper_and_its_memory_go_with_its_name(kind: str) -> None:
    roundpipe.use_devices("host:2")
    if kind == "layers":
        wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum())
    else:
        wrapped = wrap_model_to_roundpipe(Trunk(), lower_threshold=64)
        wrapped(torch.randint(11, (4, 5)))["logits"].sum().backward()
    wrapped.synchronize()
    alive = [weakref.ref(wrapped), weakref.ref(wrapped._state), weakref.ref(wrapped._state.units[0])]
    del wrapped
    at_rest(collects=False)
    assert [ref() for ref in alive] == [None] * 3


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("kind", ["call", "two calls", "backward", "function", "compact", "announced"])
def test_a_wrapper_that_is_dropped_at_work_takes_its_memory_along(kind: str) -> None:
    """Nobody has waited for its calls and steps, nor will."""
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer: Any = None
    if kind == "function":
        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.Adam(wrapped.parameters())
    elif kind in ("compact", "announced"):
        optimizer = roundpipe.optim.Adam(wrapped)
    x = torch.randn(4, 4)
    step = None
    for _ in range(1 if kind in ("call", "backward") else 2):
        if kind == "backward":
            wrapped(x).sum().backward()
            continue
        step = optimizer if kind == "announced" else None
        wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum(), step=step)
        if kind == "function":
            wrapped.step(optimizer.step)
        elif kind == "compact":
            wrapped.step(optimizer)
    state = wrapped._state
    alive: list[Any] = [weakref.ref(one) for one in (wrapped, state, state.units[0], *state._calls)]
    if kind in ("compact", "announced"):
        alive.append(weakref.ref(optimizer._memory))
    assert len(alive) > 3
    del wrapped, optimizer, state, step
    at_rest(collects=False)  # what is under way ends first
    assert [ref() for ref in alive if ref() is not None] == []


class Watched(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.up, self.down, self.keeps = nn.Linear(128, 512), nn.Linear(512, 128), keeps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.down(nn.functional.gelu(self.up(x)))
        if self.keeps == "statistic":
            self.kept = inner.mean()
        return x + inner


@pytest.mark.parametrize("keeps", ["statistic", "hook"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_statistic_that_was_not_detached_keeps_no_graphs_of_layers(keeps: str, grain: str) -> None:
    """24 layers, of which each has 5 MiB of activations: all of them would be five times what there is."""
    roundpipe.use_devices("host:1@24MiB")
    layers = [Watched(keeps) for _ in range(24)]
    found: list[torch.Tensor] = []
    if keeps == "hook":
        for layer in layers:
            layer.register_forward_hook(lambda module, args, out: found.append(out.mean()))
    wrapped = RoundPipe(nn.Sequential(*layers))
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain, execute_plan=one_layer_stages(24))
    for _ in range(3):
        found.clear()
        loss = wrapped.forward_backward(
            (torch.randn(1024, 128),), loss_fn=lambda out, _: out.square().mean(), run_config=config
        )
        assert torch.isfinite(loss)
        wrapped.synchronize()
