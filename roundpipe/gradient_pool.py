"""Host memory through which gradients pass on their way to an announced step's updates.

Note [Gradients in passing]
  An announced step takes the gradients of a unit when they have come down, and nobody else will ever read them. So they
  need no image of the unit's own: a download takes a place of the pool when it begins, and the update gives the place
  back when it ends. The pool has room for a few of the largest units, whatever the size of the model, so that host
  memory holds weights, masters and moments, and hardly any gradients. When there is no room a download waits, and with
  it, in the end, the device; the core's Note [Places of gradients] says why nobody waits for ever.
  Units that several jobs of a call write (a tied embedding, say) keep an image: each job adds to the sum of the one
  before. So do calls that are not announced. Their images come back on first need; a unit that has done without its
  image in two announced steps in a row gives it up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, uint8

from . import _ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .engine import Engine

PLACES_BESIDE_DEVICES = 2  # one being read by an update, one that waits for it


def pool_bytes(sizes_bytes: Sequence[int], device_count: int) -> int:
    """Of a pool for the gradients of units of these sizes: room for ``devices + 2`` of the largest, or for all."""
    return min(sum(sizes_bytes), (device_count + PLACES_BESIDE_DEVICES) * max(sizes_bytes, default=0))


class GradientPool:
    """Of one model, on the caller's thread. Made when the first step is announced."""

    def __init__(self) -> None:
        self.handle = 0
        self._engine: Engine | None = None
        self._memory: Tensor | None = None  # the core's pool holds it too, until nothing lies in it any more

    @property
    def host_bytes(self) -> int:
        return 0 if self._memory is None else int(self._memory.numel())

    def ensure(self, engine: Engine, sizes_bytes: Sequence[int]) -> None:
        """Room for the gradients of units of these sizes. Raises HostOutOfMemory; there is no pool then."""
        wanted = pool_bytes(sizes_bytes, engine.device_count)
        if wanted == 0 or (self._engine is engine and self.host_bytes >= wanted):
            return
        self.close()
        memory = _ops.host_empty([wanted], uint8)
        self.handle = _ops.gradient_pool_open(engine.handle, memory)
        self._engine, self._memory = engine, memory

    def close(self) -> None:
        """What lies in it stays until it was taken."""
        if self.handle:
            _ops.drop_quietly(_ops.gradient_pool_close, self.handle)
        self.handle, self._engine, self._memory = 0, None, None
