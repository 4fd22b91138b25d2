"""What is said where no loss comes of a call, and which loss functions are refused before it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ConfigTypeError, StageError

from .causal_models import make_model

TOKENS = torch.zeros(4, 3, dtype=torch.int64)


@pytest.fixture(autouse=True)
def one_device() -> None:
    roundpipe.use_devices("host:1")


class Loss:
    def __call__(self, output: torch.Tensor, label: Any) -> torch.Tensor:
        return output.sum()

    def alone(self, output: torch.Tensor) -> torch.Tensor:
        return output.sum()


def _takes_all(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # whose signature is another one
    def inner(*args: Any) -> Any:
        return function(args[0])

    return inner


class Alone:
    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        return output.sum()


class Static:
    __slots__ = ()
    __call__ = staticmethod(lambda output, label: output.sum())


def _says_another(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = _takes_all(function)
    inner.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return inner


GOOD = [
    lambda output, label: output.sum(),
    lambda output, *more: output.sum(),
    lambda output, label=None, weight=1: output.sum(),
    Loss(),
    functools.partial(lambda weight, output, label: output.sum() * weight, 2.0),
    _takes_all(lambda output: output.sum()),
    _says_another(lambda output: output.sum()),
    Static(),
    functools.partial(Static()),
    torch.compile(lambda output, label: output.sum(), backend="eager"),
]
BAD = [
    Alone(),
    lambda output: output.sum(),
    lambda output, label, weight: output.sum(),
    lambda output, *, label: output.sum(),
    Loss().alone,
    functools.partial(Loss(), None),
]


@pytest.mark.parametrize("loss_fn", GOOD)
def test_taken(loss_fn: Callable[..., Any]) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(2, 2)))
    model.forward_backward((torch.ones(4, 2),), loss_fn=loss_fn)
    model.synchronize()


@pytest.mark.parametrize("loss_fn", BAD)
def test_refused(loss_fn: Callable[..., Any]) -> None:
    model = RoundPipe(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigTypeError, match=r"cannot be called as loss_fn\(output, label\) .*lambda output, _: "):
        model.forward_backward((torch.ones(4, 2),), loss_fn=loss_fn)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "got no loss_fn.* got CausalLM.*loss of None, since it got no labels: .*labels=tokens"),
        ({"labels": TOKENS}, r"got no loss_fn.*holds a loss: pass loss_fn=lambda output, _: output\.loss"),
        ({"loss_fn": lambda output, _: output.loss}, "loss_fn returned NoneType.*it got no labels: .*labels=tokens"),
    ],
    ids=["nothing", "labels_alone", "loss_fn_alone"],
)
def test_of_a_language_model(arguments: dict[str, Any], says: str) -> None:
    model = wrap_model_to_roundpipe(make_model("llama"))
    labels = {k: v for k, v in arguments.items() if k == "labels"}
    loss_fn = {k: v for k, v in arguments.items() if k == "loss_fn"}
    with pytest.raises(StageError, match=says):
        model.forward_backward(input_kwargs=dict(input_ids=TOKENS, **labels), **loss_fn)


@pytest.mark.parametrize(
    ("make", "field"),
    [(lambda x: {"loss": x.sum()}, r"output\['loss'\]"), (lambda x: SimpleNamespace(loss=x.sum()), r"output\.loss")],
)
def test_a_loss_inside_the_output_is_named(make: Callable[[torch.Tensor], Any], field: str) -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return make(self.linear(x))

    with pytest.raises(StageError, match=f"pass loss_fn=lambda output, _: {field}"):
        RoundPipe(nn.Sequential(Holds())).forward_backward((torch.ones(4, 2),))
