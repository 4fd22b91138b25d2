"""``copy.deepcopy`` and ``pickle`` of a wrapped model: a wrapper of its own around a copy of the model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .model import RoundPipe


def contents(wrapper: RoundPipe, memo: dict[int, Any] | None = None) -> dict[str, Any]:
    """What makes the wrapper, after everything under way has ended; the model in it is a copy.

    A copy for pickle too: a parameter lies in memory that it shares with others, all of which would be written beside
    it. Gradients do not go along, as ``copy.deepcopy`` of any module leaves them out.
    """
    wrapper.synchronize()
    optimizer = wrapper._state.optimizer
    # Of a finer dtype than the weights', these values cannot be made from them again.
    finer = [(n, p.detach().clone()) for n, p in wrapper.optim_named_parameters()] if optimizer else []
    model, original = copy.deepcopy((wrapper.model, wrapper.original_model), memo)
    return {
        "kind": type(wrapper),
        "model": model,
        "original_model": original,
        "optim_dtype": optimizer.dtype,
        "name": wrapper.name,
        "config": wrapper._config,
        "pin_model": wrapper._state.placement.asked,
        "training": wrapper.training,
        "optimizer_values": finer,
        "arguments": wrapper._rebuild_arguments(),
    }


def rebuild(parts: dict[str, Any]) -> RoundPipe:
    wrapper: RoundPipe = parts["kind"](
        parts["model"],
        optim_dtype=parts["optim_dtype"],
        name=parts["name"],
        model_run_config=parts["config"],
        pin_model=parts["pin_model"],
        **parts["arguments"],
    )
    if parts["original_model"] is not None:
        wrapper.set_original_model(parts["original_model"])
    wrapper.__dict__["training"] = parts["training"]
    if parts["optimizer_values"]:
        made = dict(wrapper.optim_named_parameters())
        with torch.no_grad():
            for name, value in parts["optimizer_values"]:
                made[name].copy_(value)
    return wrapper
