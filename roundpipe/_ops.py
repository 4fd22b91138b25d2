"""Every operator of ``torch.ops.roundpipe`` as a typed function; failures arrive as the classes of ``errors``.

Handles are integers; a stale or foreign one is a ConfigError. Functions that take ``timeout_ms`` release the
interpreter lock while they wait and return a falsy result on time-out: call them through :func:`wait`, in slices, so
that Ctrl-C ends a wait. Sizes are in bytes. Nothing here synchronises a GPU unless it says so.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from roundpipe import errors, spans
from roundpipe._library import Poisoned, has_kernels, take_failure

__all__ = ["Poisoned", "drop_quietly", "has_kernels", "wait", "wait_place"]

_SLICE_MS = 100
_namespace = torch.ops.roundpipe
_open_engines: dict[int, int] = {}  # handle -> process that opened it


def _call(name: str, *args: Any) -> Any:
    try:
        return getattr(_namespace, name).default(*args)
    except RuntimeError as error:
        failure = take_failure(error)
        if failure is None:
            raise
    raise failure


def wait(
    fn: Callable[..., Any], *args: Any, timeout_s: float | None = None, check: Callable[[], None] | None = None
) -> Any:
    """Calls ``fn(*args, timeout_ms)`` in slices of 100 ms until it is done and returns its result.

    ``check()`` runs between slices and may raise to end the wait. Raises StallError after ``timeout_s`` seconds.
    """
    if spans.active is not None:
        with spans.span("wait", fn.__name__):
            return _wait(fn, args, timeout_s, check)
    return _wait(fn, args, timeout_s, check)


def _wait(
    fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float | None, check: Callable[[], None] | None
) -> Any:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        slice_ms = _SLICE_MS
        if deadline is not None:
            slice_ms = max(0, min(slice_ms, int((deadline - time.monotonic()) * 1000)))
        result = fn(*args, slice_ms)
        if result[0] if isinstance(result, list) else result:
            return result
        if check is not None:
            check()
        if deadline is not None and time.monotonic() >= deadline:
            raise errors.StallError(f"{getattr(fn, '__name__', fn)} did not finish within {timeout_s} s")


def wait_place(job: int, index: int, check: Callable[[], None] | None = None) -> tuple[int, int]:
    """Waits for a job's unit; (offset of its weights, offset of its gradients or -1) in the device's region."""
    _, weights, gradients = wait(job_wait_unit, job, index, check=check)
    return weights, gradients


def handle_keeper(*handles: int) -> Tensor:
    """A small tensor; with its last reference ``handles`` end, those that have not ended by then.

    For owners of handles in place of ``__del__`` and ``weakref.finalize``: a Ctrl-C that comes where Python is about to
    run those is raised in them, Python drops it there, and the handles would stay for ever.
    """
    return _call("handle_keeper", handles)


def drop_quietly(fn: Callable[..., Any], *args: Any) -> None:
    """For clean-up that must not fail: the handle may have ended in another way."""
    with contextlib.suppress(errors.RoundPipeError):
        fn(*args)


def _close_at_exit() -> None:
    # A forked child inherits this handler but not the engine's threads. Closing is bounded in time by the operator.
    for handle, process in list(_open_engines.items()):
        if process == os.getpid():
            drop_quietly(engine_close, handle)


atexit.register(_close_at_exit)


# -- host memory -------------------------------------------------------------------------------------------------------
def host_empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zero-filled host tensor, page-locked for the devices of the newest open engine; it may outlive that engine."""
    return _call("host_empty", size, dtype)


def host_stats() -> list[int]:
    """Reserved, registered, used, quarantined, peak used bytes, and allocations ever; summed over all arenas."""
    return _call("host_stats")


def host_claim(engine: int, tensors: Sequence[Tensor], pin: bool) -> int:
    """Claims contiguous host memory in which weights stay; ``pin`` page-locks it where it is. The claim holds the
    tensors and lives until it is dropped and no unit opened with it does any more.

    Raises HostOutOfMemory, or RoundPipeError for a driver that refuses; nothing is locked then.
    """
    return _call("host_claim", engine, tensors, pin)


def host_claim_drop(claim: int) -> None:
    _call("host_claim_drop", claim)


def host_claim_stats(claim: int) -> list[int]:
    """Bytes registered, pinned by others, pageable, and of these mapped from files; registrations. 0: all claims."""
    return _call("host_claim_stats", claim)


def host_file_bytes(tensors: Sequence[Tensor]) -> int:
    """How many bytes of contiguous host tensors are mapped from files."""
    return _call("host_file_bytes", tensors)


def host_limits() -> list[int]:
    """MemTotal, MemAvailable, limit of the control group (0: none) and its use, what may still be taken, what may still
    be page-locked, and RLIMIT_MEMLOCK, which drivers do not apply. Bytes; 2^62: no limit."""
    return _call("host_limits")


# -- engine and devices ------------------------------------------------------------------------------------------------
def engine_open(kind: str, devices: Sequence[int], memory_limit_bytes: int = 0, check: bool = False) -> int:
    """Opens an engine over GPUs (``"cuda"``, driver ordinals) or simulated devices (``"host"``, 0..n-1)."""
    handle = _call("engine_open", kind, devices, memory_limit_bytes, check)
    _open_engines[handle] = os.getpid()
    return handle


def engine_close(engine: int) -> None:
    """Aborts open jobs, poisons pending updates and stops all threads; at most about 15 s."""
    _open_engines.pop(engine, None)
    _call("engine_close", engine)


def engine_set_stream(engine: int, device: int, stream: int) -> None:
    """The native stream (``torch.cuda.Stream.cuda_stream``) on which compute is launched; only while no job is open."""
    _call("engine_set_stream", engine, device, stream)


def engine_set_region(engine: int, device: int, region: Tensor) -> None:
    """Lends device memory (uint8) for weights and gradients; held until replaced or closed. No job may be open."""
    _call("engine_set_region", engine, device, region)


def engine_bytes(engine: int, device: int) -> list[int]:
    """Bytes copied: up by weights, gradients, activations, buffers, inputs, then down by the same."""
    return _call("engine_bytes", engine, device)


def engine_bounced_bytes(engine: int, device: int) -> int:
    """Bytes of weights that went up through bounce buffers since the last reset."""
    return _call("engine_bounced_bytes", engine, device)


def engine_reset_bytes(engine: int) -> None:
    """Sets the counters of :func:`engine_bytes` to 0 on every device."""
    _call("engine_reset_bytes", engine)


def engine_poke(engine: int) -> None:
    """Makes every lane look again whether its next copy is ready."""
    _call("engine_poke", engine)


def engine_wait_idle(engine: int, timeout_ms: int) -> bool:
    """Until no job is open and no copy is under way."""
    return _call("engine_wait_idle", engine, timeout_ms)


def engine_reports(engine: int) -> str:
    """Races that the happens-before checker found since the last call, one a line."""
    return _call("engine_reports", engine)


def engine_inject(engine: int, what: str, a: int, b: int = 0) -> None:
    """Tests on simulated devices: ``"delay"`` (seed, at most us) or ``"fail_copy"`` (after n more copies)."""
    _call("engine_inject", engine, what, a, b)


def engine_live(engine: int) -> list[int]:
    """Records, their bytes, the peak of those, open jobs, live handles."""
    return _call("engine_live", engine)


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
    return _call("unit_open", engine, weights, offsets, weight_bytes, gradient_bytes, claim)


def unit_close(unit: int) -> None:
    """Ends the handle; jobs that use the unit keep it alive."""
    _call("unit_close", unit)


def unit_counters(unit: int) -> list[int]:
    """Issued tickets by kind (upload, publish, gradient load, write, take), then completed ones."""
    return _call("unit_counters", unit)


def unit_new_epoch(unit: int) -> None:
    """Ends the effect of poisoned tickets; every issued ticket must be finished."""
    _call("unit_new_epoch", unit)


def unit_drop_rule(unit: int, rule: int) -> None:
    """Tests: rule 1..5 no longer waits."""
    _call("unit_drop_rule", unit, rule)


def ticket_issue(unit: int, kind: int) -> int:
    """The next ticket of a kind (0 upload, 1 publish, 2 gradient load, 3 gradient write, 4 gradient take)."""
    return _call("ticket_issue", unit, kind)


def ticket_wait(ticket: int, timeout_ms: int) -> int:
    """0 still waiting, 1 ready, 2 poisoned."""
    return _call("ticket_wait", ticket, timeout_ms)


def ticket_finish(ticket: int, poisoned: bool) -> None:
    """Completes or poisons the ticket and ends its handle."""
    _call("ticket_finish", ticket, poisoned)


# -- gradient pools ----------------------------------------------------------------------------------------------------
def gradient_pool_open(engine: int, memory: Tensor) -> int:
    """Pinned memory (uint8) for gradients between download and update; held as long as anything lies in it."""
    return _call("gradient_pool_open", engine, memory)


def gradient_pool_close(pool: int) -> None:
    _call("gradient_pool_close", pool)


def gradient_pool_stats(pool: int) -> list[int]:
    """Bytes, used bytes, most ever used, places ever taken, requests for which there was no room at that moment."""
    return _call("gradient_pool_stats", pool)


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
    return _call("job_open", engine, device, units, loads, stores, pooled, pool)


def job_wait_unit(job: int, index: int, timeout_ms: int) -> list[int]:
    """[done, offset of the weights, offset of the gradients or -1] in the region; compute goes on after the copy."""
    return _call("job_wait_unit", job, index, timeout_ms)


def job_weights_done(job: int, index: int) -> None:
    """No compute launched from now on reads these weights."""
    _call("job_weights_done", job, index)


def job_gradients_done(job: int, index: int) -> None:
    """The gradients are final after what is launched: they start down."""
    _call("job_gradients_done", job, index)


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
    return _call(
        "job_gradients_update", job, index, tickets, algorithm, masters, sources, published, gradients, offsets,
        moments, scales, steps, seeds, groups, options, factor,
    )  # fmt: skip


def job_close(job: int) -> None:
    """Ends the job; gradients never handed over are poisoned. The handle stays until :func:`job_forget`."""
    _call("job_close", job)


def job_abort(job: int) -> None:
    """Ends a job that failed or will not run; legal in any state."""
    _call("job_abort", job)


def job_wait_gradients(job: int, timeout_ms: int) -> bool:
    """Until every download handed over is on the host; raises the first failure among them."""
    return _call("job_wait_gradients", job, timeout_ms)


def job_forget(job: int) -> None:
    """Ends the handle of a closed or aborted job; downloads under way go on."""
    _call("job_forget", job)


# -- activations -------------------------------------------------------------------------------------------------------
def stash(engine: int, device: int, tensors: Sequence[Tensor], traffic: int, seed: int) -> int:
    """Starts the copy of contiguous device tensors to the host and holds them until it is seen complete."""
    return _call("stash", engine, device, tensors, traffic, seed)


def stash_host(engine: int, tensors: Sequence[Tensor]) -> int:
    """A record of contiguous host tensors, copied before this returns."""
    return _call("stash_host", engine, tensors)


def record_order_after_read(record: int, device: int, timeout_ms: int) -> bool:
    """Compute goes on only after the record's sources were read, for a source that is about to be overwritten."""
    return _call("record_order_after_read", record, device, timeout_ms)


def record_wait(record: int, timeout_ms: int) -> bool:
    """Until all bytes are on the host."""
    return _call("record_wait", record, timeout_ms)


def record_host(record: int) -> list[Tensor]:
    """After :func:`record_wait`: tensors over the record's memory, which they keep; two calls alias each other."""
    return _call("record_host", record)


def record_memory(record: int) -> list[Tensor]:
    """The tensors of ``record_host`` before their bytes have come; nobody may read them before ``record_wait``."""
    return _call("record_memory", record)


def record_drop(record: int) -> None:
    """Ends the handle; the memory goes when its last reader has."""
    _call("record_drop", record)


def fetch_start(engine: int, device: int, record: int, targets: Sequence[Tensor], traffic: int) -> int:
    """Starts the copy of a record into device tensors of the same sizes in bytes, and holds them."""
    return _call("fetch_start", engine, device, record, targets, traffic)


def fetch_wait(fetch: int, timeout_ms: int) -> bool:
    """Until compute can go on after the copy; the handle ends then (not when this raises: cancel it)."""
    return _call("fetch_wait", fetch, timeout_ms)


def fetch_cancel(fetch: int) -> None:
    """Ends the handle; a copy under way still holds its targets."""
    _call("fetch_cancel", fetch)


def recompute_begin(engine: int, device: int, record: int, targets: Sequence[Tensor]) -> int:
    """Starts to fetch what one layer's recompute needs."""
    return _call("recompute_begin", engine, device, record, targets)


def recompute_end(recompute: int, timeout_ms: int) -> list[int]:
    """[done, seed given to :func:`stash`]; when done, both this handle and the record's have ended."""
    return _call("recompute_end", recompute, timeout_ms)


def declare_access(engine: int, device: int, tensor: Tensor, write: bool) -> None:
    """Tells the checker of simulated devices that compute reads or writes a tensor; a GPU does nothing."""
    _call("declare_access", engine, device, tensor, write)


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
    return _call("update_convert", engine, ticket, sources, targets, accumulate, non_finite)


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
    return _call(
        "update_fused", engine, tickets, algorithm, masters, sources, published, gradients, moments, scales, steps,
        seeds, groups, options, factor,
    )  # fmt: skip


def update_square_sum(engine: int, tickets: Sequence[int], sources: Sequence[Tensor], sums: Tensor) -> int:
    """Queues the sums of squares (float64) of ``sources``, laid end to end at multiples of 256 elements, one for each
    65,536 elements; infinite or NaN exactly if an element is."""
    return _call("update_square_sum", engine, tickets, sources, sums)


def update_wait(engine: int, update: int, timeout_ms: int) -> bool:
    """Until this update has ended; raises its failure."""
    return _call("update_wait", engine, update, timeout_ms)


def convert(source: Tensor, target: Tensor, accumulate: bool = False) -> None:
    """``target = source``, or ``+=``, converted, at once; contiguous host tensors. Bumps the target's version."""
    _call("convert", source, target, accumulate)
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
    _call(
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
    _call(
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
    _call(
        "lion_update", masters, published, gradients, exp_avgs, lr, beta1, beta2, weight_decay, maximize, factor, seeds,
        steps,
    )  # fmt: skip
    _bump(masters, published, exp_avgs)


def split_master(source: Tensor, upper: Tensor, low: Tensor) -> None:
    """float32 into the bfloat16 nearest to it (ties away from zero) and the int16 that makes it exact again."""
    _call("split_master", source, upper, low)
    _bump([upper, low])


def join_master(upper: Tensor, low: Tensor, target: Tensor) -> None:
    """The float32 of a split master: ``target``'s bits are ``(upper's bits << 16) + low``."""
    _call("join_master", upper, low, target)
    _bump([target])


def encode_moment(source: Tensor, codes: Tensor, scales: Tensor, moment: int) -> None:
    """float32 into eight-bit codes (uint8) and a float32 scale for every 256 of them; all flat and contiguous.

    ``moment``: 0 has signed codes (errors up to 0.7 % of the block's largest magnitude, and far less near 0), 1 and 2
    have unsigned ones. A block with a value that is not finite becomes NaN.
    """
    _call("encode_moment", source, codes, scales, moment)
    _bump([codes, scales])


def decode_moment(codes: Tensor, scales: Tensor, target: Tensor, moment: int) -> None:
    """The float32 values that eight-bit codes stand for."""
    _call("decode_moment", codes, scales, target, moment)
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
        return _call("gradient_stats", region, dtype)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise errors.ConfigError(f"gradient_stats: argument 'dtype': expected a float of 2 or 4 bytes, got {dtype}")
    stats = torch.zeros(2, dtype=torch.float64, device=region.device)
    for piece in region.detach().flatten().view(dtype).split(1 << 22):  # bounds the float64 copy to 32 MiB
        wide = piece.double()
        stats[0] += wide.square().sum()
        stats[1] += wide.isfinite().logical_not().sum()
    return stats


# -- facts and trace ---------------------------------------------------------------------------------------------------
def build_facts() -> str:
    """How the library was built, one fact a line."""
    return _call("build_facts")


def cuda_driver() -> str:
    """Empty when a CUDA driver can be used, else why not."""
    return _call("cuda_driver")


def isa_names() -> list[str]:
    """Instruction sets that this CPU supports, best first."""
    return _call("isa_names").split(",")


def isa_active() -> str:
    """The instruction set in use."""
    return _call("isa_active")


def isa_force(name: str) -> None:
    """Uses the named instruction set; ``""`` goes back to the automatic choice."""
    _call("isa_force", name)


def trace_start(capacity: int) -> None:
    """Records the newest ``capacity`` spans from now on."""
    _call("trace_start", capacity)


def trace_stop() -> tuple[list[list[str]], dict[str, tuple[int, str]]]:
    """Spans, oldest first: kind, name, track, begin and end in ns, argument; and (thread id, name) by track."""
    lines = [line.split("\t") for line in _call("trace_stop").splitlines()]
    threads = {track: (int(thread), name) for kind, name, track, *rest in lines if kind == "thread" for thread in rest}
    return [line for line in lines if line[0] != "thread"], threads
