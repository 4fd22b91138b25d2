"""What a wrapped model keeps between calls: units, gradients of the window, steps under way, failures not yet told."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _ops
from . import engine as engines
from .announced_step import AnnouncedStep
from .buffers import HostBuffers, undo_all
from .call import Call
from .call_site import caller_level
from .compact_step import CompactStep
from .compact_training import CompactTraining
from .devices import devices
from .engine import Engine
from .errors import ConfigError, DeviceOutOfMemory, PartialStepError
from .gradient_layout import include_frozen, relayout
from .gradient_pool import GradientPool
from .host_gradients import adopt_shown_gradients, fold_host_gradients, show_gradients
from .host_placement import Placement
from .interrupts import uninterrupted
from .layer_call import LayerFacts
from .measurements import Measurements
from .optimizer_params import OptimizerParameters
from .optimizer_thread import OptimizerTask, StepTask
from .optimizer_thread import thread as optimizer_thread
from .plan import LayerCost
from .plan_keeper import PlanKeeper
from .steps_by_hand import watched
from .structure import Structure
from .units import Unit, build_units
from .window import Window

if TYPE_CHECKING:
    from .checkpoint.job import SaveHandle
    from .grad_scaler import GradScaler
    from .optim.compact import CompactOptimizer
    from .optim.compact_memory import CompactMemory
    from .run_config import ResolvedConfig


logger = logging.getLogger(__name__)


class TrainingState:
    """Used under the model's lock only.

    Note [Published and pending steps]
      An asynchronous step leaves its result in the optimizer's parameters; host weights get it when the next step is
      dispatched (or anyone asks for the newest weights), after all uploads of the iteration in between. That is the
      staleness of exactly one step.
    """

    def __init__(
        self, layers: list[nn.Module], optim_dtype: torch.dtype | None, engine: Engine, placement: Placement
    ) -> None:
        self.layers = layers
        self.placement = placement
        self.units, self.units_of = build_units(layers, placement)
        self.structure = Structure(layers)
        self.host_buffers = HostBuffers(layers)
        self.facts = [LayerFacts() for _ in layers]
        self.loss_facts = LayerFacts()
        self.optimizer = OptimizerParameters(self.units, optim_dtype)
        self.compact = CompactTraining()
        self.gradient_pool = GradientPool()
        self.window = Window()
        self.engine: Engine | None = None
        self._calls: list[Call] = []  # not known to have ended well
        self._tasks: list[OptimizerTask] = []
        self._unpublished = False
        self.generation = 0  # counts what changes the weights that a call sees
        self.grads_shown = False
        self.saving: SaveHandle | None = None  # the newest checkpoint, written or not
        self.whole_call = False  # the model's own forward runs, and has prepared
        self.host_read: set[int] = set()  # units that the caller computes with himself, by key
        self._versions: dict[int, int] = {}
        self.measurements = Measurements(len(layers))
        self.adapted: dict[Any, ResolvedConfig] = {}  # by the settings asked for, see Note [Adapting]
        self.plans = PlanKeeper(self)
        self.attach(engine)
        self._note_versions()
        _living.add(self)
        self._finalizer = weakref.finalize(self, _let_go, layers, self.units, placement, self.gradient_pool)
        self._finalizer.atexit = False

    # -- engine --------------------------------------------------------------------------------------------------
    def attach(self, engine: Engine) -> None:
        """Registers the units with the open engine when it is another one than before."""
        if engine is self.engine:
            return
        self.engine = engine
        self.generation += 1  # a backward that is still to come would find its activations gone
        self.host_buffers.forget()
        self.measurements = Measurements(len(self.layers))  # what other devices took says little
        self.adapted.clear()
        self.plans.clear()
        for unit in self.units:
            unit.follow_publishes()
            unit.close()
        self.gradient_pool.close()
        self.placement.open(engine.handle, self.units)
        for unit in self.units:
            unit.open(engine.handle)

    def close(self) -> None:
        """Lets go of the weights: nothing runs any more, and nothing will."""
        self.wait_saved()
        _living.discard(self)
        self._finalizer()

    # -- before a call -------------------------------------------------------------------------------------------
    def prepare(self, *, trains: bool = True) -> Engine:
        """Raises earlier failures, follows what the user changed on the host model, and gives the engine.

        Not ``trains``: no gradient will come, so those that are shown stay.
        """
        self.raise_failures()
        self._forget_ended()
        engine = self._follow_engine()
        self.adopt_edits()
        changed = any(not unit.layout_is_current() for unit in self.units)
        if changed:
            relayout(self)
        if self.grads_shown:
            if trains or changed:
                adopt_shown_gradients(self)
        else:
            fold_host_gradients(self)
        self.host_buffers.refresh(engine)
        return engine

    def prepare_part(self, layers: list[nn.Module]) -> Engine:
        """``prepare`` of a call of these layers within a call of the whole model, which has prepared everything."""
        self.raise_failures()
        self._forget_ended()
        engine = self._follow_engine()
        self.host_buffers.refresh(engine, layers)
        return engine

    def _follow_engine(self) -> Engine:
        """The open engine, which may be another than before; what was dispatched on that has ended with it."""
        engine = engines.current()
        if engine is not self.engine:
            self.drain()
            self.attach(engine)
        return engine

    def open_engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _note_versions(self) -> None:
        for unit in self.units:
            for parameter in unit.parameters:
                self._versions[id(parameter)] = parameter._version

    @property
    def in_use(self) -> bool:
        """Whether gradients or optimizer parameters exist, or work is under way."""
        self.raise_failures()
        self._forget_ended()
        return bool(self._calls or self._tasks or self.window or self.optimizer or self.compact.memory)

    def adopt_edits(self, look_closely: bool = False, unchanged: Container[int] = ()) -> None:
        """Weights that the user edited on the host reach the optimizer's copy before anything could revert them.

        ``look_closely`` compares values instead of trusting version counters (which ``.data`` edits do not raise);
        requires that the newest weights are on the host. ``unchanged``: parameters (by id) that were written, but with
        the values that they had.
        """
        self.structure.check()
        edited = [
            parameter
            for unit in self.units
            for index, parameter in enumerate(unit.parameters)
            if parameter._version != self._versions[id(parameter)] or not unit.is_home(index)
        ]
        if look_closely and self.compact.memory is None:
            edited = [p for unit in self.units for p in unit.parameters if self.optimizer.differs(p)]
        if not edited:
            return
        self.drain()
        self.wait_saved()
        self.generation += 1
        for unit in self.units:
            unit.bring_home()
        self.optimizer.refresh(edited)
        self.compact.follow_edits([p for p in edited if id(p) not in unchanged])
        self._note_versions()

    # -- weights that the caller computes with himself -----------------------------------------------------------
    def wait_host_read(self) -> None:
        """They are complete until the next step is dispatched."""
        for unit in self.units:
            if unit.key in self.host_read:
                unit.follow_publishes()

    def follow_publishes(self, parameter: nn.Parameter) -> None:
        """The same for one of them."""
        if not optimizer_thread.is_current():
            for unit in self.units:
                if any(parameter is own for own in unit.parameters):
                    self.host_read.add(unit.key)
                    unit.follow_publishes()

    # -- gradients on the host model -----------------------------------------------------------------------------
    def zero_grad(self, set_to_none: bool) -> None:
        self.raise_failures()
        for call in self.window.calls:
            call.wait_jobs()
        self.window = Window()
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None
        if self.optimizer:
            self.drain()
            self.optimizer.zero_grad(set_to_none)

    # -- steps ---------------------------------------------------------------------------------------------------
    def ensure_optimizer_parameters(self) -> None:
        self._refuse_beside_compact()
        self.publish_pending()
        self.optimizer.ensure()

    def _refuse_beside_compact(self) -> None:
        if self.compact.memory is not None:
            self.publish_pending()
            self._forget_ended()  # steps under way keep the memory of an optimizer that is gone
            self.compact.refuse_others()

    def step(self, function: Callable[[], Any], is_async: bool) -> None:
        if optimizer_thread.is_current():
            raise ConfigError("step() was called inside a step function; call it on the main thread")
        self.prepare()
        self._refuse_beside_compact()
        include_frozen(self)
        if not self.optimizer:
            if self.window:
                raise ConfigError(
                    "there are gradients but no optimizer parameters, so the step would train nothing: build the "
                    "optimizer inside `with roundpipe.OptimizerCtx():` from model.parameters(), or from "
                    "model.optim_parameters()."
                )
        self._ensure_unfrozen()
        function = watched(function, self)
        with uninterrupted():
            window, self.window = self.window, Window()
            self._dispatch(window, function, publish_first=is_async and self._unpublished, publish_last=not is_async)
            self._unpublished = is_async
        if not is_async:
            self.drain()
            self.raise_failures()

    def _ensure_unfrozen(self) -> None:
        was_empty = not self.optimizer
        names = self.optimizer.ensure()
        if names and not was_empty:
            some = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
            warnings.warn(
                f"{len(names)} parameters ({some}) require grad since the optimizer was built, which does not hold "
                "them: they get gradients, but this step and those to come do not train them. Inside `with "
                "roundpipe.OptimizerCtx():` build the optimizer again, or give it a group of them from "
                "model.named_parameters() with add_param_group. This is said once.",
                stacklevel=caller_level(),
            )

    def _dispatch(
        self, window: Window | None, function: Callable[[], Any] | None, *, publish_first: bool, publish_last: bool
    ) -> None:
        self.generation += publish_first or publish_last
        task = StepTask(
            self.open_engine(),
            self.optimizer,
            self.units,
            window,
            function,
            publish_first=publish_first,
            publish_last=publish_last,
        )
        self._submit(task)

    def _submit(self, task: OptimizerTask) -> None:
        self._tasks.append(task)
        optimizer_thread.submit(task.run)

    def attach_optimizer(self, memory: CompactMemory) -> None:
        """A compact optimizer was made for this model; whatever trained it before does so no more."""
        self.raise_failures()
        self.publish_pending()
        self.compact.attach(memory)
        self.optimizer = OptimizerParameters(self.units, self.optimizer.dtype)

    def compact_step(self, optimizer: CompactOptimizer, is_async: bool, scaler: GradScaler | None) -> None:
        self.prepare()
        include_frozen(self)
        optimizer.ensure_state(self.drain)
        with uninterrupted():
            self.generation += self.compact.has_pending or not is_async
            scaling = None if scaler is None or not scaler.is_enabled() else scaler.scaling_of(optimizer)
            step = self.compact.step(self.open_engine(), self.units, self.window, optimizer, is_async, scaling)
            self.window = Window()
            self._submit(step)

    def publish_pending(self) -> None:
        """The newest weights reach the host."""
        if self._unpublished:
            self._follow_engine()
            with uninterrupted():
                self._unpublished = False
                self._dispatch(None, None, publish_first=True, publish_last=False)
        self.publish_shadows()
        self.drain()

    def publish_shadows(self) -> None:
        """What an asynchronous compact step left is on its way into the host weights, for the uploads that follow."""
        if self.compact.has_pending:
            self._follow_engine()
            with uninterrupted():
                self.generation += 1
                self._submit(self.compact.publish(self.open_engine(), self.units))

    # -- waiting and failing -------------------------------------------------------------------------------------
    def began(self, call: Call) -> None:
        self._calls.append(call)

    def drain(self) -> None:
        """Blocks until every call and step has ended; does not raise for their failures."""
        for call in self._calls:
            call.wait_jobs()
        for task in self._tasks:
            task.wait()

    def wait_saved(self) -> None:
        """Blocks until a save has read everything; does not raise for it."""
        if self.saving is not None:
            self.saving.wait_quietly()

    def wait_for_weights(self) -> None:
        """Blocks until no compact step is writing host weights; for the threads of the user."""
        running = [t for t in self._tasks if isinstance(t, (CompactStep, AnnouncedStep)) and not t.ended.is_set()]
        thread = threading.current_thread()
        if (
            running
            and not optimizer_thread.is_current()
            and all(w.thread is not thread for w in self.open_engine().workers)
        ):
            for task in running:
                task.wait()

    def synchronize(self) -> None:
        self.raise_failures()
        self.drain()
        self.raise_failures()
        self.adopt_edits()
        self.publish_pending()
        self.raise_failures()
        if self.grads_shown:
            adopt_shown_gradients(self)
        else:
            fold_host_gradients(self)
        show_gradients(self)
        self._forget_ended()
        engines.current().raise_reports()

    def host_parameter(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The host weight that is this parameter, or that this is the optimizer's copy of."""
        return parameter if id(parameter) in self._versions else self.optimizer.host_of(parameter)

    def unsettled_training_call(self) -> Call | None:
        """The newest call that brings gradients and is not known to have kept them."""
        return next((c for c in reversed(self._calls) if c.joined and not c.settled), None)

    def _forget_ended(self) -> None:
        kept = []
        for call in self._calls:
            if call.settled and call.error is None:
                call.release()
            else:
                kept.append(call)
        self._calls = kept
        self._tasks = [t for t in self._tasks if not (t.ended.is_set() and t.error is None and not t.cancelled)]

    def raise_failures(self) -> None:
        """Raises the first failure that nobody was told of, after everything under way has ended and was undone."""
        if self.saving is not None:
            self.saving.raise_untold()
        if not any(c.error for c in self._calls) and not any(t.error or t.cancelled for t in self._tasks):
            return
        self.drain()
        error = self._first_failure()
        call = next((c for c in self._calls if c.error is error), None)
        failed = [t for t in self._tasks if t.error is not None or t.cancelled]
        self._recover()
        if isinstance(error, DeviceOutOfMemory):
            self.explain(error, call)
        if failed:
            # The next call must see what it would have seen without the failed step, and what a step did before it
            # failed counts, as in PyTorch.
            self._unpublished = bool(self.optimizer)
            self.compact.recover(failed)
            self.publish_pending()
        if error is not None:
            raise error

    def explain(self, error: DeviceOutOfMemory, call: Call | None) -> None:
        """A device ran out of memory in ``call``: says what to change, and gives the regions back. Requires that
        failures were recovered from.
        """
        if not self.open_engine().closed:
            self.open_engine().drop_regions()
        if call is not None and call.advisor is not None:
            try:
                call.advisor.advise(error, call)
            except Exception:  # the failure itself must reach the caller, whatever the layers do without values
                logger.warning("no advice on a device that ran out of memory could be made", exc_info=True)

    def _first_failure(self) -> BaseException | None:
        for task in self._tasks:
            if isinstance(task.error, PartialStepError):
                return task.error  # what failed is its cause
        for call in self._calls:
            if call.error is not None and call.announced is not None:
                outlived = call.announced.outlived(call.error)
                if outlived is not None:
                    return outlived
        told = [c.error for c in self._calls if c.told]
        failures = [c.error for c in self._calls if c.error is not None and not any(c.error is t for t in told)]
        failures += [t.error for t in self._tasks if t.error is not None]
        for failure in failures:
            if not isinstance(failure.__cause__, _ops.Poisoned) and not isinstance(failure, _ops.Poisoned):
                return failure
        return failures[0] if failures and not told else None  # a poisoned operation only follows from another failure

    def _recover(self) -> None:
        """Undoes failed calls. What earlier calls of their window accumulated stays, see Note [Two images]."""
        if not self.open_engine().closed:
            self.open_engine().wait_idle()
        with uninterrupted():
            self._undo()

    def _undo(self) -> None:
        first = next((i for i, call in enumerate(self._calls) if call.error is not None), len(self._calls))
        undo_all([undo for call in self._calls[first:] for undo in call.buffer_undos])
        windows = [t.window for t in self._tasks if t.cancelled and t.window is not None] + [self.window]
        survivor = windows[0]
        survivor.drop_failed()
        self.window = survivor
        self._calls.clear()
        self._tasks.clear()
        if not self.open_engine().closed:
            for unit in self.units:
                _ops.unit_new_epoch(unit.handle)

    # -- planning ------------------------------------------------------------------------------------------------
    def layer_costs(self, run_type: str) -> list[LayerCost]:
        """Sizes of the layers, and what has been measured of them."""
        timer, sizes = self.measurements.timer(run_type), self.measurements.sizes
        costs = []
        for index, (layer, units) in enumerate(zip(self.layers, self.units_of, strict=True)):
            buffers = sum(b.numel() * b.element_size() for b in layer.buffers())
            input_bytes, inner_bytes = sizes.of_layer(index) or (None, None)
            costs.append(
                LayerCost(
                    weight_bytes=sum(unit.weight_bytes for unit in units) + buffers,
                    gradient_bytes=sum(unit.gradient_bytes for unit in units),
                    forward_ms=timer.estimate_ms("fwd", index),
                    recompute_ms=timer.estimate_ms("re", index),
                    backward_ms=timer.estimate_ms("bwd", index),
                    input_bytes=input_bytes,
                    inner_bytes=inner_bytes,
                    units=(
                        *((unit.key, unit.weight_bytes, unit.gradient_bytes) for unit in units),
                        (("buffers", id(layer)), buffers, 0),
                    ),
                    name=type(layer).__name__,
                )
            )
        return costs

    def plan_limits(self) -> tuple[int, int | None]:
        """(number of devices, memory in bytes of the smallest; None: no limit)."""
        memory = [device.memory_bytes for device in devices()]
        return len(memory), min((m for m in memory if m is not None), default=None)


_living: weakref.WeakSet[TrainingState] = weakref.WeakSet()


def living_states() -> list[TrainingState]:
    """Of every wrapper in this process; on any thread, while another one may be making a wrapper."""
    while True:
        with contextlib.suppress(RuntimeError):  # the set has grown while it was looked through
            return list(_living)


def _tell_at_exit(_deadline: float) -> None:
    """The last error of a program that ends without ``synchronize()``: nobody else would hear of it."""
    for state in living_states():
        failure = state._first_failure()
        if failure is not None and not isinstance(failure, _ops.Poisoned):
            logger.error(
                "the program ends after a failure that no call has raised; end it with model.synchronize()",
                exc_info=failure,
            )


engines.at_engine_exit.append(_tell_at_exit)


def _let_go(layers: list[nn.Module], units: list[Unit], placement: Placement, pool: GradientPool) -> None:
    engines.forget_model(layers, [parameter for unit in units for parameter in unit.parameters])
    for unit in units:
        _ops.drop_quietly(unit.close)
    pool.close()
    placement.close()
