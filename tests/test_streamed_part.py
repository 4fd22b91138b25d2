"""A streamed nn.Sequential that the model's own forward takes apart: every way computes what the plain model does."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError

from . import oracle

Chain = nn.Sequential
Way = Callable[[Chain, torch.Tensor], torch.Tensor]


def _each(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for layer in chain:
        x = torch.tanh(layer(x))
    return x


def _hidden_states(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    states = [x]
    for layer in chain:
        states.append(layer(states[-1]))
    return torch.stack(states).sum(0)


def _counted(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for i in range(len(chain)):
        x = torch.tanh(chain[i](x))
    return x


def _reversed(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for layer in reversed(chain):
        x = torch.tanh(layer(x))
    return x


def _children(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for layer in chain.children():
        x = torch.tanh(layer(x))
    return x


def _named(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for name, layer in chain.named_children():
        x = torch.tanh(layer(x)) if name != "body" else layer(x)
    return x


def _private(chain: Chain, x: torch.Tensor) -> torch.Tensor:
    for layer in chain._modules.values():
        x = torch.tanh(layer(x))  # type: ignore[misc]
    return x


WAYS: dict[str, Way] = {
    "call": lambda chain, x: chain(x),
    "loop": _each,
    "hidden states": _hidden_states,
    "index": _counted,
    "negative index": lambda chain, x: chain[-1](chain[0](x)),
    "slice": lambda chain, x: chain[1:](torch.tanh(chain[:1](x))),
    "reversed": _reversed,
    "children": _children,
    "named_children": _named,
    "_modules": _private,
    "name": lambda chain, x: chain.tail(chain.get_submodule("head")(x)),  # type: ignore[operator]
    "truth": lambda chain, x: chain(x) if chain else x,
    "weight": lambda chain, x: chain(x) @ chain[0].weight.T,  # type: ignore[operator]
    "twice": lambda chain, x: chain[1](chain[1](x)) + chain(x),
}


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.chain = nn.Sequential(
            OrderedDict(head=nn.Linear(8, 8), body=nn.Sequential(nn.Linear(8, 8), nn.GELU()), tail=nn.Linear(8, 8))
        )
        self.out = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.way(self.chain, x))


def wrap(model: nn.Module) -> RoundPipe:
    config = RoundPipeRunConfig(num_microbatch=3)
    return wrap_model_to_roundpipe(model, lower_threshold=1, upper_threshold=0, model_run_config=config)


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


@pytest.mark.parametrize("way", WAYS)
def test_taken_apart_in_every_way(way: str) -> None:
    model = Model(WAYS[way])
    plain = copy.deepcopy(model)
    wrapped = wrap(model)
    assert list(wrapped.parts) == ["chain", "out"]
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rows: list[int] = []
    model.chain[0].register_forward_hook(lambda module, args, out: rows.append(len(out)))
    for _ in range(2):
        x = torch.randn(6, 8)
        got, want = wrapped(x), plain(x)
        oracle.assert_close_to_scale(got.detach(), want.detach(), "output", 1e-5)
        got.sin().sum().backward()
        want.sin().sum().backward()
        wrapped.synchronize()
        oracle.assert_same_gradients_within(model, plain, 1e-5)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    oracle.assert_same_state_within(model, plain, 1e-5)
    assert rows and set(rows) == {2}  # on a device, a microbatch at a time


def test_children_follow_modes_dtypes_and_devices() -> None:
    model = Model(WAYS["loop"])
    wrapped = wrap(model)
    x = torch.randn(6, 8)
    with torch.no_grad():
        wrapped(x)
        chain = wrapped.parts["chain"]
        wrapped.eval()
        assert not chain[0].training and not chain.training
        wrapped.train()
        assert chain[0].training
        wrapped.double()
        plain = copy.deepcopy(model)
        oracle.assert_close_to_scale(wrapped(x.double()), plain(x.double()), "output in float64", 1e-12)
        roundpipe.use_devices("host:3")
        oracle.assert_close_to_scale(wrapped(x.double()), plain(x.double()), "output on other devices", 1e-12)
    again = copy.deepcopy(wrapped)
    with torch.no_grad():
        assert torch.equal(again(x.double()), wrapped(x.double()))
    assert isinstance(chain[:2], nn.Sequential) and len(chain) == 3 and isinstance(chain[0], nn.Linear)
    with pytest.raises(IndexError):
        chain[3]


TWO_LEVELS: dict[str, Way] = {
    "loop": lambda chain, x: [x := torch.tanh(layer(x)) for layer in chain[1]][-1],
    "index": lambda chain, x: chain[1][0](x),  # type: ignore[index, operator]
    "children": lambda chain, x: next(chain[1].children())(x),
}


@pytest.mark.parametrize("way", TWO_LEVELS)
def test_a_chain_inside_a_chain_says_what_to_do_instead(way: str) -> None:
    model = Model(TWO_LEVELS[way])
    wrapped = wrap(model)
    x = torch.randn(6, 8)
    with pytest.raises(ConfigError, match=r"takes apart 'chain\.body'.*nn\.ModuleList"):
        wrapped(x)
    del wrapped
    plain = copy.deepcopy(model)
    plain.chain = nn.ModuleList(model.chain)  # type: ignore[assignment]
    remedied = wrap(plain)
    with torch.no_grad():
        oracle.assert_close_to_scale(remedied(x), model(x), "output of the remedy", 1e-6)


@pytest.mark.parametrize("change", ["append", "exchange", "remove"])
def test_layers_that_change_after_the_wrapping_are_never_passed_over(change: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model = Model(WAYS["call"])
    wrapped = [RoundPipe(net), wrap(model)]
    for chain in (net, model.chain):
        if change == "append":
            chain.append(nn.Tanh())
        elif change == "exchange":
            chain[1] = nn.Sigmoid()
        else:
            del chain[-1]
    for one in wrapped:
        with pytest.raises(ConfigError, match="added, exchanged or removed"):
            one(torch.randn(6, 8))
