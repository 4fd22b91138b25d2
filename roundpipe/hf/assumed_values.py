"""Running code of transformers on tensors that have no values, as it would run on ordinary ones.

Models look at values in a few places before their blocks: whether anything is padded, whether sequences are packed.
Both are asked as "is all of this so?", and the usual answer is yes. On tensors without values (meta, fake) there is no
answer, and where a tensor is fake, transformers builds whole masks instead of asking, as it must for a tracer. What is
estimated from such a run would be wrong: an explicit mask grows with the square of the sequence and rules out the flash
kernels.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["assumed_values"]


class _Yes(TorchDispatchMode):
    """A question of truth about a tensor without values is answered with yes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool and _valueless(args[0]):
            return True
        if func is torch.ops.aten.equal.default and _valueless(args[0]):
            return True
        return func(*args, **(kwargs or {}))


def _valueless(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


_lock = threading.Lock()  # covers putting the stand-in into a module of transformers and taking it out
_users = 0
_threads: set[int] = set()


@contextlib.contextmanager
def assumed_values() -> Iterator[None]:
    """On this thread, in here. Does not import transformers."""
    me = threading.get_ident()
    with _lock:
        nested = me in _threads
        _threads.add(me)
    if not nested:
        _stand_in(True)
    try:
        with _Yes():
            yield
    finally:
        if not nested:
            with _lock:
                _threads.discard(me)
            _stand_in(False)


_original: Any = None


def _stand_in(wanted: bool) -> None:
    global _users, _original
    module: Any = sys.modules.get("transformers.masking_utils")
    with _lock:
        _users += 1 if wanted else -1
        if module is None or not hasattr(module, "is_tracing"):
            return
        if wanted and _users == 1:
            _original = module.is_tracing
            module.is_tracing = _is_tracing
        elif not wanted and _users == 0 and _original is not None:
            module.is_tracing, _original = _original, None


def _is_tracing(tensor: Any = None) -> bool:
    return False if threading.get_ident() in _threads else bool(_original is not None and _original(tensor))
