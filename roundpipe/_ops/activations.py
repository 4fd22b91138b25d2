"""Operators that keep activations on the host and bring them back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from roundpipe import _ops


def stash(engine: int, device: int, tensors: Sequence[Tensor], traffic: int, seed: int) -> int:
    """Starts the copy of contiguous device tensors to the host and holds them until it is seen complete."""
    return _ops._call("stash", engine, device, tensors, traffic, seed)


def stash_host(engine: int, tensors: Sequence[Tensor]) -> int:
    """A record of contiguous host tensors, copied before this returns."""
    return _ops._call("stash_host", engine, tensors)


def record_order_after_read(record: int, device: int, timeout_ms: int) -> bool:
    """Compute goes on only after the record's sources were read, for a source that is about to be overwritten."""
    return _ops._call("record_order_after_read", record, device, timeout_ms)


def record_wait(record: int, timeout_ms: int) -> bool:
    """Until all bytes are on the host."""
    return _ops._call("record_wait", record, timeout_ms)


def record_host(record: int) -> list[Tensor]:
    """After :func:`record_wait`: tensors over the record's memory, which they keep; two calls alias each other."""
    return _ops._call("record_host", record)


def record_memory(record: int) -> list[Tensor]:
    """The tensors of ``record_host`` before their bytes have come; nobody may read them before ``record_wait``."""
    return _ops._call("record_memory", record)


def record_drop(record: int) -> None:
    """Ends the handle; the memory goes when its last reader has."""
    _ops._call("record_drop", record)


def fetch_start(engine: int, device: int, record: int, targets: Sequence[Tensor], traffic: int) -> int:
    """Starts the copy of a record into device tensors of the same sizes in bytes, and holds them."""
    return _ops._call("fetch_start", engine, device, record, targets, traffic)


def fetch_wait(fetch: int, timeout_ms: int) -> bool:
    """Until compute can go on after the copy; the handle ends then (not when this raises: cancel it)."""
    return _ops._call("fetch_wait", fetch, timeout_ms)


def fetch_cancel(fetch: int) -> None:
    """Ends the handle; a copy under way still holds its targets."""
    _ops._call("fetch_cancel", fetch)


def recompute_begin(engine: int, device: int, record: int, targets: Sequence[Tensor]) -> int:
    """Starts to fetch what one layer's recompute needs."""
    return _ops._call("recompute_begin", engine, device, record, targets)


def recompute_end(recompute: int, timeout_ms: int) -> list[int]:
    """[done, seed given to :func:`stash`]; when done, both this handle and the record's have ended."""
    return _ops._call("recompute_end", recompute, timeout_ms)


def declare_access(engine: int, device: int, tensor: Tensor, write: bool) -> None:
    """Tells the checker of simulated devices that compute reads or writes a tensor; a GPU does nothing."""
    _ops._call("declare_access", engine, device, tensor, write)
