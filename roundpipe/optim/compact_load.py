"""Loading a state dict into a compact optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _ops
from ..errors import ConfigError
from .compact_memory import Slot

if TYPE_CHECKING:
    from .compact import CompactOptimizer

_CHOICES = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")  # of an implementation


def load_state(optimizer: CompactOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks everything, then copies. No step is under way."""
    own, given = optimizer.param_groups, state_dict["param_groups"]
    if len(own) != len(given):
        raise ConfigError(f"the loaded state dict has {len(given)} parameter groups, the optimizer {len(own)}")
    pairs: list[tuple[Slot, Mapping[str, Any]]] = []
    for number, (group, saved) in enumerate(zip(own, given, strict=True)):
        if len(group["params"]) != len(saved["params"]):
            raise ConfigError(
                f"group {number} of the loaded state dict has {len(saved['params'])} parameters, the optimizer's "
                f"{len(group['params'])}"
            )
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            values = state_dict["state"].get(key)
            if values:
                slot = optimizer.slot(parameter)
                _check(slot, values)
                pairs.append((slot, values))
    for group, saved in zip(own, given, strict=True):
        group.update({name: value for name, value in saved.items() if name in group and name not in _CHOICES})
    optimizer.ensure_state(lambda: None)  # options decide which moments are kept
    loaded = {id(slot) for slot, _ in pairs}
    with torch.no_grad():
        for slot, values in pairs:
            _load(optimizer, slot, values)
        for slot in optimizer._memory.slots.values():
            if id(slot) not in loaded and slot.index >= 0:
                _clear(optimizer, slot)


def _check(slot: Slot, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != slot.layout.size:
            raise ConfigError(
                f"{name!r} of parameter {slot.name!r} has shape {tuple(value.shape)} in the loaded state dict, "
                f"expected {tuple(slot.layout.size)}"
            )


def _load(optimizer: CompactOptimizer, slot: Slot, values: Mapping[str, Any]) -> None:
    memory = optimizer._memory
    present = [values.get(name) for name in memory.names]
    if slot.index >= 0:
        # A state without a count has one behind it if it has moments.
        memory.counts[slot.index] = float(values.get("step", any(v is not None for v in present)))
    for moment, value in zip(slot.moments, present, strict=False):
        if moment.numel():
            slot.shaped(moment).zero_() if value is None else slot.shaped(moment).copy_(value)
    master = values.get("master")
    if values.get("master_low") is not None and slot.layout.dtype == torch.bfloat16:
        low = torch.empty_strided(slot.layout.size, slot.layout.stride, dtype=torch.int16).copy_(values["master_low"])
        joined = torch.empty(low.numel())
        _ops.join_master(slot.weight(), low.as_strided((low.numel(),), (1,)), joined)
        master = slot.shaped(joined)
    if master is None:
        slot.follow_weight()
    else:
        slot.take_master(master)


def _clear(optimizer: CompactOptimizer, slot: Slot) -> None:
    optimizer._memory.counts[slot.index] = 0
    for moment in slot.moments:
        moment.zero_()
