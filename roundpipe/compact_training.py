"""What a model keeps of its compact optimizer between steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from .compact_step import CompactStep, Shadowed, Shadows
from .errors import ConfigError
from .optimizer_thread import OptimizerTask

if TYPE_CHECKING:
    from .engine import Engine
    from .grad_scaler import Scaling
    from .optim.compact import CompactOptimizer
    from .optim.compact_memory import CompactMemory
    from .units import Unit
    from .window import Window


class CompactTraining:
    """Used under the model's lock only. The optimizer holds the model; held here, too, it would keep both alive."""

    def __init__(self) -> None:
        self._memory: weakref.ref[CompactMemory] | None = None
        self._pending: tuple[CompactMemory, Shadows] | None = None  # of an asynchronous step: not in the weights yet

    @property
    def memory(self) -> CompactMemory | None:
        return None if self._memory is None else self._memory()

    @property
    def measures(self) -> bool:
        """Whether calls take the sums of squares of their gradients on the devices."""
        memory = self.memory
        return memory is not None and memory.measures

    @property
    def pending(self) -> tuple[CompactMemory, Shadows] | None:
        """Where the newest weights are, if an asynchronous step left them beside the host's."""
        return self._pending

    def leave_pending(self, memory: CompactMemory, shadowed: Shadowed) -> None:
        """As if an asynchronous step had just written these shadows. Nothing else is pending."""
        self._pending = memory, Shadows(shadowed)

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    def attach(self, memory: CompactMemory) -> None:
        """From now on ``memory`` belongs to the model; the optimizer before is retired. Nothing is pending."""
        before = self.memory
        if before is not None:
            before.retired = True
        self._memory = weakref.ref(memory)

    def refuse_others(self) -> None:
        if self.memory is not None:
            raise ConfigError(
                "this model is trained by a compact optimizer (roundpipe.optim.AdamW(model, ...) or its like), which "
                "works on the host weights: there are no optimizer parameters. Call model.step(optimizer), or delete "
                "that optimizer first."
            )

    def step(
        self,
        engine: Engine,
        units: Sequence[Unit],
        window: Window,
        optimizer: CompactOptimizer,
        is_async: bool,
        scaling: Scaling | None,
    ) -> CompactStep:
        """Takes the tickets of a step; the caller submits it. The optimizer's state is complete."""
        memory = optimizer._memory
        previous, self._pending = self._pending, None
        step = CompactStep(
            engine,
            memory,
            units,
            window,
            optimizer.numbers(),
            is_async=is_async,
            previous=None if previous is None else previous[1],
            scaling=scaling,
        )
        memory.measures = step.wants_norm
        if is_async:
            self._pending = memory, step
        return step

    def publish(self, engine: Engine, units: Sequence[Unit]) -> CompactStep:
        """Takes the tickets to bring what is pending into the weights; the caller submits it."""
        assert self._pending is not None
        (memory, shadows), self._pending = self._pending, None
        return CompactStep(engine, memory, units, None, None, is_async=False, previous=shadows)

    def follow_edits(self, hosts: Sequence[nn.Parameter]) -> None:
        """The caller's values stay, in masters too. No step is under way, and the weights are packed."""
        if self._pending is not None:
            self._pending[1].forget({id(host) for host in hosts})
        if self.memory is not None:
            self.memory.follow_edits(hosts)

    def recover(self, failed: Sequence[OptimizerTask]) -> None:
        """After failed steps have ended: what stands in the shadows is pending again."""
        merged: Shadowed = {}
        memory = None
        for task in failed:
            if isinstance(task, CompactStep):
                memory = task.memory
                for shadows in (task.uncopied, task):
                    for key, (unit, positions) in ({} if shadows is None else shadows.shadowed).items():
                        merged[key] = (unit, merged.get(key, (unit, set()))[1] | positions)
        if memory is not None:
            self._pending = (memory, Shadows(merged)) if merged else None
