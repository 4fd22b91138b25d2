"""The caller's thread state that layers must see on the worker threads: autocast and grad mode."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ambient:
    """Autocast settings of the thread that made the call, for each device type."""

    autocast: tuple[tuple[str, torch.dtype], ...]  # enabled ones only
    cache_enabled: bool

    @staticmethod
    def capture() -> Ambient:
        enabled = tuple(
            (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        )
        return Ambient(enabled, torch.is_autocast_cache_enabled())

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """The same autocast on the calling thread.

        Entered anew around every layer call: leaving it clears autocast's cache of cast weights, which must not outlive
        the weights' stay on the device.
        """
        if not self.autocast:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.cache_enabled))
        return stack
