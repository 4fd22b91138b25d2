"""Gradients that autograd leaves on the host's own parameters, where the caller computes with the weights himself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .training_state import TrainingState
    from .units import Unit


def fold_host_gradients(state: TrainingState) -> None:
    """Adds them to the window, as they would add up in plain PyTorch, and clears ``.grad``.

    Waits for the window's calls where one of these parameters got gradients from them too.
    """
    for unit in state.units:
        given = {i: p.grad for i, p in enumerate(unit.trainable_parameters) if p.grad is not None}
        if not given:
            continue
        state.host_read.add(unit.key)
        image = _image(state, unit)
        touched = state.window.touched(unit)
        with torch.no_grad():
            views = unit.gradient_views(image)
            for position, grad in given.items():
                views[position].add_(grad)
                unit.trainable_parameters[position].grad = None
        state.window.base[unit.key] = (image, touched | given.keys())


def _image(state: TrainingState, unit: Unit) -> torch.Tensor:
    """The image with the sum so far, complete, or a cleared one."""
    for call in state.window.calls:
        if unit.key in call.stores:
            call.wait_jobs()
    state.raise_failures()
    image = state.window.image(unit)
    if image is None:
        # The newest step may still be taking its gradients from the other image; those before it have ended with this.
        for task in state._tasks[:-1]:
            task.wait()
        newest = state._tasks[-1].window if state._tasks else None
        image = unit.gradient_image(other_than=None if newest is None else newest.image(unit))
        image.zero_()
    return image
