"""What a compact optimizer keeps for each parameter: masters and moments, packed unit by unit beside the weights.

Note [Compact formats]
  Bytes a parameter of bfloat16 (weight and gradient included, Adam):
    master="split"      2 weight + 2 gradient + 2 low half + 8 moments (float32) or 4 (bfloat16)
    master="float32"    the same with 4 instead of 2 for the master
    state_dtype="int8"  2 + 2 + 2 + 2 and two float32 scales for every 256: 8.03
  float32 weights are their own masters; float16 ones have a float32 master whatever ``master`` says, because 16 more
  bits cannot make an exact float32 of a float16. An asynchronous step writes its weights beside the present ones, into
  a shadow: 2 bytes more (4 for float32 weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import _ops
from ..errors import ConfigError
from ..units import TensorLayout, Unit, align

MASTERS = ("split", "float32")
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
CODE_BLOCK = 256  # elements that share a scale
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NONE = torch.empty(0)


def flat_view(image: Tensor, layout: TensorLayout) -> Tensor:
    """The elements of a packed tensor in memory order, one-dimensional."""
    return image.narrow(0, layout.offset, layout.nbytes).view(layout.dtype)


@dataclass(eq=False)
class Slot:
    """One parameter's place: where its numbers stand, one-dimensional in the memory order of the weight."""

    host: nn.Parameter
    name: str
    unit: Unit
    layout: TensorLayout
    group: int
    seed: int
    index: int = -1  # in the counts; -1: it has no state yet
    low: Tensor | None = None  # int16, of a split master
    master: Tensor | None = None  # float32, beside a weight of less
    moments: list[Tensor] = field(default_factory=list)  # by the algorithm's names; empty tensors: not kept
    scales: list[Tensor] = field(default_factory=list)  # of eight-bit moments, in the same order

    def weight(self) -> Tensor:
        return self.unit.home(self.host)

    def shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.layout.size, self.layout.stride)

    def float32(self) -> Tensor:
        """A copy of the exact weight, in the parameter's shape."""
        if self.low is not None:
            joined = torch.empty(self.low.numel(), dtype=torch.float32)
            _ops.join_master(self.weight(), self.low, joined)
            return self.shaped(joined)
        return self.shaped((self.weight() if self.master is None else self.master).float().clone())

    def follow_weight(self) -> None:
        """The host weight was edited: the master is what now stands there."""
        if self.low is not None:
            self.low.zero_()
        if self.master is not None:
            self.master.copy_(self.weight())

    def take_master(self, given: Tensor) -> None:
        """Takes over a float32 master where it rounds to the present weight; elsewhere that was edited or loaded since,
        and stays."""
        shaped = torch.empty_strided(self.layout.size, self.layout.stride, dtype=torch.float32).copy_(given)
        exact = shaped.as_strided((shaped.numel(),), (1,)) if shaped.numel() else shaped.reshape(0)
        upper, low = (torch.empty(exact.numel(), dtype=d) for d in (torch.bfloat16, torch.int16))
        _ops.split_master(exact, upper, low)
        weight = self.weight()
        same = (upper if weight.dtype == torch.bfloat16 else exact.to(weight.dtype)) == weight
        if self.low is not None:
            self.low.copy_(torch.where(same, low, 0))
        if self.master is not None:
            self.master.copy_(torch.where(same, exact, weight.float()))


class CompactMemory:
    """All slots of one optimizer on one model. The caller's thread changes it while no step runs; steps read it."""

    def __init__(self, moments: Sequence[str], master: str, state_dtype: str, seed: int) -> None:
        self.names = tuple(moments)
        self.master = master
        self.state_dtype = STATE_DTYPES[state_dtype]
        self.stochastic = self.state_dtype == torch.bfloat16
        self.coded = self.state_dtype == torch.uint8
        self._seed = seed
        self.slots: dict[int, Slot] = {}  # by id of the host parameter
        self.counts = torch.zeros(0)  # steps taken, by Slot.index
        self.grad_norm: float | None = None
        self.measures = False  # whether calls measure their gradients on the devices: the last step wanted their norm
        self.wanted: list[list[bool]] = []  # by group: which moments it keeps now; it may have kept others before
        self.retired = False  # the model belongs to another optimizer now
        self.updates: dict[Any, Any] = {}  # UnitUpdate by what it is for; see find_update
        self._shadows: dict[int, tuple[tuple[int, ...], Tensor]] = {}

    @property
    def host_bytes(self) -> int:
        """Masters, moments and shadows."""
        kept = [t for s in self.slots.values() for t in (s.low, s.master, *s.moments, *s.scales) if t is not None]
        return sum(tensor.nbytes for tensor in kept) + self.shadow_bytes

    @property
    def shadow_bytes(self) -> int:
        """The second copy of the weights that asynchronous steps write."""
        return sum(shadow.nbytes for _, shadow in self._shadows.values())

    # -- slots ---------------------------------------------------------------------------------------------------
    def add(self, host: nn.Parameter, name: str, unit: Unit, layout: TensorLayout, group: int) -> None:
        if host.dtype not in _WEIGHT_DTYPES:
            raise ConfigError(
                f"parameter {name!r} has dtype {host.dtype}; a compact optimizer updates float32, bfloat16 and "
                "float16. Build the optimizer on the optimizer parameters instead: `with roundpipe.OptimizerCtx(): "
                "roundpipe.optim.AdamW(model.parameters(), ...)`."
            )
        seed = (self._seed * 1_000_003 + len(self.slots)) & 0x7FFFFFFFFFFFFFFF
        self.slots[id(host)] = Slot(host, name, unit, layout, group, seed)

    def of_unit(self, unit: Unit) -> list[Slot]:
        """The slots of a unit's trainable parameters, in order.

        Raises ConfigError when one of them belongs to no group.
        """
        found = []
        for index in unit.trainable:
            slot = self.slots.get(id(unit.parameters[index]))
            if slot is None:
                raise ConfigError(
                    f"parameter {unit.names[index]!r} requires grad but belongs to no group of the optimizer, so it "
                    "would never be trained. Add it (optimizer.add_param_group({'params': [parameter]})) or freeze it "
                    "(parameter.requires_grad_(False))."
                )
            found.append(slot)
        return found

    def ensure(self, units: Sequence[Unit], wanted: Sequence[Sequence[bool]]) -> list[Slot]:
        """Makes what is missing of the trainable parameters' state; gives the slots that changed.

        ``wanted``: for each group, which of the moments it keeps. Masters begin as the present host weights.
        """
        self.wanted = [list(row) for row in wanted]
        changed: dict[int, Slot] = {}
        for unit in units:
            slots = self.of_unit(unit)
            fresh = [slot for slot in slots if slot.index < 0]
            for slot in fresh:
                slot.moments = [NONE] * len(self.names)
                slot.scales = [NONE] * len(self.names)
            lows = [s for s in fresh if s.layout.dtype == torch.bfloat16 and self.master == "split"]
            masters = [s for s in fresh if s.layout.dtype != torch.float32 and s not in lows]
            for slot, low in zip(lows, _packed(lows, torch.int16), strict=True):
                slot.low = low
            for slot, master in zip(masters, _packed(masters, torch.float32), strict=True):
                slot.master = master.copy_(slot.weight())
            for position in range(len(self.names)):
                lacking = [s for s in slots if wanted[s.group][position] and s.moments[position] is NONE]
                for slot, moment in zip(lacking, _packed(lacking, self.state_dtype), strict=True):
                    slot.moments[position] = moment
                    changed[id(slot.host)] = slot
                if self.coded:  # a scale of zero makes every code zero
                    blocks = [-(-_elements(slot) // CODE_BLOCK) for slot in lacking]
                    for slot, scale in zip(lacking, _packed_sizes(blocks, torch.float32), strict=True):
                        slot.scales[position] = scale
            for slot in fresh:
                changed[id(slot.host)] = slot
        made = [slot for slot in changed.values() if slot.index < 0]
        if changed:
            self.updates.clear()
        if made:
            for offset, slot in enumerate(made):
                slot.index = self.counts.numel() + offset
            self.counts = torch.cat([self.counts, torch.zeros(len(made))])
            return [slot for slot in self.slots.values() if slot.index >= 0]  # their views of the counts are stale
        return list(changed.values())

    def state_of(self, slot: Slot) -> dict[str, Tensor]:
        """Views of everything that is kept for a parameter, in its shape, under the names of torch's classes."""
        state = {"step": self.counts[slot.index]}
        state |= {n: slot.shaped(m) for n, m in zip(self.names, slot.moments, strict=True) if m is not NONE}
        state |= {f"{n}_scale": s for n, s in zip(self.names, slot.scales, strict=True) if s is not NONE}
        if slot.low is not None:
            state["master_low"] = slot.shaped(slot.low)
        if slot.master is not None:
            state["master"] = slot.shaped(slot.master)
        return state

    def follow_edits(self, hosts: Sequence[nn.Parameter]) -> None:
        for host in hosts:
            slot = self.slots.get(id(host))
            if slot is not None and slot.index >= 0:
                slot.follow_weight()

    # -- the second copy of the weights ----------------------------------------------------------------------------
    def shadow(self, unit: Unit) -> Tensor:
        """Where an asynchronous step writes: packed as the unit's gradients are. Holds nothing of value before."""
        known = self._shadows.get(unit.key)
        if known is None or known[0] != tuple(unit.trainable):
            known = self._shadows[unit.key] = (
                tuple(unit.trainable),
                _ops.host_empty([unit.gradient_bytes], torch.uint8),
            )
        return known[1]

    def drop_shadows(self) -> None:
        self._shadows.clear()


def _packed(slots: Sequence[Slot], dtype: torch.dtype) -> list[Tensor]:
    """Zero-filled memory for each slot's elements, in one allocation."""
    return _packed_sizes([_elements(slot) for slot in slots], dtype)


def _elements(slot: Slot) -> int:
    return slot.layout.nbytes // slot.layout.dtype.itemsize


def _packed_sizes(elements: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    sizes = [count * dtype.itemsize for count in elements]
    total = sum(map(align, sizes))
    if not sizes:
        return []
    image = _ops.host_empty([total], torch.uint8)
    made, offset = [], 0
    for size in sizes:
        made.append(image.narrow(0, offset, size).view(dtype))
        offset += align(size)
    return made
