"""Packed data where a tensor is expected: it is merged on the spot.

A trunk hands packed data from block to block, and a user's own forward may do something with it in between: add a skip
connection, look at its shape. PyTorch functions, operators and attributes of tensors then see the merged tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


class MergesOnUse(list[Any]):
    """A list of the microbatches' values that behaves as their merged tensor where lists have nothing to offer."""

    rows: list[int] | None = None  # see RoundPipePackedData

    def merged(self) -> Any:
        """The value of the whole batch, by the automatic rule; waits for the transfers. Autograd history is kept."""
        from .output_merge import merge_outputs

        self.synchronize()
        return merge_outputs(list(self), rows=self.rows)

    def synchronize(self) -> None:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(MergesOnUse, MergesOnUse.merged, (tuple(args), kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.merged(), name)

    def __getitem__(self, index: Any) -> Any:
        of_list = isinstance(index, (int, slice))
        return super().__getitem__(index) if of_list else self.merged()[index]


def _value(operand: Any) -> Any:
    return operand.merged() if isinstance(operand, MergesOnUse) else operand


def _binary(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    def apply(self: MergesOnUse, other: Any) -> Any:
        if type(other) is list:  # the operators that lists have
            return function(other, list(self)) if swapped else function(list(self), other)
        return function(_value(other), self.merged()) if swapped else function(self.merged(), _value(other))

    return apply


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self.merged())


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
    _function = getattr(operator, _name)
    setattr(MergesOnUse, f"__{_name}__", _binary(_function, False))
    setattr(MergesOnUse, f"__r{_name}__", _binary(_function, True))
    if _name in ("add", "mul"):  # a list would extend itself
        setattr(MergesOnUse, f"__i{_name}__", _binary(_function, False))
for _name in ("neg", "abs", "invert"):
    setattr(MergesOnUse, f"__{_name}__", _unary(getattr(operator, _name)))
