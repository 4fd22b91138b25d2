"""Loss scaling for float16 training, in step with an optimizer that runs beside the devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import finite_checks, loss_scope
from .errors import ConfigError, RoundPipeError
from .interrupts import uninterrupted
from .optim.compact import CompactOptimizer
from .optimizer_thread import thread as optimizer_thread

__all__ = ["GradScaler"]


_STATE_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


@dataclass(frozen=True)
class _Numbers:
    """What an update starts from, or ends with."""

    scale: float
    tracker: int  # updates without overflow since the scale last changed


@dataclass
class _OptimizerState:
    """One optimizer between two updates."""

    non_finite: bool | None = None  # None: not looked at
    unscaled: bool = False
    stepped: bool = False


class _Task:
    """Runs on the optimizer thread, behind the steps dispatched before it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self._ended = threading.Event()
        optimizer_thread.submit(self._run)

    def _run(self) -> None:
        try:
            self._function()
        except BaseException as error:  # noqa: BLE001 (raised where the task is waited for)
            self._error = error
        finally:
            self._ended.set()

    def wait(self) -> None:
        while not self._ended_within_slice():
            pass
        if self._error is not None:
            raise self._error

    def _ended_within_slice(self) -> bool:
        with uninterrupted():
            return self._ended.wait(timeout=0.1)


class Scaling:
    """What a step of a compact optimizer asks and tells; on the optimizer thread, in the order of steps."""

    def __init__(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        self._scaler = scaler
        self._key = id(optimizer)

    def inverse(self) -> float:
        """What multiplies the gradients."""
        return _float32(1.0 / self._scaler._step_scale)

    def found(self, non_finite: bool) -> None:
        """Whether the step is skipped."""
        state = self._scaler._optimizers.setdefault(self._key, _OptimizerState())
        if state.stepped:
            raise RoundPipeError("the optimizer was stepped twice since the last GradScaler.update()")
        state.non_finite, state.unscaled, state.stepped = non_finite, True, True


class GradScaler:
    """``torch.amp.GradScaler`` for models wrapped by RoundPipe. ::

        scaler = roundpipe.GradScaler()

        def loss_fn(output, label):
            return scaler.scale(criterion(output, label))

        def update():  # on the optimizer thread
            scaler.step(optimizer)
            optimizer.zero_grad()

        loss = model.forward_backward((x,), label=y, loss_fn=loss_fn)
        model.step(update)
        scaler.update()

    :meth:`scale` may be called on any thread, :meth:`unscale_` and :meth:`step` belong into the step function,
    :meth:`update` on the thread that calls ``model.step``, after it. A step whose gradients hold an infinity or NaN is
    skipped: weights, moments and step counters stay. Whether they do is seen in the pass that brings the gradients to
    the optimizer. With a compact optimizer: ``model.step(optimizer, scaler=scaler)``, or ``scaler.step(optimizer)`` on
    the thread that calls the model.

    Note [Two views of the scale]
      The caller's thread and the workers scale with the value that the last update made effective; a step, which may
      run an iteration later, must unscale with the value of its own iteration. So an update does two things: at once it
      changes what :meth:`scale` uses, and behind the steps dispatched so far (the optimizer thread runs in order) it
      changes what steps use, and takes over what they found. An asynchronous update cannot know what the step before it
      finds; it makes effective what the update before it has computed, for which it waits.

    Args:
        init_scale, growth_factor, backoff_factor, growth_interval: as in torch.
        enabled: False makes every method do nothing, and :meth:`step` a plain step.

    Raises:
        ConfigError: numbers out of range.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._enabled = bool(enabled)
        if not self._enabled:
            return
        _require(_number(init_scale) and init_scale > 0, "init_scale", "a positive number", init_scale)
        self._newest = _Numbers(_float32(init_scale), 0)  # after every update that has run; optimizer thread's order
        self._effective = self._newest.scale  # what scale() uses
        self._step_scale = self._effective  # what steps undo; optimizer thread's order
        self._optimizers: dict[int, _OptimizerState] = {}  # optimizer thread's order
        self._failed_steps = optimizer_thread.failed_steps  # of the optimizer thread, when the last update ran
        self._pending: _Task | None = None
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)
        finite_checks.watchers.add(self)

    # -- scaling: any thread -------------------------------------------------------------------------------------
    def scale(self, outputs: Any) -> Any:
        """``outputs`` (a tensor, or nested lists and tuples of them) times the scale, on their devices."""
        if not self._enabled:
            return outputs
        if loss_scope.is_announced():
            raise ConfigError(
                "GradScaler.scale in a forward_backward(step=...): layers are updated before all gradients are there, "
                "so nothing could be unscaled or skipped. Call model.step(optimizer, scaler=scaler) after it instead."
            )
        if isinstance(outputs, Tensor):
            return outputs * self._effective
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled  # type: ignore[call-arg]
        raise ConfigError(f"GradScaler.scale: expected a tensor or an iterable of tensors, got {_type_name(outputs)}")

    # -- steps: the optimizer thread, or another that then waits for it ------------------------------------------
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divides the gradients of ``optimizer``'s parameters by the scale; for clipping, before :meth:`step`.

        Raises:
            RoundPipeError: called twice for one optimizer since the last update, or after its step.
            ConfigError: a gradient in float16, or no gradient at all.
        """
        if not self._enabled:
            return
        if isinstance(optimizer, CompactOptimizer):
            raise ConfigError(
                "GradScaler.unscale_: a compact optimizer unscales in the pass of its step; clip with its max_grad_norm"
            )
        state = self._state_of(optimizer)
        if state.stepped or state.unscaled:
            what = "after step()" if state.stepped else "twice"
            raise RoundPipeError(
                f"GradScaler.unscale_ was called {what} for one optimizer since the last update(); call it once, "
                "before step() and after update()"
            )
        self._unscale(optimizer, state)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` with unscaled gradients; skipped (None) if one of them is not finite.

        Unscales unless :meth:`unscale_` was called before, which optimizers with support for scaled gradients
        (``torch.optim``'s with ``fused=True``) do in their own pass.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if isinstance(optimizer, CompactOptimizer):
            return optimizer.step(*args, scaler=self, **kwargs)
        if "closure" in kwargs or args:
            raise RoundPipeError("GradScaler.step does not support closures; compute the loss before the step")
        state = self._state_of(optimizer)
        if state.stepped:
            raise RoundPipeError(
                "GradScaler.step was called twice for one optimizer since the last update(); call update() on the main "
                "thread after each model.step()"
            )
        result = None
        if not state.unscaled and getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._fused_step(optimizer, state, **kwargs)
        else:
            if not state.unscaled:
                self._unscale(optimizer, state)
            if not state.non_finite:
                result = optimizer.step(**kwargs)
        state.stepped = True
        return result

    def scaling_of(self, optimizer: torch.optim.Optimizer) -> Scaling:
        """For a step of a compact optimizer."""
        return Scaling(self, optimizer)

    def _state_of(self, optimizer: torch.optim.Optimizer) -> _OptimizerState:
        if not optimizer_thread.is_current():
            self._wait_for_thread()
        return self._optimizers.setdefault(id(optimizer), _OptimizerState())

    def _unscale(self, optimizer: torch.optim.Optimizer, state: _OptimizerState) -> None:
        gradients = _gradients(optimizer)
        inverse = _float32(1.0 / self._step_scale)
        seen, unseen, found = _split(gradients)
        if seen:
            torch._foreach_mul_(seen, inverse)
        for device, group in _by_device(unseen).items():
            found_inf = torch.zeros((), device=device)
            factor = torch.tensor(inverse, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, factor)
            found = found or bool(found_inf.item())
        state.non_finite, state.unscaled = found, True

    def _fused_step(self, optimizer: torch.optim.Optimizer, state: _OptimizerState, **kwargs: Any) -> Any:
        """The optimizer multiplies by the inverse scale itself."""
        _, unseen, found = _split(_gradients(optimizer))
        if not found and unseen:
            found = any(not bool(gradient.isfinite().all()) for gradient in unseen)
        state.non_finite = found
        if found:
            return None
        holder: Any = optimizer
        holder.grad_scale, holder.found_inf = torch.tensor(self._step_scale), torch.tensor(0.0)
        try:
            return optimizer.step(**kwargs)
        finally:
            del holder.grad_scale, holder.found_inf

    # -- updates -------------------------------------------------------------------------------------------------
    def update(self, new_scale: float | Tensor | None = None, is_async: bool = True) -> None:
        """Ends an iteration: the scale backs off if a step since the last update was skipped, or grows in time.

        Call it after ``model.step``, on the same thread. With ``is_async=False`` it waits for the steps, and the new
        scale is in effect when it returns, as in torch. Otherwise it returns at once, and the new scale takes effect
        with the next update.

        Args:
            new_scale: the new scale, instead of a computed one.
            is_async: see above.

        Raises:
            RoundPipeError: called on the optimizer thread, or no optimizer was unscaled or stepped since the last
                update (raised by the next call that waits, if asynchronous).
            ConfigError: ``new_scale`` is no positive number or tensor of one element.
        """
        if not self._enabled:
            return
        if optimizer_thread.is_current():
            raise RoundPipeError("GradScaler.update was called inside a step function; call it after model.step()")
        given = None if new_scale is None else _given_scale(new_scale)
        growth, backoff, interval = self._growth_factor, self._backoff_factor, self._growth_interval
        self._wait_for_pending()
        effective = None if not is_async else self._newest.scale

        def run() -> None:
            try:
                self._newest = self._next(given, growth, backoff, interval)
            finally:
                self._optimizers.clear()
                self._step_scale = self._newest.scale if effective is None else effective

        self._pending = _Task(run)
        if effective is None:
            self._wait_for_pending()
        self._effective = self._newest.scale if effective is None else effective

    def _next(self, given: float | None, growth: float, backoff: float, interval: int) -> _Numbers:
        failed, self._failed_steps = optimizer_thread.failed_steps - self._failed_steps, optimizer_thread.failed_steps
        checks = [state.non_finite for state in self._optimizers.values() if state.non_finite is not None]
        now = self._newest
        if given is not None:
            return _Numbers(given, now.tracker)
        if not checks:
            if failed:  # told by the model
                return now
            raise RoundPipeError(
                "GradScaler.update: no gradients were looked at since the last update; call scaler.step(optimizer) in "
                "the step function, and model.step before update()"
            )
        if any(checks):
            return _Numbers(_float32(now.scale * backoff), 0)
        if now.tracker + 1 < interval:
            return _Numbers(now.scale, now.tracker + 1)
        grown = _float32(now.scale * growth)
        return _Numbers(grown if grown != float("inf") else now.scale, 0)

    def _wait_for_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _wait_for_thread(self) -> None:
        self._wait_for_pending()
        _Task(lambda: None).wait()

    def _bring_up_to_date(self, up_to_date: bool) -> None:
        if up_to_date and not optimizer_thread.is_current():
            self._wait_for_thread()

    # -- reading and setting -------------------------------------------------------------------------------------
    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self, up_to_date: bool = False) -> float:
        """The scale that :meth:`scale` uses now; ``up_to_date``: the newest, after the steps dispatched so far."""
        if not self._enabled:
            return 1.0
        self._bring_up_to_date(up_to_date)
        return self._newest.scale if up_to_date else self._effective

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        self._bring_up_to_date(up_to_date and self._enabled)
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """For updates from now on."""
        _require(_number(new_factor) and new_factor > 1, "growth_factor", "a number above 1", new_factor)
        self._growth_factor = float(new_factor)

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        self._bring_up_to_date(up_to_date and self._enabled)
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """For updates from now on."""
        _require(_number(new_factor) and 0 < new_factor < 1, "backoff_factor", "a number between 0 and 1", new_factor)
        self._backoff_factor = float(new_factor)

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        self._bring_up_to_date(up_to_date and self._enabled)
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """For updates from now on."""
        whole = isinstance(new_interval, int) and not isinstance(new_interval, bool)
        _require(whole and new_interval > 0, "growth_interval", "a whole number above 0", new_interval)
        self._growth_interval = new_interval

    def _get_growth_tracker(self, up_to_date: bool = False) -> int:
        self._bring_up_to_date(up_to_date and self._enabled)
        return self._newest.tracker if self._enabled else 0

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and loaded by torch's. Waits for the steps dispatched so far; the scale is the newest."""
        if not self._enabled:
            return {}
        self._bring_up_to_date(True)
        return {
            "scale": self._newest.scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._newest.tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this class or of torch's; the scale is in effect at once.

        Raises:
            ConfigError: an empty state, as a disabled scaler gives, or one with missing or wrong entries.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise ConfigError("GradScaler.load_state_dict: the state is empty; was it saved by a disabled scaler?")
        if missing := _STATE_KEYS - set(state_dict):
            raise ConfigError(f"GradScaler.load_state_dict: the state lacks {', '.join(sorted(missing))}")
        scale = _given_scale(state_dict["scale"])
        self._bring_up_to_date(True)
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
        self._newest = _Numbers(scale, int(state_dict["_growth_tracker"]))
        self._effective = self._step_scale = scale

    def views(self) -> tuple[float, float]:
        """What ``scale`` and steps use now, which after an asynchronous update is older than the newest scale.

        Raises ConfigError between a step and its update.
        """
        if not self._enabled:
            return 1.0, 1.0
        self._bring_up_to_date(True)
        if self._optimizers:
            raise ConfigError("GradScaler: it is saved between a step and its update; call scaler.update() first")
        return self._effective, self._step_scale

    def set_views(self, views: tuple[float, float]) -> None:
        """After ``load_state_dict``: goes on as the scaler did whose :meth:`views` these are."""
        if self._enabled:
            self._effective, self._step_scale = map(float, views)

    def __getstate__(self) -> dict[str, Any]:
        return {"enabled": self._enabled, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        GradScaler.__init__(self, enabled=state["enabled"])
        self.load_state_dict(state["state"])


def _gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    gradients = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.dtype == torch.float16:
                raise ConfigError(
                    "GradScaler cannot unscale gradients in float16, which would lose what scaling has saved; keep the "
                    "optimizer's copy in float32: RoundPipe(model, optim_dtype=torch.float32)"
                )
            if gradient.is_sparse:
                gradient = gradient._values()
            gradients.append(gradient)
    if not gradients:
        raise ConfigError(
            "GradScaler: no parameter of this optimizer has a gradient. Build the optimizer inside "
            "roundpipe.OptimizerCtx(), and call the scaler's step in the step function, where the gradients are: "
            "model.step(lambda: scaler.step(optimizer))"
        )
    return gradients


def _split(gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor], bool]:
    """Those of which it is known whether they are finite, the others, and whether one of the former is not."""
    seen: list[Tensor] = []
    unseen: list[Tensor] = []
    found = False
    for gradient in gradients:
        known = finite_checks.ask(gradient)
        (unseen if known is None else seen).append(gradient)
        found = found or bool(known)
    return seen, unseen, found


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups


def _float32(value: float) -> float:
    """Rounded as torch keeps it."""
    return torch.tensor(value, dtype=torch.float32).item()


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value  # no NaN


def _given_scale(value: object) -> float:
    number: Any = value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad:
        number = value.item()
    _require(_number(number) and 0 < number < float("inf"), "scale", "a positive number or tensor of one", value)
    return _float32(number)


def _require(condition: bool, argument: str, expected: str, came: object) -> None:
    if not condition:
        raise ConfigError(f"GradScaler: argument '{argument}': expected {expected}, got {came!r}")


def _type_name(value: object) -> str:
    return type(value).__name__
