"""Steps that find no gradients where some wait: those of a wrapped model come to its optimizer in its ``step``.

Such are steps taken by hand, and one in the step function of another model that shares the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .errors import ConfigError
from .optimizer_thread import thread as optimizer_thread
from .ownership import owners

if TYPE_CHECKING:
    from .training_state import TrainingState

__all__ = ["watch", "watched"]

_others: list[TrainingState] = []  # optimizer thread only: see watched


@functools.cache
def watch() -> None:
    """From now on a step that leaves a wrapped model's gradients where they are is a ConfigError."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _may_step_models(optimizer):
        _check(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _may_step_models(optimizer):
        _check(optimizer)


def _may_step_models(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step is the user's own code, which may be ``model.step(...)``, for a loop that calls
    ``optimizer.step()``.
    """
    return getattr(type(optimizer).step, "__module__", "").partition(".")[0] not in ("torch", "roundpipe")


def watched(function: Callable[[], Any], state: TrainingState) -> Callable[[], Any]:
    """``function``, the step of ``state``, so that it may not pass by gradients of other models that wait now: in that
    step their optimizer would not find them.
    """
    from .training_state import living_states

    others = [other for other in living_states() if other is not state and other.window]
    return functools.partial(_run_watched, function, others) if others else function


def _run_watched(function: Callable[[], Any], others: list[TrainingState]) -> None:
    _others[:] = others
    try:
        function()
    finally:
        _others.clear()


def _check(optimizer: torch.optim.Optimizer) -> None:
    if torch.compiler.is_compiling():
        return
    if optimizer_thread.is_current():
        for state in _others:
            _refuse_without_gradients(optimizer, state, in_step_function=True)
        return
    from .optim.compact import CompactOptimizer  # not at the top: these are built on what calls watch
    from .training_state import living_states

    if isinstance(optimizer, CompactOptimizer):
        return  # its step is the model's
    for state in living_states():
        if state.window:
            _refuse_without_gradients(optimizer, state)


def _refuse_without_gradients(
    optimizer: torch.optim.Optimizer, state: TrainingState, in_step_function: bool = False
) -> None:
    """Raises where gradients wait and the optimizer would find none of them. It may find some that the user's own code
    has put there, and those of the host weights once ``synchronize`` has shown them. To frozen weights none will come.
    """
    read = {id(p) for unit in state.units if unit.key in state.host_read for p in unit.parameters}
    first = host = None
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found = state.host_parameter(parameter)
            if found is None or not found.requires_grad:
                continue
            if found is parameter and (state.grads_shown or id(parameter) in read):
                continue
            if parameter.grad is not None:
                return
            if first is None:
                first, host = parameter, found
    if host is None:
        return
    owner = owners.of(host)
    name = "a wrapped model" if owner is None else f"the wrapped model {owner.name!r}"
    kind = type(optimizer).__name__
    if in_step_function:
        raise ConfigError(
            f"{kind} holds parameters of {name} too, which has gradients that this step function of another model "
            "does not bring: they come to the optimizer in that model's own step, so this one would leave them out. "
            "Make an optimizer for each model and step each; or take the other's first, with its "
            "step(lambda: None), and call its synchronize() after this step."
        )
    build = (
        "Build the optimizer inside `with roundpipe.OptimizerCtx():` from model.parameters() (its parameters are the "
        "host weights now), and call"
        if first is host
        else "Call"
    )
    raise ConfigError(
        f"{kind}.step() was called by hand, where {name} has gradients that its optimizer does not see: they come to "
        f"it in model.step, so this step would train nothing. {build} model.step(optimizer.step) in its place, or "
        "model.step(update) with a function that clips, steps and calls optimizer.zero_grad(). The gradients are kept."
    )
