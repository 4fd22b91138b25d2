"""What is measured while a call runs: the time of one microbatch in each job, the saved bytes of the first one.

Note [Measured while running]
  Marks are the wall clock on simulated devices, and events on the compute stream of a GPU, which are read much later
  (timer.py): nothing waits for them. One microbatch of a job is measured, and not the first where there are several,
  since that one waits for weights and allocates. Inside a stage's backward the marks are set by hooks of the graph,
  when autograd enters a layer. The loss counts as backward of the last layer, which is where a plan has it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from . import spans
from .activation_sizes import ActivationSizes, SavedBytes

if TYPE_CHECKING:
    from .boundary import LiveTree
    from .engine import Worker
    from .timer import Interval, ModelTimer

__all__ = ["CallProbe", "JobProbe"]

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class CallProbe:
    """The measurements of one call.

    Args:
        timer: takes the times.
        sizes: takes the activation bytes; None: they are known already, or the call keeps no graph.
        call_bytes: bytes of the call's largest microbatch, to compare with those of other calls.
        num_microbatch: pieces of the batch.
        simulated: whether its devices are.
    """

    def __init__(
        self, timer: ModelTimer, sizes: ActivationSizes | None, call_bytes: int, num_microbatch: int, simulated: bool
    ) -> None:
        self.sizes = sizes
        self.call_bytes = call_bytes
        self.microbatch = num_microbatch // 2
        self.simulated = simulated
        self._timer = timer
        self._lock = threading.Lock()  # covers the count of open jobs
        self._open_jobs = 0
        self._intervals: list[Interval] = []

    def expect(self, jobs: int) -> None:
        """So many jobs have been dispatched."""
        with self._lock:
            self._open_jobs += jobs

    def job_ended(self, intervals: list[Interval]) -> None:
        """A job has ended well. Of a call that fails not all do, and its times are dropped with it."""
        with self._lock:
            self._intervals += intervals
            self._open_jobs -= 1
            if self._open_jobs:
                return
            ended, self._intervals = self._intervals, []
        self._timer.ended(ended)


class JobProbe:
    """The measurements of one job; used on its worker, and by autograd's thread while the worker waits for that."""

    def __init__(self, call: CallProbe) -> None:
        self.call = call
        self.intervals: list[Interval] = []
        self.device = ""
        self._in_backward: list[tuple[int, Any]] | None = None

    def mark(self) -> Any:
        if self.call.simulated:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _measures(self, m: int) -> bool:
        return m == self.call.microbatch or spans.active is not None

    def took(self, m: int, phase: str, layer: int, begin: Any, end: Any) -> None:
        if m == self.call.microbatch:
            self.intervals.append((phase, layer, begin, end))
        if (recorder := spans.active) is not None:
            recorder.layer(self.device, phase, layer, m, begin, end)

    def ended(self) -> None:
        self.call.job_ended(self.intervals)

    def forward(self, m: int, layer: int, recomputing: bool) -> contextlib.AbstractContextManager[Any]:
        """Around the module's own forward."""
        return _Span(self, m, "re" if recomputing else "fwd", layer) if self._measures(m) else _NOTHING

    def loss(self, m: int, layer: int) -> contextlib.AbstractContextManager[Any]:
        return _Span(self, m, "bwd", layer) if self._measures(m) else _NOTHING

    def backward(self, m: int, top: int) -> contextlib.AbstractContextManager[Any]:
        """Around autograd's run through layers of which ``top`` is the last."""
        return _Backward(self, m, top) if self._measures(m) else _NOTHING

    def hook(self, m: int) -> Callable[[int], None] | None:
        """To be told of the layers that autograd enters; None: not to be measured."""
        return self._entering if self._measures(m) else None

    def _entering(self, layer: int) -> None:
        marks = self._in_backward
        if marks is not None and marks[-1][0] != layer:
            marks.append((layer, self.mark()))

    def saved_bytes(self, worker: Worker, m: int, layer: int, live: LiveTree, more: bool = False) -> SavedBytes | None:
        """A counter for what the forward of ``layer`` on ``live`` saves; None: not to be measured."""
        sizes = self.call.sizes
        if sizes is None or m:
            return None
        return SavedBytes(sizes, layer, self.call.call_bytes, live, worker.region, more)


class _Span:
    __slots__ = ("begin", "layer", "microbatch", "phase", "probe")

    def __init__(self, probe: JobProbe, microbatch: int, phase: str, layer: int) -> None:
        self.probe, self.microbatch, self.phase, self.layer = probe, microbatch, phase, layer

    def __enter__(self) -> None:
        self.begin = self.probe.mark()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.probe.took(self.microbatch, self.phase, self.layer, self.begin, self.probe.mark())


class _Backward:
    __slots__ = ("microbatch", "probe", "top")

    def __init__(self, probe: JobProbe, microbatch: int, top: int) -> None:
        self.probe, self.microbatch, self.top = probe, microbatch, top

    def __enter__(self) -> None:
        self.probe._in_backward = [(self.top, self.probe.mark())]

    def __exit__(self, kind: object, *_: object) -> None:
        marks, self.probe._in_backward = self.probe._in_backward, None
        assert marks is not None
        if kind is None:
            ends = [*marks, (-1, self.probe.mark())]
            for (layer, begin), (_next, end) in pairwise(ends):
                self.probe.took(self.microbatch, "bwd", layer, begin, end)
