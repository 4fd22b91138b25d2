"""What users do around a wrapped model: losses on the weights themselves, hooks, modules around it, odd values."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe
from roundpipe.errors import ConfigError, SplitError, StageError

from . import oracle


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loss_on_the_weights_adds_to_the_gradients(is_async: bool) -> None:
    """Regularisation written on the host's parameters, before, between and after the model's own calls."""
    model, plain = net(), net()
    model[2].requires_grad_(False)
    plain[2].requires_grad_(False)
    wrapped = RoundPipe(model)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05)
    for step in range(4):
        x = torch.randn(6, 4)
        for calls in range(step):
            wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
            plain(x).square().sum().backward()
            if calls < 2:
                for one in (model, plain):
                    (0.1 * one[0].weight.square().sum() + one[3].bias.sum()).backward()
        for one in (model, plain):
            (0.1 * one[0].weight.square().sum()).backward()
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        if is_async:
            wrapped.synchronize()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        oracle.assert_same_state(model, plain)
    model[0].weight.sum().backward()
    wrapped.synchronize()
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4)) and model[3].weight.grad is None
    model[0].weight.sum().backward()
    wrapped.zero_grad()
    wrapped.synchronize()
    assert model[0].weight.grad is None


def test_hooks_on_parameters_see_and_change_gradients() -> None:
    model = net()
    seen: list[int] = []
    model[0].weight.register_hook(lambda grad: seen.append(1) or grad * 2)
    plain = net()
    plain[0].weight.register_hook(lambda grad: grad * 2)
    wrapped = RoundPipe(model)
    for _ in range(2):
        wrapped.forward_backward((torch.ones(6, 4),), loss_fn=lambda out, _: out.square().sum())
        plain(torch.ones(6, 4)).square().sum().backward()
        late = model[3].bias.register_hook(lambda grad: -grad)
        plain_late = plain[3].bias.register_hook(lambda grad: -grad)
        wrapped.forward_backward((torch.ones(6, 4),), loss_fn=lambda out, _: out.square().sum())
        plain(torch.ones(6, 4)).square().sum().backward()
        wrapped.synchronize()
        late.remove()
        plain_late.remove()
    oracle.assert_same_gradients(model, plain)
    assert len(seen) == 4 * 3, "once for each microbatch"


def test_a_hook_that_waits_for_the_hosts_gradient_is_refused() -> None:
    model = net()
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    wrapped = RoundPipe(model)
    with pytest.raises(StageError, match=r"post-accumulate-grad hook.*model\.step") as caught:
        wrapped(torch.ones(4, 4))
    assert isinstance(caught.value.__cause__, ConfigError)
    handle.remove()
    assert torch.allclose(wrapped(torch.ones(4, 4)), model(torch.ones(4, 4)))


class Outer(nn.Module):
    def __init__(self, wrap: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = RoundPipe(net()) if wrap else net()
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_a_wrapper_inside_a_module_loads_what_it_saves() -> None:
    outer, plain = Outer(True), Outer(False)
    assert list(outer.state_dict()) == list(plain.state_dict())
    values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    for target in (outer, plain):
        assert target.load_state_dict(values) == ([], [])
    x = torch.randn(6, 4)
    oracle.assert_close_to_scale(outer(x).detach(), plain(x).detach(), "output")
    wrong = dict(values)
    wrong["body.nowhere"] = wrong.pop("body.0.weight")
    with pytest.raises(RuntimeError, match=r"body\.0\.weight"):
        outer.load_state_dict(wrong)
    found = outer.load_state_dict(wrong, strict=False)
    assert found.missing_keys == ["body.0.weight"] and found.unexpected_keys == ["body.nowhere"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        outer.load_state_dict({**values, "body.0.weight": torch.ones(1, 1)})


@dataclasses.dataclass
class Unknown:
    x: torch.Tensor


class MakesUnknown(nn.Module):
    def forward(self, x: torch.Tensor) -> Unknown:
        return Unknown(x)


class TakesUnknown(nn.Module):
    def forward(self, given: Unknown) -> torch.Tensor:
        return given.x


@pytest.mark.parametrize("call", ["forward", "no_grad", "forward_backward"])
def test_tensors_hidden_from_pytorch_do_not_pass_between_layers(call: str) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(4, 4), MakesUnknown(), TakesUnknown(), nn.Linear(4, 2)))
    x = torch.randn(6, 4)
    with pytest.raises(StageError, match=r"Unknown holds tensors.*register_pytree_node") as caught:
        if call == "forward":
            model(x)
        elif call == "no_grad":
            with torch.no_grad():
                model(x)
        else:
            model.forward_backward((x,), loss_fn=lambda out, _: out.sum())
    assert isinstance(caught.value.__cause__, SplitError)


def test_caches_are_refused() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")

    class Reads(nn.Module):
        def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
            return x

    with pytest.raises(SplitError, match=r"kwargs\['cache'\] is a key/value cache.*use_cache=False"):
        RoundPipe(Reads())(torch.randn(4, 4), cache=cache_utils.DynamicCache())


def test_second_derivatives_are_refused() -> None:
    model, plain = net(), net()
    wrapped = RoundPipe(model)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        wrapped(torch.ones(4, 4)).sum().backward(create_graph=True)
    wrapped(torch.ones(4, 4)).sum().backward()
    plain(torch.ones(4, 4)).sum().backward()
    wrapped.synchronize()
    oracle.assert_same_gradients(model, plain)


def test_copies_are_independent() -> None:
    outer = Outer(True)
    twin = copy.deepcopy(outer)
    with torch.no_grad():
        twin.body.model[0].weight.zero_()
    assert not torch.equal(outer(torch.ones(3, 4)), twin(torch.ones(3, 4)))
