"""The sizes of layers that are not wrapped, also of layers without values: what wrapping them would make of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .layer_cost import LayerCost
from .optimizer_format import TensorSize
from .units import group_parameters, layouts_of

__all__ = ["UnitSize", "layer_costs_of", "unit_sizes"]


@dataclass(frozen=True)
class UnitSize:
    """One packed group of weights (units.py) in bytes, and its trainable parameters."""

    layers: tuple[int, ...]
    weight_bytes: int
    gradient_bytes: int
    frozen_bytes: int
    """Of the weights, those that are not trained."""
    trainable: tuple[TensorSize, ...]


def unit_sizes(layers: Sequence[nn.Module]) -> list[UnitSize]:
    found, groups, _ = group_parameters(layers)
    sizes = []
    for sharers, keys in groups.items():
        parameters = [found[key][1] for key in keys]
        trained = [p for p in parameters if p.requires_grad]
        _, weight_bytes = layouts_of([p.detach() for p in parameters])
        _, gradient_bytes = layouts_of([p.detach() for p in trained])
        frozen = sum(p.numel() * p.element_size() for p in parameters if not p.requires_grad)
        trainable = tuple(TensorSize(p.numel(), p.dtype) for p in trained)
        sizes.append(UnitSize(sharers, weight_bytes, gradient_bytes, frozen, trainable))
    return sizes


def layer_costs_of(layers: Sequence[nn.Module], units: Sequence[UnitSize]) -> list[LayerCost]:
    """As ``TrainingState.layer_costs`` gives them for a wrapped model of which nothing was measured."""
    costs = []
    for index, layer in enumerate(layers):
        own = [
            (f"unit {u}", unit.weight_bytes, unit.gradient_bytes)
            for u, unit in enumerate(units)
            if index in unit.layers
        ]
        buffers = sum(b.numel() * b.element_size() for b in layer.buffers())
        costs.append(
            LayerCost(
                weight_bytes=sum(size for _, size, _ in own) + buffers,
                gradient_bytes=sum(size for _, _, size in own),
                units=(*own, (("buffers", id(layer)), buffers, 0)),
                name=type(layer).__name__,
            )
        )
    return costs
