"""Operators of units, tickets, gradient pools and jobs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from roundpipe import _ops


# -- units and tickets -------------------------------------------------------------------------------------------------
def unit_open(
    engine: int,
    weights: Sequence[Tensor],
    offsets: Sequence[int],
    weight_bytes: int,
    gradient_bytes: int,
    claim: int = 0,
) -> int:
    """Weights that always move together: contiguous host tensors at ``offsets`` of a packed image; holds them.

    ``claim``: of whose memory they are; 0: all of them lie in pinned memory.
    """
    return _ops._call("unit_open", engine, weights, offsets, weight_bytes, gradient_bytes, claim)


def unit_close(unit: int) -> None:
    """Ends the handle; jobs that use the unit keep it alive."""
    _ops._call("unit_close", unit)


def unit_counters(unit: int) -> list[int]:
    """Issued tickets by kind (upload, publish, gradient load, write, take), then completed ones."""
    return _ops._call("unit_counters", unit)


def unit_new_epoch(unit: int) -> None:
    """Ends the effect of poisoned tickets; every issued ticket must be finished."""
    _ops._call("unit_new_epoch", unit)


def unit_drop_rule(unit: int, rule: int) -> None:
    """Tests: rule 1..5 no longer waits."""
    _ops._call("unit_drop_rule", unit, rule)


def ticket_issue(unit: int, kind: int) -> int:
    """The next ticket of a kind (0 upload, 1 publish, 2 gradient load, 3 gradient write, 4 gradient take)."""
    return _ops._call("ticket_issue", unit, kind)


def ticket_wait(ticket: int, timeout_ms: int) -> int:
    """0 still waiting, 1 ready, 2 poisoned."""
    return _ops._call("ticket_wait", ticket, timeout_ms)


def ticket_finish(ticket: int, poisoned: bool) -> None:
    """Completes or poisons the ticket and ends its handle."""
    _ops._call("ticket_finish", ticket, poisoned)


# -- gradient pools ----------------------------------------------------------------------------------------------------
def gradient_pool_open(engine: int, memory: Tensor) -> int:
    """Pinned memory (uint8) for gradients between download and update; held as long as anything lies in it."""
    return _ops._call("gradient_pool_open", engine, memory)


def gradient_pool_close(pool: int) -> None:
    _ops._call("gradient_pool_close", pool)


def gradient_pool_stats(pool: int) -> list[int]:
    """Bytes, used bytes, most ever used, places ever taken, requests for which there was no room at that moment."""
    return _ops._call("gradient_pool_stats", pool)


# -- jobs --------------------------------------------------------------------------------------------------------------
def job_open(
    engine: int,
    device: int,
    units: Sequence[int],
    loads: Sequence[Tensor],
    stores: Sequence[Tensor],
    pooled: Sequence[int] = (),
    pool: int = 0,
) -> int:
    """Takes the tickets of a stage's units, in this order, and queues their uploads.

    ``loads`` and ``stores``, one a unit: the host gradient image (uint8) to start from and to write; empty for none.
    ``pooled``: positions of units with an empty store whose gradients come down to places of ``pool``.
    """
    return _ops._call("job_open", engine, device, units, loads, stores, pooled, pool)


def job_wait_unit(job: int, index: int, timeout_ms: int) -> list[int]:
    """[done, offset of the weights, offset of the gradients or -1] in the region; compute goes on after the copy."""
    return _ops._call("job_wait_unit", job, index, timeout_ms)


def job_weights_done(job: int, index: int) -> None:
    """No compute launched from now on reads these weights."""
    _ops._call("job_weights_done", job, index)


def job_gradients_done(job: int, index: int) -> None:
    """The gradients are final after what is launched: they start down."""
    _ops._call("job_gradients_done", job, index)


def job_gradients_update(
    job: int,
    index: int,
    tickets: Sequence[int],
    algorithm: str,
    masters: Sequence[Tensor],
    sources: Sequence[Tensor],
    published: Sequence[Tensor],
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    moments: Sequence[Tensor],
    scales: Sequence[Tensor],
    steps: Sequence[float],
    seeds: Sequence[int],
    groups: Sequence[int],
    options: Sequence[float],
    factor: float,
) -> int:
    """As :func:`job_gradients_done`, and queues :func:`update_fused` as soon as the gradients are on the host.

    For a pooled unit ``offsets`` says where each gradient lies in the unit's place, in bytes, and ``gradients`` are any
    tensors of the same dtypes and sizes; else it is empty. Gives the update's number, for :func:`update_wait`. The
    tickets' handles end, unless an argument is refused.
    """
    return _ops._call(
        "job_gradients_update", job, index, tickets, algorithm, masters, sources, published, gradients, offsets,
        moments, scales, steps, seeds, groups, options, factor,
    )  # fmt: skip


def job_close(job: int) -> None:
    """Ends the job; gradients never handed over are poisoned. The handle stays until :func:`job_forget`."""
    _ops._call("job_close", job)


def job_abort(job: int) -> None:
    """Ends a job that failed or will not run; legal in any state."""
    _ops._call("job_abort", job)


def job_wait_gradients(job: int, timeout_ms: int) -> bool:
    """Until every download handed over is on the host; raises the first failure among them."""
    return _ops._call("job_wait_gradients", job, timeout_ms)


def job_forget(job: int) -> None:
    """Ends the handle of a closed or aborted job; downloads under way go on."""
    _ops._call("job_forget", job)
