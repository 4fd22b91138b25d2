"""What the pass that brings gradients to the optimizer has seen of them, for whoever would look a second time."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

__all__ = ["ask", "note", "wanted", "watchers"]

watchers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Who asks for checks (gradient scalers). While there is none, nothing is checked."""

_ATTRIBUTE = "_roundpipe_non_finite"


def wanted() -> bool:
    return len(watchers) > 0


def note(gradient: Tensor, non_finite: bool) -> None:
    """Notes whether ``gradient``, as it is now, holds an infinity or NaN."""
    setattr(gradient, _ATTRIBUTE, (gradient._version, non_finite))


def ask(gradient: Tensor) -> bool | None:
    """What was noted; None if nothing was, or if the gradient has been written since."""
    noted = getattr(gradient, _ATTRIBUTE, None)
    return None if noted is None or noted[0] != gradient._version else noted[1]
