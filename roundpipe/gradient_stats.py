"""Sums of squares and non-finite values of a call's gradients, taken on the devices before the gradients come down."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import torch

from . import _ops
from .boundary import Traffic

if TYPE_CHECKING:
    from .engine import Worker
    from .units import Unit


class GradientStats:
    """Of one call. A device's gradients start from the sum of the calls before, so the newest call's are the window's.

    Workers measure; the optimizer thread reads once the call's jobs have ended.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()  # covers _records: units of several devices are measured at the same time
        # By unit, with what keeps it: two float64 for each range of one dtype, on their way to the host.
        self._records: dict[int, tuple[int, torch.Tensor]] = {}

    def measure(self, worker: Worker, unit: Unit, offset: int) -> None:
        """Launches the measurement of the unit's packed gradients at byte ``offset`` of the device's region, after all
        compute launched so far. A unit shared by several stages is measured by each; the last one counts."""
        on_stream = contextlib.nullcontext() if worker.stream is None else torch.cuda.stream(worker.stream)
        with torch.no_grad(), on_stream:
            stats = [
                _ops.gradient_stats(worker.region[offset + begin : offset + end], dtype)
                for dtype, begin, end in _ranges(unit)
            ]
            record = _ops.stash(worker.engine.handle, worker.index, stats, Traffic.GRADIENTS, 0)
            kept = record, _ops.handle_keeper(record)
        with self._mutex:
            self._records[unit.key] = kept

    def square_sum(self, unit: Unit) -> float:
        """Infinite or NaN if one of the gradients is."""
        record, _ = self._records[unit.key]
        _ops.wait(_ops.record_wait, record)
        total = 0.0
        for squares, non_finite in (stats.tolist() for stats in _ops.record_host(record)):
            total += squares if non_finite == 0 or squares != squares else float("inf")
        return total

    def release(self) -> None:
        """Gives the records back; nobody reads them any more."""
        self._records.clear()


def _ranges(unit: Unit) -> list[tuple[torch.dtype, int, int]]:
    """(dtype, begin, end) in bytes of neighbours of one dtype; the gaps between them are zero."""
    layouts = [layout for layout in unit.gradient_layouts if layout.nbytes]
    return [
        (dtype, group[0].offset, group[-1].offset + group[-1].nbytes)
        for dtype, group in ((dtype, list(found)) for dtype, found in itertools.groupby(layouts, lambda x: x.dtype))
    ]
