"""Where a model's weights go when it is wrapped, and that nothing stays locked when the process ends."""

from __future__ import annotations

import torch
from torch import nn

from . import _ops
from . import engine as engines
from .errors import HostOutOfMemory
from .host_advice import explain
from .host_placement import choose, instead_of_copying
from .training_state import TrainingState, living_states
from .units import check_parameters

__all__ = ["place"]


def place(layers: list[nn.Module], optim_dtype: torch.dtype | None, pin_model: str, name: str) -> TrainingState:
    """A new state, with the weights where ``pin_model`` wants them.

    Raises:
        ConfigError: a parameter is not initialised, not on the CPU or not strided; nothing has moved.
        HostOutOfMemory: there is not enough host memory; the weights are in ordinary memory then.
    """
    check_parameters(layers)
    engine = engines.current()
    placement = choose(pin_model, layers, name)
    try:
        return TrainingState(layers, optim_dtype, engine, placement)
    except HostOutOfMemory as error:
        if placement.in_place:
            raise
        if pin_model != "auto":
            raise explain(error, placement.needs.remedies(pin_model)) from error
        return TrainingState(layers, optim_dtype, engine, instead_of_copying(error, placement.needs))


def _unlock_weights() -> None:
    """Of models that live when the interpreter ends: unlocks what was locked in place, while there is a driver."""
    for state in living_states():
        for unit in state.units:
            _ops.drop_quietly(unit.close)
        state.placement.close()


engines.after_engine_exit.append(_unlock_weights)
