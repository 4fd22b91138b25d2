"""What happens to accumulated gradients when ``requires_grad`` of some parameter changes.

Note [Frozen inside a window]
  A parameter that is frozen after it got a gradient keeps it in ``.grad``, and later calls add nothing to it. The next
  step still takes it: an optimizer of PyTorch looks at ``.grad`` alone, updates the parameter and clears it. So a step
  packs such parameters as if they required grad; the call after it packs again without them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from .errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from .training_state import TrainingState
    from .units import Unit


def relayout(state: TrainingState, frozen: Container[int] = ()) -> None:
    """Packs the gradients anew; what has accumulated stays. ``frozen``: as in ``Unit.layout_gradients``."""
    state.publish_pending()  # of parameters that are frozen now too
    state.raise_failures()
    state.generation += 1
    for unit in state.units:
        if not unit.layout_is_current(frozen):
            _relayout_unit(state, unit, frozen)
    for worker in state.open_engine().workers:
        worker._views.clear()
    state.measurements.sizes.forget()
    state.measurements.peaks.clear()
    state.plans.clear()


def _relayout_unit(state: TrainingState, unit: Unit, frozen: Container[int]) -> None:
    image, touched = state.window.image(unit), state.window.touched(unit)
    views = [] if image is None or state.grads_shown else unit.gradient_views(image)  # shown: they stand in .grad
    sums = {id(p): (p, views[i]) for i, p in enumerate(unit.trainable_parameters) if views and i in touched}
    state.window.forget(unit)
    unit.layout_gradients(frozen)
    unit.open(state.open_engine().handle)
    if not state.grads_shown:
        for parameter in unit.trainable_parameters:
            if id(parameter) not in sums and parameter.grad is not None:  # kept since it was frozen
                sums[id(parameter)], parameter.grad = (parameter, parameter.grad), None
    if not sums:
        return
    positions = {id(p): i for i, p in enumerate(unit.trainable_parameters)}
    if positions.keys() & sums.keys():
        kept = unit.gradient_image(None)
        for view, parameter in zip(unit.gradient_views(kept), unit.trainable_parameters, strict=True):
            if id(parameter) in sums:
                view.copy_(sums[id(parameter)][1].to_dense())
        state.window.base[unit.key] = (kept, {i for key, i in positions.items() if key in sums})
    for key, (parameter, total) in sums.items():
        if key not in positions:  # as in PyTorch, a frozen parameter keeps the gradient that it has
            parameter.grad = total.clone()


def include_frozen(state: TrainingState) -> None:
    """Before a step takes the window: gradients of parameters that were frozen meanwhile belong to it."""
    frozen = {id(parameter) for _, parameter in _frozen_with_gradient(state)}
    if frozen:
        relayout(state, frozen)


def refuse_frozen(state: TrainingState) -> None:
    """Before an announced step, whose call must not add to such gradients."""
    for name, _ in _frozen_with_gradient(state):
        raise ConfigError(
            f"forward_backward(step=...): parameter {name!r} was frozen after it had got a gradient. Call "
            "model.step(optimizer) after forward_backward, which takes that gradient too, or set its .grad to None."
        )


def _frozen_with_gradient(state: TrainingState) -> list[tuple[str, nn.Parameter]]:
    """Those that the model's optimizer knows, with their names."""
    memory = state.compact.memory
    return [
        (name, parameter)
        for unit in state.units
        for name, parameter in zip(unit.names, unit.parameters, strict=True)
        if not parameter.requires_grad
        and parameter.grad is not None
        and (state.optimizer.get(parameter) is not None or (memory is not None and id(parameter) in memory.slots))
    ]
