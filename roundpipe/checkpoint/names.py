"""The tensors of a model by the names of its state dict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class ModelNames:
    """What a model's state dict consists of; each tensor once, under one of its names.

    ``derived``: entries that hooks of the state dict make and that are no parameter or buffer. ``extra``: what modules
    give by ``get_extra_state``, and anything else that is no tensor.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    derived: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    name_of: dict[int, str] = field(default_factory=dict)  # of parameters, by id


def names_of(model: nn.Module) -> ModelNames:
    found = ModelNames()
    parameters, buffers = {id(p) for p in model.parameters()}, {id(b) for b in model.buffers()}
    # Of a tied pair transformers keeps the name that is not in this list, and its loading expects that one.
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    seen: set[int] = set()
    state = model.state_dict(keep_vars=True)
    for name in sorted(state, key=lambda name: name in tied):
        value = state[name]
        if not isinstance(value, torch.Tensor):
            found.extra[name] = value
        elif id(value) in seen:
            continue
        elif id(value) in parameters:
            found.parameters[name] = value  # type: ignore[assignment]
            found.name_of[id(value)] = name
        elif id(value) in buffers:
            found.buffers[name] = value
        elif name.endswith("_extra_state"):
            found.extra[name] = value
        else:
            found.derived[name] = value
        seen.add(id(value))
    return found
