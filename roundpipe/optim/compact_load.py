"""Loading a state dict into a compact optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _ops
from ..errors import ConfigError
from .compact_memory import CODE_BLOCK, Slot

if TYPE_CHECKING:
    from .compact import CompactOptimizer

_CHOICES = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")  # of an implementation


def load_state(optimizer: CompactOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Checks everything, then copies. No step is under way."""
    pairs = check_state(optimizer, state_dict)
    own, given = optimizer.param_groups, state_dict["param_groups"]
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


def check_state(optimizer: CompactOptimizer, state_dict: Mapping[str, Any]) -> list[tuple[Slot, Mapping[str, Any]]]:
    """The parameters' places with what belongs there. Raises ConfigError when groups or shapes do not fit."""
    for entry in ("param_groups", "state"):
        if entry not in state_dict:
            found = ", ".join(map(repr, list(state_dict)[:3])) or "nothing"
            raise ConfigError(
                f"the loaded state dict has no {entry!r} but {found}; expected what state_dict() of an optimizer gives"
            )
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
    return pairs


def _check(slot: Slot, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name.endswith("_scale"):
            fits = value.numel() == -(-slot.host.numel() // CODE_BLOCK)
        else:
            fits = not isinstance(value, Tensor) or not value.dim() or value.shape == slot.layout.size
        if not fits:
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
    for position, name in enumerate(memory.names):
        if slot.index >= 0 and slot.moments[position].numel():
            _load_moment(slot, position, values.get(name), values.get(f"{name}_scale"))
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


def _load_moment(slot: Slot, position: int, value: Tensor | None, scale: Tensor | None) -> None:
    moment, own_scale = slot.moments[position], slot.scales[position]
    if value is None:
        moment.zero_()
        own_scale.zero_()
    elif scale is not None and own_scale.numel():  # both eight bits: the codes are the value
        slot.shaped(moment).copy_(value)
        own_scale.copy_(scale)
    else:
        flat = torch.empty(moment.numel())
        if scale is None:
            slot.shaped(flat).copy_(value)
        else:
            codes = torch.empty(moment.numel(), dtype=torch.uint8)
            slot.shaped(codes).copy_(value)
            _ops.decode_moment(codes, scale.contiguous(), flat, position)
        if own_scale.numel():
            _ops.encode_moment(flat, moment, own_scale, position)
        else:
            moment.copy_(flat)


def _clear(optimizer: CompactOptimizer, slot: Slot) -> None:
    optimizer._memory.counts[slot.index] = 0
    for tensor in (*slot.moments, *slot.scales):
        tensor.zero_()
