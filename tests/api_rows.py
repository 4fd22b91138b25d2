"""Where the rows of the table of the public interface are collected, and the models they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig

ROWS: dict[str, Callable[[], Any]] = {}


def row(function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` is a row; its docstring is the rule that it checks."""
    assert function.__doc__ and function.__name__ not in ROWS
    ROWS[function.__name__] = function
    return function


class Notes(nn.Module):
    """Passes its input on and notes what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        value = args[0]
        if isinstance(value, tuple):
            return tuple(v * self.weight if v.is_floating_point() else v for v in value)
        return value * self.weight


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def square_sum(output: torch.Tensor, label: Any) -> torch.Tensor:
    return output.square().sum()


def config(**fields: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(**fields)


def sgd(model: RoundPipe, lr: float = 0.1) -> torch.optim.Optimizer:
    with OptimizerCtx():
        return torch.optim.SGD(model.parameters(), lr=lr)


def stages(forward: list[range], backward: list[range]) -> ModelExecutePlan:
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = forward, backward
    return plan
