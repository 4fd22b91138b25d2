"""Tensors that layers hand on unchanged (attention masks, position embeddings, labels), kept on a device for a call.

Note [Passed on]
  A tensor of a boundary that a stage's layers return as they got it is the same ``HostTensor`` at the next boundary. It
  goes down once. Without more it would come up again for every stage of every microbatch, forward and backward. So the
  first stage that hands it on marks it, and each device keeps its copy of a marked tensor for its later jobs of the
  same call: it comes up once a device. What is handed out is an alias, whose writes are seen by its own version; the
  copy is forgotten as soon as a layer or the loss has written it, and the next job gets the values from the host again.

  A copy goes with its ``HostTensor``, when no job to come needs it, and at the latest with the device's last job of the
  call. On a GPU that is safe from any thread: it was allocated and is used on the worker's stream alone. Copies take no
  more than ``KEPT_SHARE`` of the device, which the tenth that plans leave free has room for; what does not fit comes up
  again each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .boundary import HostTensor

__all__ = ["KEPT_SHARE", "PassedOn"]

KEPT_SHARE = 0.05  # of a device's memory, for one call


class PassedOn:
    """The copies that one device keeps for one call. Used by that device's worker; ends of host tensors, on whatever
    thread, only remove entries."""

    def __init__(self, memory_bytes: int | None) -> None:
        """memory_bytes: of the device; None: no limit."""
        self._limit_bytes = None if memory_bytes is None else int(memory_bytes * KEPT_SHARE)
        self._kept: weakref.WeakKeyDictionary[HostTensor, torch.Tensor] = weakref.WeakKeyDictionary()

    def get(self, host: HostTensor) -> torch.Tensor | None:
        """An alias of the device's copy; None: it has none."""
        kept = self._kept.get(host)
        # Not a view, for which autograd would forbid writes, and with a version and a graph of its own.
        return None if kept is None else kept.data

    def keep(self, host: HostTensor, tensor: torch.Tensor) -> None:
        """``tensor`` lies on the device and has the values of ``host``."""
        if host.on_host or host in self._kept:
            return
        size_bytes = tensor.untyped_storage().nbytes()
        if size_bytes > host.nbytes:  # a view of something larger, which would live on with it
            return
        if self._limit_bytes is not None and self.kept_bytes + size_bytes > self._limit_bytes:
            return
        self._kept[host] = tensor.data

    @property
    def kept_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def forget_written(self, known: Iterable[tuple[torch.Tensor, int, HostTensor]]) -> None:
        """known: tensors with the versions at which they had their host tensors' values."""
        for tensor, version, host in known:
            if tensor._version != version:
                self._kept.pop(host, None)

    def clear(self) -> None:
        self._kept.clear()
