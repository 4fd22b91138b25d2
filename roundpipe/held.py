"""What functions and objects hold on to: modules and tensors that would not move with them.

Note [Handed on]
  Tensors of a layer's output travel to wherever the next layer runs. Everything else is handed on as the object that it
  is, to whatever device the next layer and its recompute are on. A function that holds a module of the layer (a method,
  a closure over ``self``) would compute there with what lies in the place of that module's weights by then: those of
  another device, or of another layer. A tensor inside it would be on the wrong device and outside the graph, so its
  gradient would be lost without a word. Both hold within a stage as well, whose weights are given back layer by layer,
  and stages change with the plan. So a layer may hand on nothing that holds a module with weights, or a tensor. What
  was given to it and held one before is the caller's and passes; so does the last layer's output on its way to the
  loss, which is computed there and then.

  Attributes that a forward assigns are of the same kind: the host's module, and with it every device, would get them.
  Methods of the skeleton become methods of the host's module, also inside lists and dicts. What holds a module or
  parameter of the skeleton in another way is not written back, so each call makes its own.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .batch_tree import Leaf, is_block_mask
from .errors import ConfigError
from .packed import RoundPipePackedData

__all__ = ["PLAIN", "bound", "find", "holds_state", "refuse"]

PLAIN = frozenset({type(None), bool, int, float, str})  # what needs no look inside

_VISITS = 2000
"""Objects looked at inside one value. Beyond that it is taken to hold nothing: what is so large is no closure."""

_CLOSED = (str, bytes, bytearray, range, type, types.ModuleType, types.CodeType, torch.dtype, torch.device, torch.Size)


def holds_state(value: object) -> bool:
    """A tensor, or a module that has any."""
    if isinstance(value, nn.Module):
        return next(value.parameters(), None) is not None or next(value.buffers(), None) is not None
    return isinstance(value, torch.Tensor)


def find(value: Any, wanted: Callable[[object], bool]) -> tuple[str, object] | None:
    """The first object inside ``value`` that is wanted, and how it is reached from there; None: there is none.

    Looks into closures, defaults, bound objects, arguments of ``functools.partial``, attributes and containers; not
    into global variables, nor into what a property would compute.
    """
    pending: deque[tuple[str, Any]] = deque([("", value)])
    seen: set[int] = set()
    while pending and len(seen) < _VISITS:
        path, one = pending.popleft()
        if id(one) in seen or type(one) in PLAIN:
            continue
        seen.add(id(one))
        if wanted(one):
            return path, one
        if isinstance(one, (*_CLOSED, torch.Tensor)):
            continue
        room = _VISITS - len(seen)
        for (step, inner), _ in zip(_inside(one), range(room), strict=False):
            pending.append((path + step, inner))
    return None


def bound(value: Any, owned: Mapping[int, Any]) -> bool:
    """Whether ``value`` holds one of these modules and parameters, given by id."""
    return find(value, lambda one: id(one) in owned) is not None


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    compiled = getattr(value, "__dict__", {}).get("_torchdynamo_orig_callable")
    if compiled is not None:  # not what the compiler keeps with it
        yield "", compiled
        return
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f" -> {name}", cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        yield from _items(" -> default", value.__defaults__ or ())
        yield from _entries(value.__kwdefaults__ or {})
    elif isinstance(value, functools.partial):
        yield " -> func", value.func
        yield from _items(" -> args", value.args)
        yield from _entries(value.keywords)
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        yield "", value.__self__
        yield "", getattr(value, "__func__", None)
    elif isinstance(value, weakref.ReferenceType):
        yield "", value()
    elif isinstance(value, Mapping):
        yield from _entries(value)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from _items("", value)
    for name, attribute in getattr(value, "__dict__", {}).items():
        yield f".{name}", attribute
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = cls.__dict__.get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    yield f".{name}", descriptor.__get__(value)
                except AttributeError:  # not assigned yet
                    continue


def _items(step: str, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(values):
        yield f"{step}[{index}]", value


def _entries(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key in values:
        yield f"[{key!r}]", values[key]


def refuse(found: Iterable[Leaf], where: str, known: frozenset[int] = frozenset()) -> None:
    """Refuses leaves, other than tensors, that hold a module with weights or a tensor.

    Args:
        where: what is handed on, for the message.
        known: ids of leaves that may.

    Raises:
        ConfigError: naming the leaf, what it holds and what to do.
    """
    for leaf in found:
        value = leaf.value
        passes = type(value) in PLAIN or isinstance(value, (torch.Tensor, RoundPipePackedData)) or is_block_mask(value)
        if passes or id(value) in known:
            continue
        held = find(value, holds_state)
        if held is None:
            continue
        path, one = held
        name = getattr(value, "__qualname__", None) or type(value).__qualname__
        if isinstance(one, nn.Module):
            what = f"a module with weights ({type(one).__name__}{_reached(path)})"
            why = "its weights are on this device only while this layer runs"
        else:
            what = f"a tensor of shape {tuple(one.shape)}{_reached(path)}"  # type: ignore[attr-defined]
            why = "it would stay on this device and outside the graph"
        raise ConfigError(
            f"{leaf.name}, {where}, is {name!r}, which holds {what}; {why}. Compute inside the layer and hand on "
            "tensors, in tuples, dicts or types known to torch.utils._pytree; a module that two layers use belongs "
            "into both. Functions that hold neither are handed on as they are."
        )


def _reached(path: str) -> str:
    path = path.removeprefix(" -> ").removeprefix(".")
    return f", as {path}" if path else ""
