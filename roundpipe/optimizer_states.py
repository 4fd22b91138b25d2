"""Which optimizers work on the optimizer parameters of models, and how much memory their states take.

An optimizer of torch's kind is built by the user, and its step is called by his function, so the engine is never given
it. But every ``torch.optim.Optimizer`` announces its steps to hooks of the process, and the steps that count are taken
where ``parameters()`` means the optimizer's. So an optimizer is known from its first step on, or since a checkpoint of
it was saved or loaded; before that it has no states, unless the user loads them himself.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .optimizer_context import in_optimizer_context

__all__ = ["note", "state_bytes", "watch"]

_known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_lock = threading.Lock()  # covers the set: the optimizer thread adds to it while a report reads it


@functools.cache
def watch() -> None:
    """From now on optimizers that step in an optimizer context are known."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if in_optimizer_context():
        note(optimizer)


def note(optimizer: torch.optim.Optimizer) -> None:
    with _lock:
        _known.add(optimizer)


def state_bytes(parameters: Set[int], apart: Set[int]) -> int:
    """Host memory of the states for these optimizer parameters (by id), each storage once.

    Args:
        apart: addresses of storages that are counted elsewhere.
    """
    with _lock:
        optimizers = list(_known)
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):  # a copy: a step may be adding to it
            if id(parameter) in parameters:
                for tensor in _tensors(state):
                    storage = tensor.untyped_storage()
                    if tensor.device.type == "cpu" and storage.data_ptr() not in apart:
                        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):  # made of others, as states in eight bits are
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, Mapping):
        for inner in list(value.values()):
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in list(value):
            yield from _tensors(inner)
