"""Which attributes of a layer's modules a skeleton must take over again.

Note [Attributes that stay]
  A skeleton takes over its host module's attributes before each call of the layer, and afterwards returns what the
  forward assigned. Most never change, and to look at each of them costs a good part of what launching the layer does.
  So both sides are compared whole, by identity, with what they were when everything was last looked at. Modules with
  attributes that must be exchanged for the skeleton's own (modules, parameters, methods, compiled functions) are looked
  at each time.
"""

from __future__ import annotations

import operator
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from . import held
from .compiled import is_compiled

__all__ = ["INERT", "MOVES", "OWN", "AttributeMemo", "moves"]

# Entries of a module's __dict__ that a skeleton owns and never exchanges with the host module.
OWN = frozenset({"_parameters", "_buffers", "_modules"})
MOVES = (nn.Module, nn.Parameter, types.MethodType)
# Types of values that are the same for a skeleton. Hooks are shared.
INERT = held.PLAIN | {OrderedDict, set, torch.dtype, torch.device, torch.Size}

_Attributes = tuple[tuple[str, ...], tuple[Any, ...]]  # names, values


class AttributeMemo:
    """What the last pulls of a module found on the host and left on its skeleton, if nothing there had to be exchanged.

    Holds nothing that the skeleton does not hold.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._own: _Attributes | None = None
        self._hosts: list[_Attributes | None] = [None, None]
        self._containers: list[Any] = []

    def still(self, recomputes: bool, host: dict[str, Any], own: dict[str, Any]) -> bool:
        """Whether a pull would change nothing. ``recomputes``: ``host`` was noted in the forward."""
        return _same(self._hosts[recomputes], host) and self.untouched(own)

    def untouched(self, own: dict[str, Any]) -> bool:
        """Whether the skeleton is as the last pull left it, and no container of its has anything to exchange."""
        return _same(self._own, own) and not any(map(moves, self._containers))

    def note(self, recomputes: bool, met: tuple[tuple[str, Any], ...], own: dict[str, Any], simple: bool) -> None:
        """``met``: what there was on the host. ``simple``: none of it moves, and the skeleton has nothing beside it."""
        if not simple:
            self._forget()
            return
        if not _same(self._own, own):
            self._own = tuple(own), tuple(own.values())
            self._hosts = [None, None]
            self._containers = [value for name, value in own.items() if type(value) in (list, dict) and name not in OWN]
        self._hosts[recomputes] = tuple(name for name, _ in met), tuple(value for _, value in met)


def _same(noted: _Attributes | None, now: dict[str, Any]) -> bool:
    if noted is None or noted[0] != tuple(now):
        return False
    values = tuple(now.values())  # at once: another device's worker may assign to the host's module
    return len(noted[1]) == len(values) and all(map(operator.is_, noted[1], values))


def moves(value: Any) -> bool:
    """Whether it is, or has in it, what is exchanged between a host's module and its skeletons."""
    if type(value) in (list, tuple):
        return any(type(v) not in INERT and isinstance(v, MOVES) for v in value)
    if type(value) is dict:
        return any(type(v) not in INERT and isinstance(v, MOVES) for v in value.values())
    return isinstance(value, MOVES) or is_compiled(value)
