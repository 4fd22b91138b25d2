"""The lists that one queued update of a unit takes; made once, so that a step touches no tensor in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _ops
from ..units import Unit
from .compact_memory import NONE as _NONE
from .compact_memory import CompactMemory, flat_view


@dataclass(frozen=True)
class Numbers:
    """A snapshot of every hyperparameter, taken on the caller's thread when ``step`` is called."""

    algorithm: str
    options: list[float]  # group after group, as update_fused takes them
    counts_steps: list[bool]  # by group: whether this step is counted
    max_grad_norm: float | None
    error_if_nonfinite: bool


class UnitUpdate:
    """One unit's parameters at ``positions`` (of its trainable ones) with the gradients in ``image``; without one, in a
    place that is found later.

    Exact: weights in place. Asynchronous: read in the weight image, written into the shadow.
    """

    def __init__(
        self, memory: CompactMemory, unit: Unit, image: Tensor | None, positions: Sequence[int], is_async: bool
    ) -> None:
        self.image = image
        self.packing = unit.gradient_layouts  # another list when the unit was packed anew
        self._counts = memory.counts  # not the memory, which keeps this
        self.masters: list[Tensor] = []
        self.sources: list[Tensor] = []
        self.published: list[Tensor] = []
        of_unit = memory.of_unit(unit)
        slots = [of_unit[i] for i in positions]
        shadow = memory.shadow(unit) if is_async else None
        for position, slot in zip(positions, slots, strict=True):
            weight = slot.weight()
            target = weight if shadow is None else flat_view(shadow, unit.gradient_layouts[position])
            master = slot.low if slot.low is not None else slot.master
            self.masters.append(target if master is None else master)
            self.sources.append(weight if slot.master is None else slot.master)
            self.published.append(target)
        layouts = [unit.gradient_layouts[i] for i in positions]
        # Weights are of the same dtypes and sizes.
        self.gradients = self.published if image is None else [flat_view(image, layout) for layout in layouts]
        self.offsets = [layout.offset for layout in layouts] if image is None else []
        kept = [[m if memory.wanted[s.group][k] else _NONE for k, m in enumerate(s.moments)] for s in slots]
        used = [k for k in range(len(memory.names)) if any(moments[k] is not _NONE for moments in kept)]
        self.moments = [moments[k] for k in range(max(used, default=-1) + 1) for moments in kept]
        self.scales = [slot.scales[k] for k in range(max(used, default=-1) + 1) for slot in slots if memory.coded]
        self.groups = [slot.group for slot in slots]
        self.seeds = [slot.seed for slot in slots] if memory.stochastic else []
        self._indices = torch.tensor([slot.index for slot in slots], dtype=torch.int64)

    def submit(self, engine: int, tickets: Sequence[int], numbers: Numbers, factor: float) -> int:
        """Queues it; optimizer thread, in the order of steps. Gives the update's number."""
        return _ops.update_fused(
            engine, tickets, numbers.algorithm, self.masters, self.sources, self.published, self.gradients,
            self.moments, self.scales, self._steps(numbers), self.seeds, self.groups, numbers.options, factor,
        )  # fmt: skip

    def submit_behind(self, place: tuple[int, int], tickets: Sequence[int], numbers: Numbers) -> int:
        """Sends the gradients of unit ``place[1]`` of job ``place[0]`` down, and queues it when they are there."""
        try:
            return _ops.job_gradients_update(
                *place, tickets, numbers.algorithm, self.masters, self.sources, self.published, self.gradients,
                self.offsets, self.moments, self.scales, self._steps(numbers), self.seeds, self.groups,
                numbers.options, 1.0,
            )  # fmt: skip
        except BaseException:
            self.uncount(numbers)
            raise

    def _steps(self, numbers: Numbers) -> list[float]:
        """This step is counted."""
        steps: list[float] = self._count(numbers, 1.0).clamp_(min=1).tolist()
        return steps

    def _count(self, numbers: Numbers, by: float) -> Tensor:
        if all(numbers.counts_steps):
            self._counts[self._indices] += by
        else:
            self._counts[self._indices] += torch.tensor([by * numbers.counts_steps[g] for g in self.groups])
        return self._counts[self._indices]

    def uncount(self, numbers: Numbers) -> None:
        """The step did not happen."""
        self._count(numbers, -1.0)


def pass_tickets_behind(place: tuple[int, int], tickets: Sequence[int], numbers: Numbers) -> int:
    """As ``submit_behind`` for a unit without any gradient: nothing but its tickets passes."""
    return _ops.job_gradients_update(
        *place, tickets, numbers.algorithm, [], [], [], [], [], [], [], [], [], [], [], 1.0
    )


def find_update(
    memory: CompactMemory, unit: Unit, image: Tensor | None, positions: tuple[int, ...], is_async: bool
) -> UnitUpdate:
    """The update of these parameters from this image, made on first use; optimizer thread, or an announced step's."""
    key = (unit.key, 0 if image is None else image.data_ptr(), positions, is_async)
    found = memory.updates.get(key)
    if found is None or found.image is not image or found.packing is not unit.gradient_layouts:
        if len(memory.updates) > 16 * len(memory.slots):  # parameters that now have a gradient and now have none
            memory.updates.clear()
        found = memory.updates[key] = UnitUpdate(memory, unit, image, positions, is_async)
    return found


def forget_images(memory: CompactMemory, units: Sequence[Unit]) -> None:
    """Updates and norms from gradient images that these units have given up would keep them."""
    bare = {unit.key for unit in units if unit.host_gradient_bytes == 0}
    for key, found in list(memory.updates.items()):
        if key[0] in bare and found.image is not None:
            memory.updates.pop(key, None)


class SquareSum:
    """The sum of squares of a unit's gradients in ``image``."""

    def __init__(self, unit: Unit, image: Tensor) -> None:
        self.image = image
        self._gradients = [flat_view(image, layout) for layout in unit.gradient_layouts]
        elements = sum(-(-gradient.numel() // _ALIGNMENT) * _ALIGNMENT for gradient in self._gradients)
        # Not torch's memory: that may have been a tensor of a simulated device, which the race checker remembers.
        self._sums = _ops.host_empty([-(-elements // _CHUNK)], torch.float64)

    def submit(self, engine: int, ticket: int) -> int:
        return _ops.update_square_sum(engine, [ticket], self._gradients, self._sums)

    def value(self) -> float:
        return float(self._sums.sum())


def find_norm(memory: CompactMemory, unit: Unit, image: Tensor) -> SquareSum:
    """The sum of squares of this image, made on first use; optimizer thread."""
    key = (unit.key, image.data_ptr())
    found = memory.updates.get(key)
    if found is None or found.image is not image:
        found = memory.updates[key] = SquareSum(unit, image)
    return found


_ALIGNMENT, _CHUNK = 256, 1 << 16  # elements: how update_square_sum lays tensors end to end and cuts them
