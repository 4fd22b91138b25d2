"""What a layer may keep for its recompute: ``save_for_recompute``, ``doing_recompute``, ``get_recompute_data``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import batch_tree, held
from .errors import RoundPipeError


class RecomputeDataError(RoundPipeError, AssertionError):
    """``get_recompute_data`` was called where there is nothing to get."""


@dataclass
class RecomputeScope:
    """The call of one layer for one microbatch, as its forward can see it."""

    recomputing: bool
    keeps: bool  # a recompute will follow
    data: tuple[Any, ...] | None = None
    saved: bool = False


class _Current(threading.local):
    scope: RecomputeScope | None = None


_current = _Current()


class entered:  # noqa: N801 (a context manager used as a statement)
    """Makes ``scope`` the current one of this thread."""

    def __init__(self, scope: RecomputeScope | None) -> None:
        self.scope = scope

    def __enter__(self) -> RecomputeScope | None:
        self.outer = _current.scope
        _current.scope = self.scope
        return self.scope

    def __exit__(self, *_: object) -> None:
        _current.scope = self.outer


def doing_recompute() -> bool:
    """Whether the calling layer's forward is being repeated for the backward pass."""
    scope = _current.scope
    return scope is not None and scope.recomputing


def save_for_recompute(*data: Any) -> None:
    """Keeps values of this forward for the recompute of the same layer and microbatch.

    Tensors (any tree that pytree knows) are kept in host memory. May be called once in a layer's forward; does nothing
    without grad and during recompute.

    Raises:
        RuntimeError: called a second time in one forward.
        ValueError: a tensor requires grad, or something holds a module or a tensor that would not move with it.
    """
    scope = _current.scope
    if scope is None or scope.recomputing or not scope.keeps or not torch.is_grad_enabled():
        return
    if scope.saved:
        raise RuntimeError(
            "save_for_recompute was called twice in the forward of one layer; expected once: pass all values together."
        )
    for leaf in pytree.tree_leaves(data):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            raise ValueError(
                f"save_for_recompute got a tensor of shape {tuple(leaf.shape)} that requires grad; expected values "
                "outside the graph (indices, masks, decisions). Pass tensor.detach()."
            )
    held.refuse(batch_tree.leaves(data, "data"), "given to save_for_recompute")
    scope.data = data
    scope.saved = True


def get_recompute_data() -> tuple[Any, ...]:
    """The values given to ``save_for_recompute`` by the forward that is being repeated; tensors are on this device.

    Raises:
        RecomputeDataError: (also an AssertionError) outside a recompute, or when the forward saved nothing.
    """
    scope = _current.scope
    if scope is None or not scope.recomputing:
        raise RecomputeDataError("get_recompute_data was called outside a recompute; check doing_recompute() first.")
    if scope.data is None:
        raise RecomputeDataError("get_recompute_data: the forward of this layer called no save_for_recompute.")
    return scope.data
