"""``on_oom="adapt"``: a call for which a device has not enough memory is undone and made again with other settings.

Note [Adapting]
  A failed call is forgotten as any other is (Note [Two images]): no gradient of it counts, no buffer was written. What
  is brought back here besides is the caller's generator, from which the call drew its seed, and the plain attributes
  of the modules. So the call that succeeds does what it would have done if its settings had been asked for at once. To
  be able to undo it the caller waits until the whole call has ended. The next settings are the first remedy
  (Note [Remedies]) that is predicted to fit and was not tried; without predictions, the next step of each kind. They
  are kept: calls that ask for the settings that failed get these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import DeviceOutOfMemory
from .oom_advice import Remedy, changed, plan_key
from .run_config import ResolvedConfig

if TYPE_CHECKING:
    from .call import Call
    from .training_state import TrainingState

__all__ = ["adapting"]

logger = logging.getLogger(__name__)

_SLACK = 1.05
"""Predictions may be wrong by a little: where none fits, one that exceeds the memory by no more than this is tried."""

_OWN = frozenset({"_parameters", "_buffers", "_modules"})

Attempt = Callable[[ResolvedConfig, "list[Call]"], Any]
"""Makes the call with these settings, and appends it to the list before anything of it can fail."""


def adapting(state: TrainingState, config: ResolvedConfig, run_type: str, attempt: Attempt) -> Any:
    """The result of ``attempt``, which on request is repeated with settings that need less memory.

    Raises:
        DeviceOutOfMemory: nothing is left to try (or nothing was to be tried), with the remedies that there are.
    """
    adapts = config.on_oom == "adapt"
    asked = _key(config, run_type)
    chosen = _kept(state, config, run_type) if adapts else config
    tried = {_key(chosen, run_type)}
    before = _Before(state.layers) if adapts else None
    while True:
        made: list[Call] = []
        try:
            result = attempt(chosen, made)
        except DeviceOutOfMemory as error:
            ours = bool(made) and made[-1].error is error
            if ours and error.remedies is None:  # it never reached the workers
                state.raise_failures()
                state.explain(error, made[-1])
            following = _next(error, chosen, run_type, tried) if before is not None and ours else None
            if following is None or before is None:
                raise
            text = str(following[1])
            logger.warning(
                "%s: %s ran out of memory (%s); the call is made again with %s, which is kept for later calls",
                _name(state),
                error.device,
                error.phase,
                text,
            )
        else:
            if len(tried) > 1:
                state.adapted[asked] = chosen
            return result
        chosen = following[0]
        tried.add(_key(chosen, run_type))
        before.restore()


def _name(state: TrainingState) -> str:
    return f"a model of {len(state.layers)} layers"


def _key(config: ResolvedConfig, run_type: str) -> Any:
    plan = config.execute_plan
    if plan is None:
        return run_type, config.num_microbatch, config.recompute_grain
    return run_type, *plan_key(plan, config.num_microbatch, config.recompute_grain)


def _kept(state: TrainingState, config: ResolvedConfig, run_type: str) -> ResolvedConfig:
    kept = state.adapted.get(_key(config, run_type))
    if kept is None:
        return config
    return replace(
        config,
        num_microbatch=kept.num_microbatch,
        recompute_grain=kept.recompute_grain,
        execute_plan=kept.execute_plan,
    )


def _next(
    error: DeviceOutOfMemory, present: ResolvedConfig, run_type: str, tried: set[Any]
) -> tuple[ResolvedConfig, Remedy] | None:
    remedies: tuple[Remedy, ...] = error.remedies or ()
    capacity = error.capacity_bytes or 0
    untried = [
        (config, remedy)
        for remedy in remedies
        if _key(config := changed(present, remedy.config), run_type) not in tried
    ]
    for config, remedy in untried:
        if remedy.fits or remedy.after_bytes is None:
            return config, remedy
    close = [(c, r) for c, r in untried if r.after_bytes is not None and r.after_bytes <= _SLACK * capacity]
    return min(close, key=lambda entry: entry[1].after_bytes or 0, default=None)


class _Before:
    """What a call changes before it is known to succeed, and what nobody else brings back."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._generator = torch.get_rng_state()
        modules = {id(module): module for layer in layers for module in layer.modules()}
        self._attributes = [
            (module, {name: value for name, value in module.__dict__.items() if name not in _OWN})
            for module in modules.values()
        ]

    def restore(self) -> None:
        torch.set_rng_state(self._generator)
        for module, attributes in self._attributes:
            own = module.__dict__
            for name in own.keys() - attributes.keys() - _OWN:
                del own[name]
            own.update(attributes)
