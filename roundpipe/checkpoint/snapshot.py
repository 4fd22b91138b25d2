"""What of a model and its optimizer belongs into a checkpoint, in groups that wait for the writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..training_state import TrainingState
from .job import Entry, Group, Hold
from .names import ModelNames

if TYPE_CHECKING:
    from ..units import Unit

# Kinds of files.
KINDS = WEIGHTS, PREVIOUS, OPTIMIZER = "model", "previous", "optimizer"
_COPIED_BYTES = 1 << 24  # the largest buffer that is copied; larger ones are no statistics, and nobody changes them


@dataclass
class Snapshot:
    """Note [Weights of an asynchronous step]
    After an asynchronous step the host weights are those from before it, with which the next iteration computes. The
    newest ones stand in the optimizer's copy or in the shadow. Both are saved: the newest as the model, the others as
    "previous", which only a resumed run needs. So saving publishes nothing, and training goes on as if nothing had been
    saved.
    """

    groups: dict[int, Group] = field(default_factory=dict)  # by unit key; -1: a step function's optimizer, 0: the rest

    def add(self, kind: str, entry: Entry, key: int = 0) -> None:
        self.groups.setdefault(key, Group(Hold())).entries.append((kind, entry))

    def entries(self, kind: str) -> list[Entry]:
        return [entry for group in self.groups.values() for of_kind, entry in group.entries if of_kind == kind]

    def hold_back(self, state: TrainingState) -> None:
        """From now on whoever overwrites a group waits for it."""
        for unit in state.units:
            if unit.key in self.groups:
                unit.hold = self.groups[unit.key].hold
        if -1 in self.groups:
            state.optimizer.hold = self.groups[-1].hold

    def ordered(self) -> list[Group]:
        """Units first: their weights are what the next step overwrites first."""
        return [self.groups[key] for key in sorted(self.groups, key=lambda key: (key <= 0, key))]


STEP_FUNCTION = -1


def settle(state: TrainingState) -> None:
    """Blocks until nothing is under way, a save neither; publishes nothing. Raises what failed meanwhile."""
    state.raise_failures()
    state.drain()
    state.wait_saved()
    state.raise_failures()
    state.adopt_edits()


def unit_of_parameters(state: TrainingState) -> dict[int, Unit]:
    """By id of the parameter."""
    return {id(parameter): unit for unit in state.units for parameter in unit.parameters}


def add_weights(snapshot: Snapshot, state: TrainingState, names: ModelNames, trainable_only: bool) -> None:
    """Nothing is under way."""
    units = unit_of_parameters(state)
    newer = _pending(state)
    for name, parameter in names.parameters.items():
        if trainable_only and not parameter.requires_grad:
            continue
        unit = units.get(id(parameter))
        key = 0 if unit is None else unit.key
        present = parameter.detach()
        if id(parameter) in newer:
            source, source_key = newer[id(parameter)]
            snapshot.add(WEIGHTS, Entry(name, source, parameter.dtype), key if source_key is None else source_key)
            snapshot.add(PREVIOUS, Entry(name, present, parameter.dtype), key)
        else:
            snapshot.add(WEIGHTS, Entry(name, present, parameter.dtype), key)
    for name, tensor in (names.buffers | names.derived).items():
        small = tensor.numel() * tensor.element_size() <= _COPIED_BYTES or name in names.derived
        value = tensor.detach().clone() if small else tensor.detach()
        snapshot.add(WEIGHTS, Entry(name, value, tensor.dtype))


def _pending(state: TrainingState) -> dict[int, tuple[torch.Tensor, int | None]]:
    """Where newer weights than the host's stand, by id of the parameter, and in which group (None: the unit's)."""
    found: dict[int, tuple[torch.Tensor, int | None]] = {}
    if state._unpublished:
        for unit in state.units:
            for parameter in unit.trainable_parameters:
                own = state.optimizer.get(parameter)
                if own is not None:
                    found[id(parameter)] = own.detach(), STEP_FUNCTION
    if state.compact.pending is not None:
        memory, shadows = state.compact.pending
        for unit, positions in shadows.shadowed.values():
            image = memory.shadow(unit)
            for position in positions:
                view = unit.gradient_layouts[position].view(image)
                found[id(unit.trainable_parameters[position])] = view, None
    return found
