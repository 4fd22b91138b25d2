"""``.grad`` of the host's own parameters: where sums are shown, and where autograd leaves gradients of what the caller
computes with the weights himself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .window import Window

if TYPE_CHECKING:
    from .training_state import TrainingState
    from .units import Unit


def show_gradients(state: TrainingState) -> None:
    """``.grad`` of the host parameters becomes a view of what has accumulated; all calls have ended."""
    for unit in state.units:
        image = state.window.image(unit)
        touched = state.window.touched(unit)
        views = None if image is None else unit.gradient_views(image)
        for position, parameter in enumerate(unit.trainable_parameters):
            parameter.grad = views[position] if views is not None and position in touched else None
    state.grads_shown = True


def adopt_shown_gradients(state: TrainingState) -> None:
    """The user saw ``.grad``: what he set, changed or cleared there is what the next call adds to."""
    state.drain()
    _unalias(state)
    window = Window()
    for unit in state.units:
        image = state.window.image(unit)
        given = {i: p.grad for i, p in enumerate(unit.trainable_parameters) if p.grad is not None}
        if given:
            if image is None:
                image = unit.gradient_image(None)
            views = unit.gradient_views(image)
            with torch.no_grad():
                for position, view in enumerate(views):
                    grad = given.get(position)
                    if grad is None:
                        view.zero_()
                    elif grad.data_ptr() != view.data_ptr():
                        view.copy_(grad.to_dense())
            window.base[unit.key] = (image, set(given))
        for parameter in unit.trainable_parameters:
            parameter.grad = None
    state.window = window
    state.grads_shown = False


def _unalias(state: TrainingState) -> None:
    """Gradients in the images, but not where they were shown (swapped, transposed), get memory of their own."""
    images = [(unit, image) for unit in state.units if (image := state.window.image(unit)) is not None]
    storages = {image.untyped_storage().data_ptr() for _, image in images}
    shown = {
        id(parameter): view
        for unit, image in images
        for parameter, view in zip(unit.trainable_parameters, unit.gradient_views(image), strict=True)
    }
    for unit in state.units:
        for parameter in unit.trainable_parameters:
            grad, view = parameter.grad, shown.get(id(parameter))
            if grad is None or grad.layout != torch.strided or grad.untyped_storage().data_ptr() not in storages:
                continue
            if view is None or (grad.data_ptr(), grad.stride()) != (view.data_ptr(), view.stride()):
                parameter.grad = grad.clone()


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
        # Its last call started from this image, and may have yet to load what is in it.
        for call in () if newest is None else newest.calls:
            if unit.key in call.stores:
                call.wait_jobs()
        image = unit.gradient_image(other_than=None if newest is None else newest.image(unit))
        image.zero_()
    return image
