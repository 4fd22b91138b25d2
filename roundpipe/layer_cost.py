"""What one layer costs: the planner's input."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

__all__ = ["LayerCost", "activation_bytes", "activations_known", "stage_bytes", "with_estimates"]

_NOMINAL_BYTES_PER_MS = 1e8
"""Bytes of weights that a forward is taken to work through in a millisecond before anything was measured. Only the
proportions between layers matter to a plan."""

_LEAST_MS = 1e-6
"""A layer without weights still takes a moment; a cost of zero would make it free to move."""


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer.

    Attributes:
        weight_bytes: weights and buffers, as uploaded.
        gradient_bytes: gradients of the trainable weights, as downloaded.
        forward_ms, recompute_ms, backward_ms: device time of one microbatch in milliseconds; None: not measured.
        input_bytes: activations at the layer's input, for one microbatch; None: not measured.
        inner_bytes: what its graph holds between forward and backward beside that input, its output included; None: not
            measured.
        units: ``(unit_id, weight_bytes, gradient_bytes)`` of each independently stored group of weights. A unit that
            several layers of a stage share takes its bytes there once. Empty: the layer's bytes are its own.
        name: for messages.
    """

    weight_bytes: int
    gradient_bytes: int = 0
    forward_ms: float | None = None
    recompute_ms: float | None = None
    backward_ms: float | None = None
    input_bytes: int | None = None
    inner_bytes: int | None = None
    units: tuple[tuple[Hashable, int, int], ...] = ()
    name: str = ""

    def stage_bytes(self, *, gradients: bool) -> int:
        """Bytes of a stage of this layer alone."""
        return stage_bytes([self], gradients=gradients)

    def unmeasured(self) -> LayerCost:
        """Its sizes alone."""
        return replace(self, forward_ms=None, recompute_ms=None, backward_ms=None, input_bytes=None, inner_bytes=None)

    def own_units(self, layer: int) -> tuple[tuple[Hashable, int, int], ...]:
        """``units``, or one made up from the layer's bytes; ``layer`` keeps it apart from other layers'."""
        return self.units or ((("layer", layer), self.weight_bytes, self.gradient_bytes),)


def stage_bytes(costs: Iterable[LayerCost], *, gradients: bool) -> int:
    """Bytes of a stage of these layers: weights and buffers, and with ``gradients`` the gradients too."""
    units = {
        unit: weights + (grads if gradients else 0)
        for layer, cost in enumerate(costs)
        for unit, weights, grads in cost.own_units(layer)
    }
    return sum(units.values())


def activations_known(costs: Iterable[LayerCost]) -> bool:
    return all(cost.inner_bytes is not None for cost in costs)


def activation_bytes(costs: Sequence[LayerCost], *, by_layer: bool) -> int:
    """Bytes of activations while a stage of these layers runs backward; layers that were not measured count nothing.

    The graph of the stage (with ``by_layer``, recompute_grain "layer", that of one layer at a time); as much again as
    its largest layer for the gradients inside that; its input, the next microbatch's, and the gradients of one.
    """
    inner = [cost.inner_bytes or 0 for cost in costs]
    largest = max(inner, default=0)
    return (
        3 * max((cost.input_bytes or 0 for cost in costs), default=0) + (largest if by_layer else sum(inner)) + largest
    )


def with_estimates(costs: Sequence[LayerCost]) -> list[LayerCost]:
    """``costs`` with every time filled in.

    Layers without a measurement get times in proportion to their bytes, at the rate of those that have one. Recompute
    is taken to cost a forward, backward two of them (one for the gradients of the inputs, one for those of the
    weights).
    """
    measured = [cost for cost in costs if cost.forward_ms is not None and cost.weight_bytes > 0]
    time = sum(cost.forward_ms or 0.0 for cost in measured)
    rate = sum(cost.weight_bytes for cost in measured) / time if time > 0 else _NOMINAL_BYTES_PER_MS
    filled = []
    for cost in costs:
        forward = cost.weight_bytes / rate if cost.forward_ms is None else cost.forward_ms
        recompute = forward if cost.recompute_ms is None else cost.recompute_ms
        backward = 2 * forward if cost.backward_ms is None else cost.backward_ms
        filled.append(
            replace(
                cost,
                forward_ms=max(forward, _LEAST_MS),
                recompute_ms=max(recompute, _LEAST_MS),
                backward_ms=max(backward, _LEAST_MS),
            )
        )
    return filled
