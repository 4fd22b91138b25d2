"""Where a job is at the moment, for the messages of failures and of the watchdog."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Place:
    """Where a job is, for messages. Apart from the job, because hooks of a graph that a user keeps alive hold it."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.microbatch: int | None = None
        self.layer: int | None = None
        self.state = "queued"

    def at(self, phase: str, microbatch: int, layer: int | None) -> None:
        self.phase, self.microbatch, self.layer = phase, microbatch, layer

    def follow(self, node: Any, layer: int, entering: Callable[[int], None] | None) -> None:
        """From the moment when backward reaches ``node`` it is in ``layer``, and ``entering`` is told so."""

        def enters(_: Any) -> None:
            self.layer = layer
            if entering is not None:
                entering(layer)

        node.register_prehook(enters)

    def __str__(self) -> str:
        where = f", {self.phase} microbatch {self.microbatch}, layer {self.layer}"
        return self.state + (where if self.state.startswith("on ") else "")
