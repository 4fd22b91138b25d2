"""Functions as layers: a loss or another function without weights, run on a device for each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class FunctionLayer(nn.Module):
    """Calls ``function`` with its own arguments; a layer without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _LossOf(nn.Module):
    """The loss function that a model of transformers has at the time of the call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Not the model itself, which would become a part of this module.
        self._loss_function: Callable[[], Callable[..., Any]] = lambda: model.loss_function  # type: ignore[assignment, return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._loss_function()(*args, **kwargs)


def loss_property(model: nn.Module) -> nn.Module | None:
    """A layer that computes the model's ``loss_function``, where the class offers one to be replaced."""
    return _LossOf(model) if isinstance(getattr(type(model), "loss_function", None), property) else None
