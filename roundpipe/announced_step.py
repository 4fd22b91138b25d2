"""A step that is announced with its call: each unit is updated as soon as its gradients are on the host.

Note [Announced steps]
  An ordinary step waits until its calls have ended well, so that a failure changes nothing. Announced, the update of a
  unit is queued when its gradients start down, behind a take and a publish ticket that were taken when the call was
  dispatched: so it runs beside the backward of lower layers, and the next forward finds it done. The price is that a
  failure after the first such update leaves weights of two steps (PartialStepError). Nothing may be asked of all
  gradients together, so there is no norm and no loss scale. Results are those of an exact step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch import Tensor

from . import _ops
from .engine import Engine
from .errors import ConfigError, PartialStepError, RoundPipeError
from .gradient_layout import refuse_frozen
from .interrupts import uninterrupted
from .optim.compact_update import Numbers, find_update
from .optimizer_thread import PUBLISH, TAKE, OptimizerTask
from .units import Unit
from .window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import Call
    from .optim.compact import CompactOptimizer
    from .optim.compact_memory import CompactMemory
    from .stage_job import StageJob
    from .training_state import TrainingState


class AnnouncedStep(OptimizerTask):
    """Made and given its tickets on the caller's thread; workers hand units over; it ends on the optimizer thread."""

    def __init__(self, engine: Engine, memory: CompactMemory, window: Window, numbers: Numbers) -> None:
        super().__init__(engine, window)
        self.memory = memory
        self._numbers = numbers
        self._lock = threading.Lock()  # covers everything below: several workers hand over, and the caller opens
        self._open = False  # the tickets are there
        self._downloads: dict[int, int] = {}  # by unit: how many jobs have not yet sent its gradients down
        self._tickets: dict[int, tuple[Unit, Tensor, list[int]]] = {}
        self._updating: list[tuple[Unit, int]] = []

    def take_tickets(self, call: Call, jobs: Sequence[StageJob]) -> None:
        """After all jobs of the call were opened: behind their uploads and downloads. Workers may be ahead of this."""
        with self._lock:
            for job in jobs:
                for unit in job.units if job.with_gradients else ():
                    if unit.gradient_bytes:
                        self._downloads[unit.key] = self._downloads.get(unit.key, 0) + 1
                        self._tickets[unit.key] = (unit, call.stores[unit.key], [])
            for unit, _, tickets in self._tickets.values():
                tickets += [_ops.ticket_issue(unit.handle, kind) for kind in (TAKE, PUBLISH)]
            self._open = True
            for key in [key for key, left in self._downloads.items() if left <= 0]:
                self._submit(key)

    def handed_over(self, unit: Unit) -> None:
        """One more job has sent the unit's gradients on their way to the host; worker's thread."""
        with self._lock:
            self._downloads[unit.key] = self._downloads.get(unit.key, 0) - 1
            if self._open and self._downloads[unit.key] == 0:
                self._submit(unit.key)

    def _submit(self, key: int) -> None:
        unit, image, tickets = self._tickets[key]
        assert self.window is not None
        touched = tuple(sorted(self.window.touched(unit)))
        if touched:
            unit.wait_saved()
            update = find_update(self.memory, unit, image, touched, is_async=False)
            number = update.submit(self.engine.handle, tickets, self._numbers, factor=1.0)
            self._updating.append((unit, number))
        else:
            number = _ops.update_fused(
                self.engine.handle, tickets, self._numbers.algorithm, [], [], [], [], [], [], [], [], [], [], 1.0
            )
            self._updating.append((unit, number))
        del self._tickets[key]

    def _work(self) -> None:
        well = self._calls_ended_well()
        updated, failure = [], None
        for unit, number in self._updating:
            try:
                _ops.wait(_ops.update_wait, self.engine.handle, number)
                updated.append(unit)
            except RoundPipeError as error:
                failure = failure or error
        if well and failure is None:
            assert self.window is not None
            for call in self.window.calls:
                if call.gradient_stats is not None:  # an earlier call of the window may have expected another step
                    call.gradient_stats.release()
            self.window = None
            return
        if not updated:
            self.cancelled = True  # nothing has changed: the window's earlier calls come back
            return
        self.cancelled = False
        assert self.window is not None
        cause = next((call.error for call in self.window.calls if call.error is not None), failure)
        layers = tuple(sorted({layer for unit in updated for layer in unit.layers}))
        partial = PartialStepError(
            f"a call failed after its announced step had updated layers {', '.join(map(str, layers))}: weights and "
            f"optimizer state are a mixture of two steps. Load the last checkpoint before training goes on. ({cause})",
            layers=layers,
        )
        raise partial from cause

    def _let_go(self) -> None:
        for _, _, tickets in self._tickets.values():
            for ticket in tickets:
                _ops.drop_quietly(_ops.ticket_finish, ticket, True)
        self._tickets.clear()


def announce(state: TrainingState, optimizer: CompactOptimizer) -> AnnouncedStep:
    """A step for the end of a call that is about to be made; see :func:`dispatched`. Follows ``state.prepare()``."""
    numbers = optimizer.numbers()
    if numbers.max_grad_norm is not None:
        raise ConfigError(
            "forward_backward(step=...) updates layers before all gradients are there, so there is no global norm: "
            "set optimizer.max_grad_norm = None, or call model.step(optimizer) after forward_backward."
        )
    refuse_frozen(state)
    optimizer.ensure_state(state.drain)
    state.publish_shadows()  # this call, too, computes with the newest weights
    optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look at
    return AnnouncedStep(state.open_engine(), optimizer._memory, state.window, numbers)


def dispatched(state: TrainingState, step: AnnouncedStep, call: Call) -> None:
    """The call was dispatched, or not: if so, its step has taken the window."""
    with uninterrupted():
        if call in state.window.calls:
            state.generation += 1
            state.window = Window()
            state._submit(step)
