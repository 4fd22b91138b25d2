"""The optimizer thread: runs steps one after the other beside the devices."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import _ops, spans
from .engine import Engine, Watchdog, at_engine_exit, end_thread
from .errors import RoundPipeError, StageError
from .interrupts import uninterrupted
from .optimizer_context import OptimizerCtx

if TYPE_CHECKING:
    from .optimizer_params import OptimizerParameters
    from .units import Unit
    from .window import Window


class OptimizerThread:
    """One for the process: step functions of different models may share an optimizer. Started on first use."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()  # covers starting the thread once
        self.failed_steps = 0  # that did not run to their end; written by the thread alone

    def submit(self, task: Callable[[], None]) -> None:
        with self._start_lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._loop, name="roundpipe-optimizer", daemon=True)
                self._thread.start()
        self._queue.put(task)

    def _loop(self) -> None:
        with OptimizerCtx():
            while True:
                task = self._queue.get()
                if task is None:
                    return
                task()
                del task

    def stop(self, deadline: float) -> None:
        """At exit: drops what has not begun, and waits for the present step until ``deadline`` (monotonic seconds)."""
        with self._start_lock:
            if self._thread is None or not self._thread.is_alive():
                return
            with contextlib.suppress(queue.Empty):
                while True:
                    self._queue.get_nowait()
            self._queue.put(None)
        end_thread(self._thread, deadline)

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


thread = OptimizerThread()
at_engine_exit.append(thread.stop)


class OptimizerTask:
    """A step, or only the publishing of an earlier one. Dispatched with its tickets on the caller's thread; runs on
    the optimizer thread and ends by itself.

    ``cancelled``: a call of ``window`` failed, so the step did not happen; ``error``: the step itself failed.
    """

    def __init__(self, engine: Engine, window: Window | None) -> None:
        self.engine = engine
        self.window = window
        self.error: BaseException | None = None
        self.cancelled = False
        self.ended = threading.Event()
        engine.steps_in_flight.add(self)

    def run(self) -> None:
        try:
            with spans.span("job", "optimizer step"):
                self._work()
        except BaseException as error:  # noqa: BLE001 (reaches the caller through `error`)
            self.error = error
        finally:
            self._let_go()
            thread.failed_steps += self.error is not None or self.cancelled
            self.engine.progress += 1
            self.ended.set()

    def _work(self) -> None:
        raise NotImplementedError

    def _let_go(self) -> None:
        """Poisons the tickets that nobody used."""
        raise NotImplementedError

    def _calls_ended_well(self) -> bool:
        """Blocks until the calls of the window have ended; False, and cancelled, if one failed."""
        assert self.window is not None
        for call in self.window.calls:
            call.wait_jobs()
        self.cancelled = any(call.error is not None for call in self.window.calls)
        return not self.cancelled

    def wait(self) -> None:
        """Blocks until it has ended. Does not raise for a failure of the step: look at ``error``."""
        if thread.is_current():
            raise RoundPipeError(
                "a step function waited for its own model (synchronize, state_dict, a synchronous step); do that after "
                "model.step() on the main thread."
            )
        watchdog = Watchdog(self.engine, "the optimizer thread")
        while not self._ended_within_slice():
            watchdog()

    def wait_ended(self) -> None:
        self.wait()

    def _ended_within_slice(self) -> bool:
        with uninterrupted():  # Ctrl-C inside Event.wait could leave the event's lock taken
            return self.ended.wait(timeout=0.1)


class StepTask(OptimizerTask):
    """A step by the caller's own function.

    In order: ``publish_first`` writes what earlier steps left in the optimizer's parameters; then the window's
    gradients are taken and ``function`` runs; then ``publish_last``.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: OptimizerParameters,
        units: list[Unit],
        window: Window | None,
        function: Callable[[], Any] | None,
        *,
        publish_first: bool,
        publish_last: bool,
    ) -> None:
        super().__init__(engine, window)
        self.parameters = parameters
        self.function = function
        trainable = [unit for unit in units if unit.trainable]
        self._first = [(u, _ops.ticket_issue(u.handle, PUBLISH)) for u in trainable] if publish_first else []
        self._takes: list[tuple[Unit, Any, int]] = []
        if window is not None:
            # Gradients arrive from the last layer to the first.
            for unit in reversed(trainable):
                image = window.image(unit)
                if image is not None:
                    self._takes.append((unit, image, _ops.ticket_issue(unit.handle, TAKE)))
        self._last = [(u, _ops.ticket_issue(u.handle, PUBLISH)) for u in trainable] if publish_last else []

    def _work(self) -> None:
        self._publish(self._first)
        self._first = []
        self._take_and_step()
        self._publish(self._last)
        self._last = []

    def _let_go(self) -> None:
        for _, ticket in self._first + self._last:
            _ops.drop_quietly(_ops.ticket_finish, ticket, True)
        for _, _, ticket in self._takes:
            _ops.drop_quietly(_ops.ticket_finish, ticket, True)
        self.function = None

    def _publish(self, tickets: list[tuple[Unit, int]]) -> None:
        conversions = []
        for unit, ticket in tickets:
            unit.wait_saved()
            conversions.append(self.parameters.publish(self.engine, unit, ticket))
        for conversion in conversions:
            conversion.wait()

    def _take_and_step(self) -> None:
        if self.window is None:
            return
        takes, self._takes = self._takes, []
        taken = [(unit, self.parameters.take(self.engine, unit, image, ticket)) for unit, image, ticket in takes]
        poisoned = False
        for _, one in taken:
            try:
                one.wait()
            except _ops.Poisoned:
                poisoned = True
        if not self._calls_ended_well() or poisoned:
            self.cancelled = True
            return
        for unit, one in taken:
            one.assign(self.window.touched(unit))
        taken.clear()
        if self.function is None:
            return
        self.parameters.wait_saved()
        try:
            with spans.span("update", "step function"):
                self.function()
        except Exception as error:
            located = StageError(error, phase="step")
            located.__cause__ = error
            raise located from error


PUBLISH, TAKE = 1, 4  # TicketKind of the core
