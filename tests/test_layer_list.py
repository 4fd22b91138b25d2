"""Which modules are the layers, and what is said about those that are passed by."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError

from . import oracle
from .causal_models import make_model


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)


class Skip(nn.Sequential):
    """Calling it is not calling its children one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 2 * super().forward(x)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.skip = Skip(nn.Linear(6, 6), nn.Tanh())
        self.chain = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(self.skip(x))


def skip() -> nn.Sequential:
    return Skip(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def skip_by_attribute() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    net.forward = lambda x: x + 2 * nn.Sequential.forward(net, x)  # type: ignore[method-assign]
    return net


@pytest.mark.parametrize("make", [skip, lambda: nn.Sequential(skip(), nn.Linear(6, 2)), skip_by_attribute, Body])
def test_a_sequential_with_its_own_forward_computes_what_it_says(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(8, 6)
    value = model(x)
    value.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = wrap_model_to_roundpipe(model, lower_threshold=1, upper_threshold=0)
    output = wrapped(x)
    oracle.assert_close_to_scale(output.detach(), value.detach(), "output")
    output.square().sum().backward()
    wrapped.synchronize()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        oracle.assert_close_to_scale(parameter.grad, gradient, "gradient", 1e-5)


def test_such_a_sequential_is_one_layer_and_this_is_said() -> None:
    with pytest.warns(UserWarning, match="Skip is an nn.Sequential with a forward of its own") as said:
        wrapped = RoundPipe(skip())
    assert wrapped.num_layers == 1 and said[0].filename == __file__

    class Named(nn.Sequential):
        """Nothing of its own but a name."""

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RoundPipe(Named(nn.Linear(6, 6), nn.Tanh())).num_layers == 2


def _none_among_layers() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    net._modules["1"] = None
    return net


def _with_weight(trainable: bool) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    net.scale = nn.Parameter(torch.ones(1), requires_grad=trainable)
    return net


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), "the model .ModuleList. has no forward.*nn.Sequential"),
        (lambda: nn.Sequential(nn.Tanh(), nn.ModuleDict({"a": nn.Tanh()})), "layer 1 .ModuleDict. has no forward"),
        (lambda: nn.Sequential(nn.Tanh(), nn.ParameterList([torch.ones(2)])), "layer 1 .ParameterList. has no forward"),
        (_none_among_layers, "layer 1 of the nn.Sequential is None"),
        (lambda: _with_weight(True), "'scale' belongs to the nn.Sequential itself"),
    ],
)
def test_refused_at_construction(make: Callable[[], nn.Module], says: str) -> None:
    model = make()
    with pytest.raises(ConfigError, match=says):
        RoundPipe(model)
    wrapped = RoundPipe(nn.Sequential(*[m for m in model.children() if type(m) in (nn.Linear, nn.Tanh)]))  # free still
    assert wrapped.num_layers >= 1


def test_weights_of_a_sequential_that_are_not_trained_may_stay() -> None:
    wrapped = RoundPipe(_with_weight(False))
    assert wrapped.num_layers == 2 and "scale" in wrapped.state_dict()
    tied = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    tied.first = tied[0].weight
    assert RoundPipe(tied).num_layers == 2


def _chain() -> tuple[RoundPipe, nn.Module, tuple[torch.Tensor, ...]]:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return RoundPipe(net), net, (torch.randn(4, 6),)


def _language_model(part: str) -> tuple[RoundPipe, nn.Module, tuple[torch.Tensor, ...]]:
    model = make_model("llama")
    return wrap_model_to_roundpipe(model), model.get_submodule(part), (torch.zeros(4, 3, dtype=torch.int64),)


_HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], object]] = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "forward_pre": lambda module, hook: module.register_forward_pre_hook(hook),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "backward_pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
}


@pytest.mark.parametrize("kind", list(_HOOKS))
@pytest.mark.parametrize("make", [_chain, lambda: _language_model(""), lambda: _language_model("model")])
def test_hooks_of_modules_that_are_passed_by_are_never_silent(
    make: Callable[[], tuple[RoundPipe, nn.Module, tuple[torch.Tensor, ...]]], kind: str
) -> None:
    wrapped, module, args = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            wrapped(*args)
    _HOOKS[kind](module, lambda *_: None)
    with pytest.warns(UserWarning, match="has hooks, which do not run") as said, torch.no_grad():
        wrapped(*args)
    assert said[0].filename == __file__
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        with torch.no_grad():
            wrapped(*args)


def test_hooks_that_run_are_no_cause_for_a_warning() -> None:
    called = []
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    net[0].register_forward_hook(lambda *_: called.append("layer"))
    wrapped = RoundPipe(net)
    wrapped.register_forward_hook(lambda *_: called.append("wrapper"))
    auto = wrap_model_to_roundpipe(Body(), lower_threshold=1, upper_threshold=0)
    auto.model.register_forward_hook(lambda *_: called.append("root"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            wrapped(torch.randn(4, 6), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
            auto(torch.randn(4, 6))
    assert called == ["layer", "layer", "wrapper", "root"]


def test_an_estimate_counts_a_layer_at_each_of_its_places() -> None:
    layer = nn.Linear(8, 8)
    estimate = roundpipe.estimate_memory(
        nn.Sequential(*[layer] * 4), 6, inputs=((torch.randn(6, 8),), {}), loss_fn=lambda out, _: out.sum()
    )
    assert estimate.asked.configuration.backward[0].stop == 4


class Blocks(nn.Module):
    """Most of its weights are in ``count`` modules of a list."""

    def __init__(self, count: int, head: int = 2) -> None:
        super().__init__()
        self.trunk = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(count))})
        self.head = nn.Linear(4, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.trunk["blocks"]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: make_model("llama"), "is no nn.Sequential: the whole model is one layer.*wrap_model_to_roundpipe"),
        (lambda: make_model("llama").model, "is no nn.Sequential: the whole model"),
        (lambda: Blocks(4), "Blocks is no nn.Sequential, though most of it is in the modules of 'trunk.blocks'"),
    ],
    ids=["language_model", "its_trunk", "blocks"],
)
def test_a_whole_model_as_one_layer_is_said(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.warns(UserWarning, match=says) as caught:
        wrapped = RoundPipe(make())
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy.deepcopy(wrapped)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: RoundPipe(Blocks(3)),
        lambda: RoundPipe(Blocks(4, head=100)),
        lambda: RoundPipe(nn.Sequential(Blocks(8), nn.Linear(2, 2))),
        lambda: RoundPipe(nn.Linear(2, 2)),
        lambda: wrap_model_to_roundpipe(Blocks(8), upper_threshold=10**6),
        lambda: wrap_model_to_roundpipe(make_model("llama")),
    ],
    ids=["few", "mostly_head", "a_layer", "small", "as_asked", "preset"],
)
def test_nothing_is_said_of_others(wrap: Callable[[], RoundPipe]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap()


def test_blocks_that_are_not_initialised_are_refused_as_such() -> None:
    model = Blocks(4)
    model.trunk["blocks"] = nn.ModuleList(nn.LazyLinear(4) for _ in range(4))
    with pytest.raises(ConfigError, match="not initialised"):
        RoundPipe(model)
