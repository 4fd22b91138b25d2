"""Layers that the user compiled compute, and train, with the weights that are on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.compiled import rebound
from roundpipe.errors import ConfigError
from roundpipe.roundpipe import AutoRoundPipe

from . import oracle


class CompiledMethod(nn.Module):
    """Compiles a method of its own and a plain function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = torch.compile(self.plain, backend="eager")
        self.wave = torch.compile(torch.sin, backend="eager")

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wave(self.inner(x))


class Own(nn.Module):
    """Not of torch.nn, which dynamo treats otherwise; shared parameters inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).relu()) * self.gain


def wrapped_linear() -> nn.Module:
    return torch.compile(nn.Linear(8, 8), backend="aot_eager")  # type: ignore[return-value]


def wrapped_own() -> nn.Module:
    return torch.compile(Own(), backend="aot_eager")  # type: ignore[return-value]


def in_place() -> nn.Module:
    layer = Own()
    layer.compile(backend="eager")
    return layer


def inside() -> nn.Module:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    layer[0].compile(backend="eager")
    return layer


def plain_twin(layer: nn.Module) -> nn.Module:
    """The same without compilation."""
    if isinstance(layer, CompiledMethod):
        twin = CompiledMethod()
        twin.load_state_dict(layer.state_dict())
        twin.inner, twin.wave = twin.plain, torch.sin
        return twin
    layer = getattr(layer, "_orig_mod", layer)
    return copy.deepcopy(layer)


@pytest.mark.parametrize(
    ("make", "grain"),
    [
        (wrapped_linear, "stage"),
        (wrapped_own, "layer"),
        (in_place, "stage"),
        (inside, "layer"),
        (CompiledMethod, "stage"),
    ],
)
def test_compiled_layers_train(make: Callable[[], nn.Module], grain: str) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), make(), make(), nn.Linear(8, 2)]
    plain = nn.Sequential(*(plain_twin(layer) for layer in layers))
    for module in plain.modules():
        module._compiled_call_impl = None
    wrapped = RoundPipe(nn.Sequential(*layers))
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(6, 4)
        loss = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum(), run_config=config)
        want = plain(x).square().sum()
        want.backward()
        oracle.assert_close_to_scale(loss, want.detach(), "loss")
    wrapped.synchronize()
    for got, expected in zip(wrapped.model.parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(got.grad, expected.grad, "gradient")


def test_what_cannot_be_followed_is_refused_and_what_is_foreign_left_alone() -> None:
    layer, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    foreign = torch.compile(torch.sin, backend="eager")
    assert rebound(foreign, {id(layer): twin}) is foreign

    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x

    opaque._torchdynamo_orig_callable = layer.forward  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Linear\.forward.*torch\.compile\(layer\)"):
        rebound(opaque, {id(layer): twin})


class Outer(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 8)
        self.body = wrap(nn.Sequential(Own(), nn.Linear(8, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.head(x).relu()) * 2.0


def parts(model: nn.Module) -> nn.Module:
    wrapped = wrap_model_to_roundpipe(Chain(model), lower_threshold=1, upper_threshold=0)
    assert isinstance(wrapped, AutoRoundPipe)
    return wrapped


class Chain(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers.children())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("wrap", [RoundPipe, parts])
def test_a_wrapped_model_inside_a_compiled_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    outer, plain = Outer(wrap), Outer(lambda body: body)
    compiled = torch.compile(outer, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(6, 4)
        got, want = compiled(x), plain(x)
        oracle.assert_close_to_scale(got.detach(), want.detach(), "output")
        got.square().sum().backward()
        want.square().sum().backward()
    outer.body.synchronize()  # type: ignore[operator, union-attr]
    for mine, other in zip([*outer.head.parameters(), *outer.body.model.parameters()], plain.parameters(), strict=True):  # type: ignore[union-attr]
        oracle.assert_close_to_scale(mine.grad, other.grad, "gradient")
