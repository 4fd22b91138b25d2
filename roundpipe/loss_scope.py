"""Whether the loss function that the present thread runs belongs to a call with an announced step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Scope(threading.local):
    announced = False


_scope = _Scope()


@contextlib.contextmanager
def of_call(announced: bool) -> Iterator[None]:
    before, _scope.announced = _scope.announced, announced
    try:
        yield
    finally:
        _scope.announced = before


def is_announced() -> bool:
    """Then gradients are used before anybody could unscale them."""
    return _scope.announced
