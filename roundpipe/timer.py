"""How long each layer of a model takes, as its runs have shown."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

__all__ = ["ModelTimer"]

PHASES = ("fwd", "re", "bwd")
"""Forward, recompute, backward."""

Interval = tuple[str, int, Any, Any]
"""(phase, layer, begin, end): both ends seconds of the wall clock, or CUDA events that were recorded on one stream."""

_KEPT_RECORDS = 7
"""An estimate looks at this many last records: enough to outvote a disturbance, few enough to follow a change."""

_KEPT_CALLS = 4
"""Calls whose events may wait to be read. Where nobody plans nobody reads them, and older ones are dropped."""


class ModelTimer:
    """Milliseconds of device time that one microbatch takes in each layer and phase.

    A record is what one iteration took, an estimate is the lower median of the last records: the first iteration, which
    compiles, allocates and warms caches up, does not count once there is a second. Devices are never waited for, except
    by ``VERBOSE``.

    Args:
        num_layers: number of layers of the model.
    """

    VERBOSE: ClassVar[bool] = False
    """True: after each iteration a line a layer and phase on stderr, with the new record and the new estimate. The
    worker that ends the iteration then waits for its device."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._lock = threading.Lock()  # covers what follows: workers add, the caller's thread reads
        self._records: dict[tuple[str, int], deque[float]] = {}
        self._waiting: deque[Sequence[Interval]] = deque(maxlen=_KEPT_CALLS)
        self._iterations = 0

    @property
    def iterations(self) -> int:
        """How many calls have been measured and read."""
        return self._iterations

    def estimate_ms(self, phase: str, layer: int) -> float | None:
        """The estimate for ``phase`` ("fwd", "re" or "bwd"); None: not measured yet."""
        with self._lock:
            return self._estimate(phase, layer)

    def _estimate(self, phase: str, layer: int) -> float | None:
        records = self._records.get((phase, layer))
        return None if not records else sorted(records)[(len(records) - 1) // 2]

    def record(self, times_ms: Iterable[tuple[str, int, float]]) -> None:
        """Adds the (phase, layer, milliseconds) of one iteration; several of one layer and phase are added up."""
        with self._lock:
            self._record(times_ms)

    def _record(self, times_ms: Iterable[tuple[str, int, float]]) -> None:
        sums: dict[tuple[int, int], float] = {}
        for phase, layer, ms in times_ms:
            key = (layer, PHASES.index(phase))
            sums[key] = sums.get(key, 0.0) + ms
        lines = []
        for (layer, index), ms in sorted(sums.items()):
            phase = PHASES[index]
            self._records.setdefault((phase, layer), deque(maxlen=_KEPT_RECORDS)).append(ms)
            if self.VERBOSE:
                estimate = self._estimate(phase, layer)
                lines.append(f"Layer {layer} {phase}  new record: {ms:.3f} ms  new estimate: {estimate:.3f} ms\n")
        self._iterations += 1
        if lines:
            sys.stderr.write("".join(lines))

    # -- measuring -----------------------------------------------------------------------------------------------
    def ended(self, intervals: Sequence[Interval]) -> None:
        """Takes the intervals of a call whose compute was launched; they are read when the devices have passed them."""
        if not intervals:
            return
        with self._lock:
            self._waiting.append(intervals)
        self.read(wait=self.VERBOSE)

    def read(self, wait: bool = False) -> None:
        """Turns the intervals that devices have passed into records; ``wait`` blocks for the others."""
        with self._lock:
            while self._waiting:
                intervals = self._waiting[0]
                for _, _, _, end in intervals:
                    if isinstance(end, float) or end.query():
                        continue
                    if not wait:
                        return
                    end.synchronize()
                self._waiting.popleft()
                self._record((phase, layer, _elapsed_ms(begin, end)) for phase, layer, begin, end in intervals)


def _elapsed_ms(begin: Any, end: Any) -> float:
    if isinstance(end, float):
        return (end - begin) * 1e3  # type: ignore[no-any-return]
    return float(begin.elapsed_time(end))
