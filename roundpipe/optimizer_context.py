"""Where ``model.parameters()`` means the optimizer's parameters."""

from __future__ import annotations

import threading
from types import TracebackType


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class OptimizerCtx:
    """Context in which ``parameters()`` and ``named_parameters()`` of a wrapped model give the optimizer's parameters.

    Build optimizers inside it::

        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters())

    The ``step_fn`` given to ``model.step`` always runs inside one. Holds for the calling thread and may be nested.
    """

    def __enter__(self) -> OptimizerCtx:
        _depth.value += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _depth.value -= 1


def in_optimizer_context() -> bool:
    return _depth.value > 0
