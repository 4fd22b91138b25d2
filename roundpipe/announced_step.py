"""A step that is announced with its call: each unit is updated as soon as its gradients are on the host.

Note [Announced steps]
  An ordinary step waits until its calls have ended well, so that a failure changes nothing. Announced, the update of a
  unit is queued when its gradients have come down, behind a take and a publish ticket that were taken when the last job
  that writes them was dispatched: so it runs beside the backward of lower layers, and the next forward finds it done.
  The price is that a failure after the first such update leaves weights of two steps (PartialStepError). One after the
  last (a loss that does not come down, a merge function that raises) leaves a step whose call has failed, and is told
  in the same way. Nothing may be asked of all gradients together, so there is no norm and no loss scale. Results are
  those of an exact step, and most gradients need no image (Note [Gradients in passing]).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from . import _ops
from .engine import Engine
from .errors import ConfigError, PartialStepError, RoundPipeError
from .gradient_layout import refuse_frozen
from .interrupts import uninterrupted
from .optim.compact_update import Numbers, UnitUpdate, find_update, forget_images, pass_tickets_behind
from .optimizer_thread import PUBLISH, TAKE, OptimizerTask
from .units import Unit
from .window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call import Call
    from .gradient_pool import GradientPool
    from .optim.compact import CompactOptimizer
    from .optim.compact_memory import CompactMemory
    from .stage_job import StageJob
    from .training_state import TrainingState


class AnnouncedStep(OptimizerTask):
    """Made and given its tickets on the caller's thread; workers hand units over; it ends on the optimizer thread."""

    def __init__(
        self, engine: Engine, memory: CompactMemory, window: Window, numbers: Numbers, pool: GradientPool
    ) -> None:
        super().__init__(engine, window)
        self.memory = memory
        self.pool = pool
        self._numbers = numbers
        self._writers: dict[int, list[StageJob]] = {}  # by unit: the jobs that write its gradients, in order
        self._lock = threading.Lock()  # covers what is below: several workers hand over
        self._tickets: dict[int, list[int]] = {}  # by unit; not in an update yet
        self._updating: list[tuple[Unit, UnitUpdate | None, int]] = []
        self._updated: list[Unit] = []  # once it has ended: whose weights and state are this step's

    # -- caller's thread, before and while the call's jobs are opened ----------------------------------------------
    def plan(self, jobs: Sequence[StageJob]) -> None:
        """Which units need no image, and room for them."""
        assert self.window is not None
        units: dict[int, Unit] = {}
        for job in jobs:
            for unit in job.units if job.with_gradients else ():
                if unit.gradient_bytes:
                    units[unit.key] = unit
                    self._writers.setdefault(unit.key, []).append(job)
        passing = [unit for unit in units.values() if self.passes(unit)]
        self.pool.ensure(self.engine, [unit.gradient_bytes for unit in passing])
        for unit in passing:
            if self.window.image(unit) is None:
                unit.do_without_image()

    def passes(self, unit: Unit) -> bool:
        """Whether its gradients go through the pool."""
        return len(self._writers[unit.key]) == 1

    def take_tickets(self, job: StageJob) -> None:
        """The job was opened and does not run yet: behind the uploads and downloads of all units that it is the last to
        write."""
        for unit in job.units if job.with_gradients else ():
            if unit.gradient_bytes and self._writers[unit.key][-1] is job:
                self._tickets[unit.key] = [_ops.ticket_issue(unit.handle, kind) for kind in (TAKE, PUBLISH)]

    # -- workers -----------------------------------------------------------------------------------------------------
    def hand_over(self, job: StageJob, unit: Unit) -> bool:
        """Sends the unit's gradients down with their update behind them, if this is the last job that writes them."""
        if self._writers[unit.key][-1] is not job:
            return False
        assert self.window is not None
        image = None if self.passes(unit) else job.call.stores[unit.key]
        touched = tuple(sorted(self.window.touched(unit)))
        if touched:
            unit.wait_saved()
        with self._lock:
            update = find_update(self.memory, unit, image, touched, is_async=False) if touched else None
            place, tickets = (job.handle, job.index[unit.key]), self._tickets[unit.key]
            if update is not None:
                number = update.submit_behind(place, tickets, self._numbers)
            else:
                number = pass_tickets_behind(place, tickets, self._numbers)
            del self._tickets[unit.key]
            self._updating.append((unit, update, number))
        return True

    # -- optimizer thread ----------------------------------------------------------------------------------------------
    def _work(self) -> None:
        well = self._calls_ended_well()
        failure = None
        for unit, update, number in self._updating:
            try:
                _ops.wait(_ops.update_wait, self.engine.handle, number)
                self._updated.append(unit)
            except RoundPipeError as error:
                failure = failure or error
                if update is not None:
                    update.uncount(self._numbers)
        if well and failure is None:
            assert self.window is not None
            for call in self.window.calls:
                if call.gradient_stats is not None:  # an earlier call of the window may have expected another step
                    call.gradient_stats.release()
            self.window = None
            forget_images(self.memory, [unit for unit, _, _ in self._updating])
            return
        if not self._updated:
            self.cancelled = True  # nothing has changed: the window's earlier calls come back
            return
        self.cancelled = False
        assert self.window is not None
        cause = next((call.error for call in self.window.calls if call.error is not None), failure)
        raise self._partial(cause) from cause

    def _partial(self, cause: BaseException | None) -> PartialStepError:
        layers = tuple(sorted({layer for unit in self._updated for layer in unit.layers}))
        return PartialStepError(
            f"a call failed after its announced step had updated layers {', '.join(map(str, layers))}: weights and "
            f"optimizer state are not those of before the call. Load the last checkpoint before training goes on. "
            f"({cause})",
            layers=layers,
        )

    def outlived(self, failure: BaseException) -> PartialStepError | None:
        """What to tell of a call that failed after this step, which has ended, went well; None: it changed nothing."""
        if not self._updated:
            return None
        error = self._partial(failure)
        error.__cause__ = failure
        return error

    def _let_go(self) -> None:
        for tickets in self._tickets.values():
            for ticket in tickets:
                _ops.drop_quietly(_ops.ticket_finish, ticket, True)
        self._tickets.clear()
        self._writers.clear()  # the jobs refer to their call


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
    return AnnouncedStep(state.open_engine(), optimizer._memory, state.window, numbers, state.gradient_pool)


def dispatched(state: TrainingState, step: AnnouncedStep, call: Call) -> None:
    """The call was dispatched, or not: if so, its step has taken the window."""
    with uninterrupted():
        if call in state.window.calls:
            state.generation += 1
            state.window = Window()
            state._submit(step)
