"""Operators over pinned host memory, and weights that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundpipe import _ops


def host_empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A zero-filled host tensor, page-locked for the devices of the newest open engine; it may outlive that engine."""
    return _ops._call("host_empty", size, dtype)


def host_stats() -> list[int]:
    """Reserved, registered, used, quarantined, peak used bytes, and allocations ever; summed over all arenas."""
    return _ops._call("host_stats")


def host_claim(engine: int, tensors: Sequence[Tensor], pin: bool) -> int:
    """Claims contiguous host memory in which weights stay; ``pin`` page-locks it where it is. The claim holds the
    tensors and lives until it is dropped and no unit opened with it does any more.

    Raises HostOutOfMemory, or RoundPipeError for a driver that refuses; nothing is locked then.
    """
    return _ops._call("host_claim", engine, tensors, pin)


def host_claim_drop(claim: int) -> None:
    _ops._call("host_claim_drop", claim)


def host_claim_stats(claim: int) -> list[int]:
    """Bytes registered, pinned by others, pageable, and of these mapped from files; registrations. 0: all claims."""
    return _ops._call("host_claim_stats", claim)


def host_file_bytes(tensors: Sequence[Tensor]) -> int:
    """How many bytes of contiguous host tensors are mapped from files."""
    return _ops._call("host_file_bytes", tensors)


def host_limits() -> list[int]:
    """MemTotal, MemAvailable, limit of the control group (0: none) and its use, what may still be taken, what may still
    be page-locked, and RLIMIT_MEMLOCK, which drivers do not apply. Bytes; 2^62: no limit."""
    return _ops._call("host_limits")
