"""A router's choice of experts, made once: recompute takes the experts that the forward took.

Two experts may score so alike that the next rounding decides. If recompute decided differently, the gradients would be
those of a forward that never was. All routers choose by `topk`, so that is where the choice is kept and given back; no
model needs to be known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roundpipe import recompute

__all__ = ["call_replaying_routes"]

_KIND = "routes of a block"  # marks what is kept as ours: a block may keep something itself


class _NotingRoutes(TorchFunctionMode):
    """Notes the indices of every `topk`."""

    def __init__(self) -> None:
        super().__init__()
        self.indices: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.indices.append(result[1])
        return result


class _ReplayingRoutes(TorchFunctionMode):
    """Gives every `topk` the indices that were noted; its values are those of the present input at these indices."""

    def __init__(self, indices: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._indices = iter(indices)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        return _replayed(next(self._indices), *args, **kwargs)


_TOPK = frozenset({torch.topk, torch.Tensor.topk})


def _replayed(indices: Tensor, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    del k, largest, sorted
    return torch.return_types.topk((input.gather(dim, indices), indices))


def call_replaying_routes(function: Callable[[], Any], routes: bool | None) -> tuple[Any, bool | None]:
    """Calls a block's forward; gives its result, and whether it chooses by `topk` (None: not known).

    In a forward that will be repeated its choices are kept, in the repetition they are given back. `routes`: what an
    earlier call has found; False saves looking again.
    """
    scope = recompute._current.scope
    if scope is None or routes is False or not (scope.keeps or scope.recomputing):
        return function(), routes
    if scope.recomputing:
        if scope.data is None or scope.data[0] != _KIND:
            return function(), routes
        with _ReplayingRoutes(scope.data[1:]):
            return function(), True
    with _NotingRoutes() as noting:
        result = function()
    if noting.indices and not scope.saved:
        recompute.save_for_recompute(_KIND, *noting.indices)
    return result, bool(noting.indices)
