"""Where the user's own code called this package: for default names and for warnings."""

from __future__ import annotations

import sys
from types import FrameType

_PACKAGE = __name__.partition(".")[0]


def call_site() -> str:
    """``file:line`` of the first frame outside this package."""
    frame, _ = _first_frame_outside(_PACKAGE)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def caller_level() -> int:
    """``stacklevel`` of a warning given by the function that asks: the first frame outside this package and torch,
    through which calls come (``Module.__call__``, the constructor of an optimizer).
    """
    return _first_frame_outside(_PACKAGE, "torch")[1]


def asked_by_user() -> bool:
    """Whether the function that asks was called from outside this package, not by another function of it."""
    return sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] != _PACKAGE


def _first_frame_outside(*packages: str) -> tuple[FrameType, int]:
    """With its level above the function that called into this file, which is at level 1."""
    frame, level = sys._getframe(2), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        frame, level = frame.f_back, level + 1
    return frame, level
