"""Logits that are never computed whole: what a model does to them before its loss is noted, and done chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

__all__ = ["LogitsAreTransformed", "PendingLogits"]


class LogitsAreTransformed(Exception):
    """The model does something to its logits that cannot be done chunk by chunk, so they are computed whole."""


_PRODUCTS = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_QUOTIENTS = {"div", "div_", "__truediv__", "__itruediv__", "__div__", "true_divide", "divide"}
_CASTS = {"float", "to", "contiguous"}
_IN_PLACE = {"mul_", "__imul__", "div_", "__itruediv__", "tanh_"}


@dataclass(frozen=True)
class Transform:
    """logits -> softcap * tanh(scale * logits / softcap), or scale * logits if softcap is 0."""

    scale: float
    softcap: float


class PendingLogits(Tensor):
    """In the place of logits [..., V]. Takes no memory; follows products with numbers, `tanh` and casts."""

    operations: tuple[tuple[str, float], ...]
    hidden: Tensor

    @staticmethod
    def of(hidden: Tensor, vocabulary: int) -> PendingLogits:
        """The projection of `hidden` [..., H] to `vocabulary` classes."""
        with no_dispatch():  # an ordinary tensor also where `hidden` has no values
            shell = torch.empty((), dtype=hidden.dtype, device=hidden.device).expand(*hidden.shape[:-1], vocabulary)
            pending = shell.as_subclass(PendingLogits)
        pending.operations = ()
        pending.hidden = hidden
        return pending

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = func.__name__
        if name in ("__get__", "size", "dim", "numel"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        self = next((arg for arg in args if isinstance(arg, PendingLogits)), None)
        operation = None if self is None else _operation(name, self, args, kwargs or {})
        if operation is None:
            raise LogitsAreTransformed
        result = self if name in _IN_PLACE else PendingLogits.of(self.hidden, self.shape[-1])
        result.operations = self.operations + operation
        return result

    def transform(self) -> Transform:
        """All operations as one; raises LogitsAreTransformed for what is no scaling and soft capping."""
        scale, softcap = 1.0, 0.0
        operations = list(self.operations)
        while operations and operations[0][0] != "tanh":
            if len(operations) > 2 and operations[1][0] == "tanh":
                (kind, number), _, (last_kind, last) = operations[:3]
                cap = number if kind == "div" else 1.0 / number
                if last_kind == "mul" and abs(cap - last) <= 1e-6 * abs(last) and len(operations) == 3:
                    softcap, operations = last, []
                break
            kind, number = operations.pop(0)
            scale = scale * number if kind == "mul" else scale / number
        if operations:
            raise LogitsAreTransformed
        return Transform(scale, softcap)


def _operation(
    name: str, self: PendingLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[str, float], ...] | None:
    """The operations that this call adds; None: not one that can be followed."""
    if name in ("tanh", "tanh_"):
        return (("tanh", 0.0),)
    if name in _CASTS:
        targets = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
        return () if all(target.is_floating_point for target in targets) else None
    if len(args) != 2 or kwargs:
        return None
    number = args[1] if args[0] is self else args[0]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number == 0:
        return None
    if name in _PRODUCTS:
        return (("mul", float(number)),)
    if name in _QUOTIENTS and args[0] is self:
        return (("div", float(number)),)
    return None
