"""Operators of the optimizer: updates on the queue, steps, norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundpipe import _ops, errors
from roundpipe._library import has_kernels


# -- optimizer queue ---------------------------------------------------------------------------------------------------
def update_convert(
    engine: int,
    ticket: int,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    accumulate: Sequence[int],
    non_finite: Tensor | None = None,
) -> int:
    """Queues ``targets[i] = sources[i]``, or ``+=``, converted, behind ``ticket`` (0: none), whose handle ends.

    ``non_finite`` (uint8, one a source): when the update has ended, 1 where a source holds an infinity or NaN; found in
    the same pass, for float32, bfloat16 and float16 without accumulation.
    """
    return _ops._call("update_convert", engine, ticket, sources, targets, accumulate, non_finite)


def update_fused(
    engine: int,
    tickets: Sequence[int],
    algorithm: str,
    masters: Sequence[Tensor],
    sources: Sequence[Tensor],
    published: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Tensor],
    scales: Sequence[Tensor],
    steps: Sequence[float],
    seeds: Sequence[int],
    groups: Sequence[int],
    options: Sequence[float],
    factor: float,
) -> int:
    """Queues one step in place of ``"adam"``, ``"sgd"`` or ``"lion"`` behind all ``tickets``, whose handles end.

    Lists go position by position, as in :func:`adam_update`, but: a published bfloat16 is rounded as that of a split
    master is (ties away from zero); ``published[i]`` over the memory of ``masters[i]`` means none. ``sources``: where
    weights are read, if not where they are written: the master, or the upper half of a split one. ``moments``: the
    first ones of all tensors, then all second ones, ...; an empty tensor where there is none; uint8
    ones are codes, and ``scales`` (in the same order, or empty) holds their float32 scales, one for 256.
    ``options``: for each group lr, beta1, beta2, eps, weight decay, whether that is decoupled, and maximize (Adam);
    lr, momentum, dampening, weight decay, nesterov, maximize (SGD; step 1 fills the buffer); lr, beta1, beta2, weight
    decay, maximize (Lion).
    Versions are not bumped: nothing here is in a graph.
    """
    return _ops._call(
        "update_fused", engine, tickets, algorithm, masters, sources, published, gradients, moments, scales, steps,
        seeds, groups, options, factor,
    )  # fmt: skip


def update_square_sum(engine: int, tickets: Sequence[int], sources: Sequence[Tensor], sums: Tensor) -> int:
    """Queues the sums of squares (float64) of ``sources``, laid end to end at multiples of 256 elements, one for each
    65,536 elements; infinite or NaN exactly if an element is."""
    return _ops._call("update_square_sum", engine, tickets, sources, sums)


def update_wait(engine: int, update: int, timeout_ms: int) -> bool:
    """Until this update has ended; raises its failure."""
    return _ops._call("update_wait", engine, update, timeout_ms)


def convert(source: Tensor, target: Tensor, accumulate: bool = False) -> None:
    """``target = source``, or ``+=``, converted, at once; contiguous host tensors. Bumps the target's version."""
    _ops._call("convert", source, target, accumulate)
    torch.autograd.graph.increment_version(target)


# -- fused optimizer steps ---------------------------------------------------------------------------------------------
# Of all of these: lists go position by position, and every tensor is contiguous and on the host. ``masters`` are the
# weights: float32, bfloat16 or float16; or int16, the low half of a split master, whose bfloat16 is in ``published``.
# ``published`` (may be empty) gets the new weights, rounded to nearest even. Gradients and moments are float32,
# bfloat16 or float16. ``factor`` multiplies every gradient first. With ``seeds`` (one a tensor) bfloat16 moments are
# rounded stochastically, by a hash of (seed, step, index of the element). Arithmetic is float32. Done on return, on
# torch's threads; versions of what is written are bumped. ConfigError for lists or tensors that do not fit.
def adam_update(
    masters: Sequence[Tensor],
    published: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool = False,
    factor: float = 1.0,
    seeds: Sequence[int] = (),
) -> None:
    """One step of Adam, or of AdamW if ``decoupled``. ``steps`` count this step; no ``max_exp_avg_sqs``: no amsgrad."""
    _ops._call(
        "adam_update", masters, published, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, lr, beta1, beta2,
        eps, weight_decay, decoupled, maximize, factor, seeds,
    )  # fmt: skip
    _bump(masters, published, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)


def sgd_update(
    masters: Sequence[Tensor],
    published: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    first: Sequence[int],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool = False,
    factor: float = 1.0,
    seeds: Sequence[int] = (),
    steps: Sequence[float] = (),
) -> None:
    """One step of SGD. Where ``first[i]``, the buffer becomes the gradient; without momentum both lists are empty."""
    _ops._call(
        "sgd_update", masters, published, gradients, momentum_buffers, first, lr, momentum, dampening, weight_decay,
        nesterov, maximize, factor, seeds, steps,
    )  # fmt: skip
    _bump(masters, published, momentum_buffers)


def lion_update(
    masters: Sequence[Tensor],
    published: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool = False,
    factor: float = 1.0,
    seeds: Sequence[int] = (),
    steps: Sequence[float] = (),
) -> None:
    """One step of Lion, with decoupled decay. A gradient that is NaN makes the weight NaN."""
    _ops._call(
        "lion_update", masters, published, gradients, exp_avgs, lr, beta1, beta2, weight_decay, maximize, factor, seeds,
        steps,
    )  # fmt: skip
    _bump(masters, published, exp_avgs)


def split_master(source: Tensor, upper: Tensor, low: Tensor) -> None:
    """float32 into the bfloat16 nearest to it (ties away from zero) and the int16 that makes it exact again."""
    _ops._call("split_master", source, upper, low)
    _bump([upper, low])


def join_master(upper: Tensor, low: Tensor, target: Tensor) -> None:
    """The float32 of a split master: ``target``'s bits are ``(upper's bits << 16) + low``."""
    _ops._call("join_master", upper, low, target)
    _bump([target])


def encode_moment(source: Tensor, codes: Tensor, scales: Tensor, moment: int) -> None:
    """float32 into eight-bit codes (uint8) and a float32 scale for every 256 of them; all flat and contiguous.

    ``moment``: 0 has signed codes (errors up to 0.7 % of the block's largest magnitude, and far less near 0), 1 and 2
    have unsigned ones. A block with a value that is not finite becomes NaN.
    """
    _ops._call("encode_moment", source, codes, scales, moment)
    _bump([codes, scales])


def decode_moment(codes: Tensor, scales: Tensor, target: Tensor, moment: int) -> None:
    """The float32 values that eight-bit codes stand for."""
    _ops._call("decode_moment", codes, scales, target, moment)
    _bump([target])


def _bump(*written: Sequence[Tensor]) -> None:
    for tensors in written:
        torch.autograd.graph.increment_version(tensors)


# -- gradients ---------------------------------------------------------------------------------------------------------
def gradient_stats(region: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum of squares and number of non-finite elements of a packed region read as ``dtype``, in one deterministic pass.

    Args:
        region: contiguous, any dtype (usually uint8), a multiple of the element size long, at a multiple of 16 bytes.
        dtype: float32, bfloat16 or float16.

    Returns two float64 on the region's device, on its current stream; nothing is synchronised. Without the kernels, and
    on the CPU, torch operators do the same in pieces.
    """
    if region.is_cuda and has_kernels():
        return _ops._call("gradient_stats", region, dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise errors.ConfigError(f"gradient_stats: argument 'dtype': expected a float of 2 or 4 bytes, got {dtype}")
    stats = torch.zeros(2, dtype=torch.float64, device=region.device)
    for piece in region.detach().flatten().view(dtype).split(1 << 22):  # bounds the float64 copy to 32 MiB
        wide = piece.double()
        stats[0] += wide.square().sum()
        stats[1] += wide.isfinite().logical_not().sum()
    return stats
