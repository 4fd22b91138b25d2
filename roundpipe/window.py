"""An accumulation window: the calls whose gradients the next step takes, and which image holds their sum."""

from __future__ import annotations

import torch

from .call import Call
from .gradient_stats import GradientStats
from .units import Unit


class Window:
    """Caller's thread only.

    ``base``: images that already held a sum when the window began (gradients the user left on the host parameters, or
    what survived a failed step), with the parameters that have a gradient in them.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.base: dict[int, tuple[torch.Tensor, set[int]]] = {}

    def image(self, unit: Unit) -> torch.Tensor | None:
        """The image that holds, or will hold, the sum of all calls dispatched so far; None: nothing yet."""
        for call in reversed(self.calls):
            if unit.key in call.stores:
                return call.stores[unit.key]
        base = self.base.get(unit.key)
        return None if base is None else base[0]

    def stats(self, unit: Unit) -> GradientStats | None:
        """What measures the sum that :meth:`image` holds before it comes down; None: nobody does."""
        found = next((call for call in reversed(self.calls) if unit.key in call.stores), None)
        return None if found is None else found.gradient_stats

    def touched(self, unit: Unit) -> set[int]:
        """Trainable parameters of ``unit`` that have a gradient. Exact once all calls have ended."""
        found = set(self.base[unit.key][1]) if unit.key in self.base else set()
        for call in self.calls:
            found |= call.touched.get(unit.key, set())
        return found

    def forget(self, unit: Unit) -> None:
        """What ``unit`` has accumulated."""
        self.base.pop(unit.key, None)
        for call in self.calls:
            call.stores.pop(unit.key, None)
            call.touched.pop(unit.key, None)

    def drop_failed(self) -> None:
        """Keeps the calls before the first that failed: their image is intact, see Note [Two images]."""
        for position, call in enumerate(self.calls):
            if call.error is not None:
                del self.calls[position:]
                return

    def __bool__(self) -> bool:
        return bool(self.calls) or bool(self.base)


# Note [Two images]
#   A call never writes the image that it starts from: the sum before it stays whole until the call is known to have
#   succeeded, because the next but one call, which writes that image again, first waits for this one (Call.
#   wait_predecessor). So a failed call is undone by forgetting it.
