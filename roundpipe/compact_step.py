"""Steps of compact optimizers: one queued update a unit, ordered by tickets, not by anybody's waiting.

Note [Compact steps]
  Exact: once the window's calls have ended well, each unit is updated in place, front to back, under a take of its
  gradients and a publish of its weights. The next upload of a unit waits for its own update only, so updates run beside
  the next forward, and ``step`` does not block.
  Asynchronous: the update reads the present weights and writes new ones into a shadow. The next step, when it is
  dispatched, takes publish tickets behind all uploads of the iteration in between, and copies the shadow into place
  before its own update. So every iteration computes with weights one step old, forward and backward with the same.
  At the time of an update the weight image holds the newest weights in either mode, so modes may alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from . import _ops
from .engine import Engine
from .errors import PartialStepError, RoundPipeError
from .optim.compact_memory import flat_view
from .optim.compact_update import Numbers, SquareSum, find_norm, find_update
from .optimizer_thread import PUBLISH, TAKE, OptimizerTask
from .units import Unit

if TYPE_CHECKING:
    from .grad_scaler import Scaling
    from .gradient_stats import GradientStats
    from .optim.compact_memory import CompactMemory
    from .window import Window

Shadowed = dict[int, tuple[Unit, set[int]]]  # by unit: trainable positions whose newest weights are in the shadow


class Shadows:
    """What an asynchronous step wrote, and the next one copies into place."""

    def __init__(self, shadowed: Shadowed) -> None:
        self.shadowed = shadowed

    def forget(self, hosts: set[int]) -> None:
        """Parameters (by id) that the caller has edited since: his values stay."""
        for unit, positions in self.shadowed.values():
            positions -= {i for i, parameter in enumerate(unit.trainable_parameters) if id(parameter) in hosts}


class CompactStep(OptimizerTask, Shadows):
    """One step, or (without a window) only the copying of what ``previous``, the asynchronous step before, wrote."""

    def __init__(
        self,
        engine: Engine,
        memory: CompactMemory,
        units: Sequence[Unit],
        window: Window | None,
        numbers: Numbers | None,
        *,
        is_async: bool,
        previous: Shadows | None,
        scaling: Scaling | None = None,
    ) -> None:
        OptimizerTask.__init__(self, engine, window)
        Shadows.__init__(self, {})
        self.memory = memory
        self.is_async = is_async
        self._numbers = numbers
        self._previous = previous
        self._scaling = scaling
        self.wants_norm = scaling is not None or (numbers is not None and numbers.max_grad_norm is not None)
        self._measured: list[tuple[Unit, GradientStats]] = []  # on the devices, before the gradients came down
        # Handles of tickets, in the order of the calls that they belong to; each list loses what was queued.
        self._copies: list[tuple[Unit, int]] = []
        self._norms: list[tuple[Unit, Tensor, int]] = []
        self._updates: list[tuple[Unit, Tensor, list[int]]] = []
        # Numbers of queued updates.
        self._copying: list[tuple[Unit, int]] = []
        self._measuring: list[tuple[SquareSum, int]] = []
        self._updating: list[tuple[Unit, int]] = []
        for unit in units:
            if not unit.trainable:
                continue
            if previous is not None:
                self._copies.append((unit, _ops.ticket_issue(unit.handle, PUBLISH)))
            image = None if window is None else window.image(unit)
            if image is None:
                continue
            if self.wants_norm and window is not None:
                if (stats := window.stats(unit)) is not None:
                    self._measured.append((unit, stats))
                else:
                    self._norms.append((unit, image, _ops.ticket_issue(unit.handle, TAKE)))
            kinds = (TAKE,) if is_async else (TAKE, PUBLISH)
            self._updates.append((unit, image, [_ops.ticket_issue(unit.handle, kind) for kind in kinds]))

    def _work(self) -> None:
        try:
            self._copy_and_measure()
            if self.window is not None and self._calls_ended_well():
                self._update(self._factor())
        finally:
            failure = self._wait_queued()
        if failure is not None and not self.cancelled:
            raise failure

    def _let_go(self) -> None:
        tickets = (
            [t for _, t in self._copies] + [t for _, _, t in self._norms] + [t for u in self._updates for t in u[2]]
        )
        for ticket in tickets:
            _ops.drop_quietly(_ops.ticket_finish, ticket, True)
        self._measured.clear()
        if self.error is None and not self.cancelled:
            for call in self.window.calls if self.window is not None else ():
                if call.gradient_stats is not None:
                    call.gradient_stats.release()
            self.window = None  # it holds gradients, and this task may be remembered for its shadows

    @property
    def uncopied(self) -> Shadows | None:
        """What this step should have copied into place and could not; the step has ended."""
        return self._previous

    # -- in order --------------------------------------------------------------------------------------------------
    def _copy_and_measure(self) -> None:
        """Queues the copies out of the shadows, and the norms, both from the last layers to the first: so backward
        reads its weights for the last time, and so gradients arrive."""
        handle = self.engine.handle
        shadowed = {} if self._previous is None else self._previous.shadowed
        units = {unit.key: unit for unit, _ in self._copies} | {unit.key: unit for unit, _, _ in self._norms}
        for key in sorted(units, reverse=True):
            unit = units[key]
            if self._copies and self._copies[-1][0] is unit:
                positions = shadowed[key][1] if key in shadowed else set()
                unit.wait_saved()
                sources, targets = self._pairs(unit, positions)
                number = _ops.update_convert(handle, self._copies[-1][1], sources, targets, [0] * len(targets))
                self._copies.pop()
                self._copying.append((unit, number))
            if self._norms and self._norms[-1][0] is unit:
                _, image, ticket = self._norms[-1]
                one = find_norm(self.memory, unit, image)
                number = one.submit(handle, ticket)
                self._norms.pop()
                self._measuring.append((one, number))

    def _pairs(self, unit: Unit, positions: set[int]) -> tuple[list[Tensor], list[Tensor]]:
        if not positions:
            return [], []
        shadow = self.memory.shadow(unit)
        if len(positions) == len(unit.parameters) and unit.is_packed:  # alike: one copy
            return [shadow], [unit.image]
        ordered = sorted(positions)
        return (
            [flat_view(shadow, unit.gradient_layouts[i]) for i in ordered],
            [unit.homes[unit.trainable[i]] for i in ordered],
        )

    def _factor(self) -> float | None:
        """What multiplies every gradient; None: the step is skipped and changes nothing."""
        assert self._numbers is not None
        limit = self._numbers.max_grad_norm
        if not self.wants_norm:
            return 1.0
        squares = sum(stats.square_sum(unit) for unit, stats in self._measured)
        for one, number in self._measuring:
            _ops.wait(_ops.update_wait, self.engine.handle, number)
            squares += one.value()
        unscale = 1.0 if self._scaling is None else self._scaling.inverse()
        norm = math.sqrt(squares) * unscale
        self.memory.grad_norm = norm
        if self._scaling is not None:
            self._scaling.found(non_finite=not math.isfinite(norm))
            if not math.isfinite(norm):
                return None
        if self._numbers.error_if_nonfinite and not math.isfinite(norm):
            self._update(None)
            raise RoundPipeError(
                f"the norm of all gradients is {norm}, and the optimizer was made with error_if_nonfinite=True: the "
                "step was not taken and its gradients were dropped. Weights and optimizer state are as before."
            )
        # As torch.nn.utils.clip_grad_norm_: with its 1e-6, and a norm that is NaN makes every gradient NaN.
        clip = 1.0 if limit is None else limit / (norm + 1e-6)
        return unscale * (1.0 if clip >= 1.0 else clip)

    def _update(self, factor: float | None) -> None:
        """Queues the updates. Without a factor only their tickets pass, and nothing is poisoned."""
        assert self.window is not None and self._numbers is not None
        # Queued in the order in which the next iteration waits for them: an exact step's weights from the first layer
        # on, in its forward; an asynchronous one's gradients, which its backward writes again, from the last layer on.
        # There a tied embedding comes first: the head's gradients would wait for it, and all others behind them.
        if self.is_async:
            self._updates.sort(key=lambda update: update[0].layers[-1])
        else:
            self._updates.sort(key=lambda update: -update[0].layers[0])
        while self._updates:  # from the end
            unit, image, tickets = self._updates[-1]
            touched = tuple(sorted(self.window.touched(unit))) if factor is not None else ()
            if factor is not None and touched:
                unit.wait_saved()
                update = find_update(self.memory, unit, image, touched, self.is_async)
                number = update.submit(self.engine.handle, tickets, self._numbers, factor)
                if self.is_async:
                    self.shadowed[unit.key] = (unit, set(touched))
            else:
                number = _ops.update_fused(
                    self.engine.handle, tickets, self._numbers.algorithm, [], [], [], [], [], [], [], [], [], [], 1.0
                )
            self._updates.pop()
            self._updating.append((unit, number))

    # -- ending ----------------------------------------------------------------------------------------------------
    def _wait_queued(self) -> RoundPipeError | None:
        """Blocks until everything queued has ended, and gives the failure that counts."""
        copies, _ = self._wait_each(self._copying)
        if copies is None and not self._copies:
            self._previous = None
        norms, _ = self._wait_each(self._measuring)
        updates, ended = self._wait_each(self._updating)
        failure = updates or norms or copies
        if updates is None or not ended:
            return failure
        for unit in self.shadowed.keys() - {unit.key for unit in ended}:
            del self.shadowed[unit]
        layers = tuple(sorted({layer for unit in ended for layer in unit.layers}))
        partial = PartialStepError(
            f"a step failed after it had updated layers {', '.join(map(str, layers))}: weights and optimizer state are "
            f"a mixture of two steps. Load the last checkpoint. ({failure})",
            layers=layers,
        )
        partial.__cause__ = failure
        return partial

    def _wait_each(self, queued: list[tuple[Any, int]]) -> tuple[RoundPipeError | None, list[Any]]:
        failure: RoundPipeError | None = None
        ended = []
        for what, number in queued:
            try:
                _ops.wait(_ops.update_wait, self.engine.handle, number)
                ended.append(what)
            except RoundPipeError as error:
                failure = failure or error
        return failure, ended
