"""Copies between a device and pinned host memory that autograd and ``torch.compile(fullgraph=True)`` understand.

A copy is a pair of calls. The start returns a *ticket* (a 0-dim int64 tensor on the CPU) and does not wait; the wait
returns the copied tensor once the copy is complete. Between them the source must not be written. Results alias
nothing; waiting twice for one ticket is legal and gives a second tensor. The gradient of a copy is the copy back.

A tensor on the CPU goes through a simulated device. A ticket that nobody waits for is forgotten when it dies.
"""

from __future__ import annotations

import atexit
from typing import Any

import torch
from torch import Tensor

from roundpipe import _autograd, _fakes, _ops  # noqa: F401  registrations
from roundpipe.models import linear_cross_entropy  # noqa: F401  registers the operator

__all__ = ["offload_start", "offload_wait", "reload_start", "reload_wait"]


def _call(name: str, *args: Any) -> Any:
    if torch.compiler.is_compiling():
        return getattr(torch.ops.roundpipe, name)(*args)
    return _ops._call(name, *args)


def offload_start(x: Tensor) -> Tensor:
    """Starts the copy of ``x`` to the host, after what the current stream has so far; returns the ticket.

    Blocks only while more than 1 GiB of such copies is under way on the device.

    Raises:
        ConfigError: ``x`` is sparse, or on a device that is neither the CPU nor a CUDA device.
        HostOutOfMemory: there is no host memory left for it.
    """
    return _call("offload_start", x)


def offload_wait(ticket: Tensor, x: Tensor) -> Tensor:
    """Waits for the copy that :func:`offload_start` began with this same ``x``; a pinned host tensor like ``x``.

    Raises:
        ConfigError: ``ticket`` is none of an offload of such a tensor.
    """
    return _call("offload_wait", ticket, x)


def reload_start(host: Tensor, device: torch.device | str) -> Tensor:
    """Starts the copy of a host tensor to ``device``, into memory of the current stream; returns the ticket."""
    return _call("reload_start", host, torch.device(device))


def reload_wait(ticket: Tensor, host: Tensor, device: torch.device | str) -> Tensor:
    """Waits for the copy that :func:`reload_start` began with this same ``host``; a tensor like it on ``device``.

    Raises:
        ConfigError: ``ticket`` is none of a reload of such a tensor to this device.
    """
    return _call("reload_wait", ticket, host, torch.device(device))


def _close_at_exit() -> None:
    _ops.drop_quietly(_ops._call, "data_plane_close", 5000)


atexit.register(_close_at_exit)
