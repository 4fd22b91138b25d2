"""Functions that ``torch.compile`` made of a layer's methods, made anew for the layer's skeleton on a device.

What is compiled is bound to the host's module. Called from a skeleton as it is it would compute with the host's weights
and train nothing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from .errors import ConfigError


def is_compiled(value: object) -> bool:
    return isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")


def rebound(compiled: Any, twins: Mapping[int, nn.Module]) -> Any:
    """``compiled`` for the skeletons of the modules that it is bound to; itself when it is bound to none of them.

    Args:
        twins: skeletons by id of the host's module.

    Raises:
        ConfigError: this version of PyTorch keeps such functions in a way that we do not know.
    """
    function = compiled._torchdynamo_orig_callable
    moved = _moved(function, twins)
    if moved is function:
        return compiled
    context = _cell(compiled, "self")
    if context is None or not callable(context):
        raise ConfigError(
            f"{getattr(function, '__qualname__', function)!r} was compiled in a way that cannot be repeated for each "
            "device; compile the layer as a whole (torch.compile(layer) or layer.compile()), or leave compiling out."
        )
    return context(moved)


def _moved(function: Any, twins: Mapping[int, nn.Module]) -> Any:
    if isinstance(function, nn.Module):
        return twins.get(id(function), function)
    if isinstance(function, types.MethodType):
        twin = twins.get(id(function.__self__))
        return function if twin is None else types.MethodType(function.__func__, twin)
    inner = _cell(function, "fn")  # PyTorch's own frame around a module of torch.nn
    moved = None if inner is None else _moved(inner, twins)
    if moved is None or moved is inner:
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return moved(*args, **kwargs)

    return call


def _cell(function: Any, name: str) -> Any:
    """What ``function`` has captured under this name, or None."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or name not in code.co_freevars:
        return None
    return cells[code.co_freevars.index(name)].cell_contents
