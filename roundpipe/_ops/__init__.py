"""Every operator of ``torch.ops.roundpipe`` as a typed function; failures arrive as the classes of ``errors``.

The functions are in a module for each room; callers take them from here. All of them reach torch through ``_call``.

Handles are integers; a stale or foreign one is a ConfigError. Functions that take ``timeout_ms`` release the
interpreter lock while they wait and return a falsy result on time-out: call them through :func:`wait`, in slices, so
that Ctrl-C ends a wait. Sizes are in bytes. Nothing here synchronises a GPU unless it says so.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundpipe import errors, spans
from roundpipe._library import Poisoned, has_kernels, take_failure
from roundpipe._ops.activations import (
    declare_access,
    fetch_cancel,
    fetch_start,
    fetch_wait,
    recompute_begin,
    recompute_end,
    record_drop,
    record_host,
    record_memory,
    record_order_after_read,
    record_wait,
    stash,
    stash_host,
)
from roundpipe._ops.engine import (
    build_facts,
    cuda_driver,
    engine_bounced_bytes,
    engine_bytes,
    engine_close,
    engine_inject,
    engine_live,
    engine_open,
    engine_poke,
    engine_reports,
    engine_reset_bytes,
    engine_set_region,
    engine_set_stream,
    engine_wait_idle,
    isa_active,
    isa_force,
    isa_names,
    open_engines,
    trace_start,
    trace_stop,
)
from roundpipe._ops.jobs import (
    gradient_pool_close,
    gradient_pool_open,
    gradient_pool_stats,
    job_abort,
    job_close,
    job_forget,
    job_gradients_done,
    job_gradients_update,
    job_open,
    job_wait_gradients,
    job_wait_unit,
    job_weights_done,
    ticket_finish,
    ticket_issue,
    ticket_wait,
    unit_close,
    unit_counters,
    unit_drop_rule,
    unit_new_epoch,
    unit_open,
)
from roundpipe._ops.memory import (
    host_claim,
    host_claim_drop,
    host_claim_stats,
    host_empty,
    host_file_bytes,
    host_limits,
    host_stats,
)
from roundpipe._ops.optimizer import (
    adam_update,
    convert,
    decode_moment,
    encode_moment,
    gradient_stats,
    join_master,
    lion_update,
    sgd_update,
    split_master,
    update_convert,
    update_fused,
    update_square_sum,
    update_wait,
)

__all__ = [
    "Poisoned", "adam_update", "build_facts", "convert", "cuda_driver", "declare_access", "decode_moment",
    "drop_quietly", "encode_moment", "engine_bounced_bytes", "engine_bytes", "engine_close", "engine_inject",
    "engine_live", "engine_open", "engine_poke", "engine_reports", "engine_reset_bytes", "engine_set_region",
    "engine_set_stream", "engine_wait_idle", "fetch_cancel", "fetch_start", "fetch_wait",
    "gradient_pool_close", "gradient_pool_open", "gradient_pool_stats", "gradient_stats", "handle_keeper",
    "has_kernels", "host_claim", "host_claim_drop", "host_claim_stats", "host_empty", "host_file_bytes",
    "host_limits", "host_stats", "isa_active", "isa_force", "isa_names", "job_abort", "job_close",
    "job_forget", "job_gradients_done", "job_gradients_update", "job_open", "job_wait_gradients",
    "job_wait_unit", "job_weights_done", "join_master", "lion_update", "recompute_begin", "recompute_end",
    "record_drop", "record_host", "record_memory", "record_order_after_read", "record_wait", "sgd_update",
    "split_master", "stash", "stash_host", "ticket_finish", "ticket_issue", "ticket_wait", "trace_start",
    "trace_stop", "unit_close", "unit_counters", "unit_drop_rule", "unit_new_epoch", "unit_open",
    "update_convert", "update_fused", "update_square_sum", "update_wait", "wait", "wait_place",
]  # fmt: skip

_SLICE_MS = 100
_namespace = torch.ops.roundpipe


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
    for handle, process in list(open_engines.items()):
        if process == os.getpid():
            drop_quietly(engine_close, handle)


atexit.register(_close_at_exit)
