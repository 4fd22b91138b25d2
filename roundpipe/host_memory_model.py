"""What the host holds at its most while a model is trained: a pure function of sizes and settings.

Note [Peak of the host]
  Weights, gradients and the optimizer's numbers live as long as the model; activations come and go once a call. Most of
  them are there when forward has ended and backward begins: for every microbatch the inputs that recompute starts from
  (of each stage, or with recompute_grain "layer" of each layer), the input of the fused stage, and the labels. From
  then on a microbatch's gradient takes the place of the input that it was computed with. A tensor that is handed on
  unchanged from layer to layer lies there once.
  Where nothing waits for the end of a call (an asynchronous step, a compact optimizer's exact one), the arguments and
  labels of the next call come while all backward stages but the fused one are still ahead: then labels have gone, and
  each input that recompute starts from is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .gradient_pool import pool_bytes
from .layer_memory import Measured
from .layer_sizes import UnitSize
from .optimizer_format import OptimizerFormat

__all__ = ["STEPS", "HostPeak", "activation_bytes", "gradient_bytes", "predict_host"]

STEPS = ("async", "exact", "announced")
"""Kinds of steps, from the one that takes most of the host to the one that takes least."""

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
    """With the states of an optimizer that is not compact, which the report tells apart."""
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
    gradients: int,
    activations: int,
    *,
    pin_model: str,
    steps: str,
    optim_dtype: torch.dtype | None,
    num_devices: int,
    process_bytes: int,
) -> HostPeak:
    """
    Args:
        gradients, activations: as ``gradient_bytes`` and ``activation_bytes`` give them.
        pin_model: "alloc", "register", or "off"; "off" is taken to mean that frozen weights are mapped from files.
        steps: one of ``STEPS``. For asynchronous ones a compact optimizer keeps a second copy of the weights.
        optim_dtype: of an optimizer on parameters of its own.
    """
    weights = sum(unit.weight_bytes for unit in units)
    mapped = sum(unit.frozen_bytes for unit in units) if pin_model == "off" else 0
    trained = [unit.trainable for unit in units]
    kept = optimizer.pinned_bytes(trained, optim_dtype) + optimizer.pageable_bytes(trained, optim_dtype)
    if steps == "async" and optimizer.master is not None:
        kept += sum(unit.gradient_bytes for unit in units)  # weights packed as gradients are
    return HostPeak(
        weights_bytes=weights - mapped,
        mapped_bytes=mapped,
        gradients_bytes=gradients,
        optimizer_bytes=kept,
        activations_bytes=activations,
        other_bytes=_BOUNCE_BYTES * num_devices if pin_model == "off" else 0,
        process_bytes=process_bytes,
    )


def gradient_bytes(
    units: Sequence[UnitSize], backward: Sequence[range], *, steps: str, accumulates: bool, num_devices: int
) -> int:
    """Of gradient images, and of the pool through which those of announced steps pass (Note [Gradients in passing]).

    Args:
        backward: the plan's backward stages; a unit that several of them write keeps an image.
        accumulates: a step takes the gradients of several calls. Announced ones are taken to be three or more: two keep
            one image less.
    """
    trained = [unit for unit in units if unit.gradient_bytes]
    images = 2 if accumulates else 1
    if steps != "announced":
        return images * sum(unit.gradient_bytes for unit in trained)
    passing = [u for u in trained if sum(not set(stage).isdisjoint(u.layers) for stage in backward) == 1]
    pool = pool_bytes([unit.gradient_bytes for unit in passing], num_devices)
    kept = passing if accumulates else []
    shared = [unit for unit in trained if unit not in passing]
    return pool + images * sum(unit.gradient_bytes for unit in (*shared, *kept))


def activation_bytes(
    memory: Measured,
    backward: Sequence[range],
    num_microbatch: int,
    grain: str,
    lowest: int = 0,
    *,
    overlaps: bool = False,
) -> int:
    """Of a ``forward_backward``, at the end of its forward or the beginning of the next; see Note [Peak of the host].

    Args:
        memory: of one microbatch.
        backward: the plan's backward stages, the fused one first.
        lowest: the lowest layer that a gradient must reach.
        overlaps: the next call comes before this one has ended.
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
    at_the_end = each * num_microbatch + inside + moving
    if not overlaps:
        return at_the_end
    kept = _distinct_bytes(memory, saved) + layers[fused.start].input_grad_bytes if recomputed else 0
    last = layers[fused.start].input_bytes  # of the microbatch whose loss came last, in its backward
    return max(at_the_end, (kept + layers[0].input_bytes + memory.label_bytes) * num_microbatch + last)


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
