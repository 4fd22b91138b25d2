"""What the host holds at its most while a model is trained: a pure function of sizes and settings.

Note [Peak of the host]
  Weights, gradients and the optimizer's numbers live as long as the model; activations come and go once a call. Most of
  them are there when forward has ended and backward begins: for every microbatch the inputs that recompute starts from
  (of each stage, or with recompute_grain "layer" of each layer), the input of the fused stage, and the labels. From
  then on a microbatch's gradient takes the place of the input that it was computed with. A tensor that is handed on
  unchanged from layer to layer lies there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .layer_memory import Measured
from .layer_sizes import UnitSize
from .optimizer_format import OptimizerFormat

__all__ = ["HostPeak", "activation_bytes", "predict_host"]

_BOUNCE_BYTES = 3 * (16 << 20)
"""Buffers of a device through which pageable weights go (bounce_buffers)."""


@dataclass(frozen=True, kw_only=True)
class HostPeak:
    """Host memory in bytes, by the categories of ``memory_report()``."""

    weights_bytes: int
    mapped_bytes: int
    """Weights mapped from files, which the system may drop and read again; not part of the total."""
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    other_bytes: int
    """Buffers that copies go through."""
    process_bytes: int
    """The interpreter, the libraries, the contexts of GPUs."""

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.other_bytes
            + self.process_bytes
        )


def predict_host(
    units: Sequence[UnitSize],
    optimizer: OptimizerFormat,
    activations: int,
    *,
    pin_model: str,
    is_async: bool,
    accumulates: bool,
    optim_dtype: torch.dtype | None,
    num_devices: int,
    process_bytes: int,
) -> HostPeak:
    """
    Args:
        activations: as ``activation_bytes`` gives them.
        pin_model: "alloc", "register", or "off"; "off" is taken to mean that frozen weights are mapped from files.
        is_async: steps are asynchronous: a compact optimizer keeps a second copy of the weights.
        accumulates: a step takes the gradients of several calls.
        optim_dtype: of an optimizer on parameters of its own.
    """
    weights = sum(unit.weight_bytes for unit in units)
    mapped = sum(unit.frozen_bytes for unit in units) if pin_model == "off" else 0
    gradients = sum(unit.gradient_bytes for unit in units)
    trained = [unit.trainable for unit in units]
    kept = optimizer.pinned_bytes(trained, optim_dtype) + optimizer.pageable_bytes(trained, optim_dtype)
    if is_async and optimizer.master is not None:
        kept += gradients  # packed as they are
    return HostPeak(
        weights_bytes=weights - mapped,
        mapped_bytes=mapped,
        gradients_bytes=gradients * (2 if accumulates else 1),
        optimizer_bytes=kept,
        activations_bytes=activations,
        other_bytes=_BOUNCE_BYTES * num_devices if pin_model == "off" else 0,
        process_bytes=process_bytes,
    )


def activation_bytes(
    memory: Measured, backward: Sequence[range], num_microbatch: int, grain: str, lowest: int = 0
) -> int:
    """Of a ``forward_backward``, at the end of its forward; see Note [Peak of the host].

    Args:
        memory: of one microbatch.
        backward: the plan's backward stages, the fused one first.
        lowest: the lowest layer that a gradient must reach.
    """
    stages = [stage for stage in backward if stage.stop > lowest] or list(backward[:1])
    fused, recomputed = stages[0], stages[1:]
    if grain == "layer":
        saved = [layer for stage in reversed(recomputed) for layer in stage]
    else:
        saved = sorted(stage.start for stage in recomputed)
    each = _distinct_bytes(memory, [*saved, fused.start]) + memory.label_bytes
    inside = 0
    if grain == "layer":  # of the microbatch that the fused stage is at
        inside = _distinct_bytes(memory, range(fused.start + 1, fused.stop - 1))
    layers = memory.layers
    moving = layers[fused.start].input_grad_bytes  # a gradient is there before its input has gone
    return each * num_microbatch + inside + moving


def _distinct_bytes(memory: Measured, boundaries: Iterable[int]) -> int:
    """Bytes of the tensors at the inputs of these layers (ascending), each counted once."""
    total, before = 0, None
    for layer in boundaries:
        came = memory.layers[layer].input_bytes
        own = came if layer == 0 else memory.layers[layer - 1].output_bytes
        total += own
        # What the layer before only handed on was made further up. It is new here unless a boundary above has it: the
        # one right above always has; of the rest we take it that layer 0 made it.
        if before is None or (before == 0 and layer > 1):
            total += came - own
        before = layer
    return total
