"""What devices have held beside their regions of weights and gradients, by kind of call, and what regions may take.

Note [Room for regions]
  A region for two jobs lets weights go up while a layer computes, but it may not take what activations need, and when a
  call begins its regions are made. So on devices with limited memory a kind of call of which nothing is known gets the
  least region, or hardly more: predictions count on that (``memory_model.region_bytes``). Once it has run, or can be
  told from others that have, its region is that of two jobs as far as there is room. Simulated devices count what they
  hold. On a GPU the sizes of activations have to do, and inference, of which those are not measured, gets two jobs'.
  The last two kinds of training call count together, and those of the last calls, so that regions stay where kinds
  take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from .memory_model import region_bytes

__all__ = ["ActivationPeaks", "Beside"]

_STEPS = 64
"""Of what a device has, one such part is no matter: peaks count in these steps, as copies under way make them differ a
little from call to call, and a region may be larger by that much than it must be."""

_RECENT_KINDS, _RECENT_CALLS = 2, 16
"""Regions leave room for so many kinds of training call, however long ago, and for all that came in so many calls."""


@dataclass(frozen=True)
class Beside:
    """What a call's activations need.

    Attributes:
        peak_bytes: activations, boundaries and buffers of one device at their most; None: nobody knows.
        capacity_bytes: what there is for them and the region; None: no limit.
    """

    peak_bytes: int | None = 0
    capacity_bytes: int | None = None

    @property
    def ceiling_bytes(self) -> int | None:
        """How large a region may be that is there already; None: no limit."""
        if self.capacity_bytes is None:
            return None
        return 0 if self.peak_bytes is None else max(0, self.capacity_bytes - self.peak_bytes)

    def region_bytes(self, pair_bytes: int, largest_bytes: int) -> int:
        """How large a device's region is to be whose two largest consecutive jobs, and whose largest one, have so
        many bytes.
        """
        if self.peak_bytes is None:
            assert self.capacity_bytes is not None
            return min(pair_bytes, largest_bytes + self.capacity_bytes // _STEPS)
        return region_bytes(pair_bytes, largest_bytes, self.peak_bytes, self.capacity_bytes)

    @classmethod
    def counted(cls, peak_bytes: int, capacity_bytes: int) -> Beside:
        """By a peak that calls have shown."""
        step = max(1, capacity_bytes // _STEPS)
        return cls(-(-peak_bytes // step) * step, capacity_bytes)


@dataclass
class _Seen:
    call_bytes: int  # of the largest microbatch seen
    peak_bytes: int
    expected_bytes: Callable[[], int | None] | None  # by the sizes of activations; None: inference


class ActivationPeaks:
    """Of one model. Workers write, the caller's thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # covers what was seen
        self._seen: dict[Hashable, _Seen] = {}
        # By kind of training call, on the caller's thread only: (peak, number of the last such call) in the order of
        # use; by sizes of activations.
        self._recent: dict[Hashable, tuple[int, int]] = {}
        self._calls = 0
        self._expected: dict[Hashable, tuple[int, int | None]] = {}

    def clear(self) -> None:
        """Other parameters are trained from now on, so that other activations are kept."""
        with self._lock:
            self._seen.clear()
        self._recent.clear()
        self._expected.clear()

    def note(
        self, key: Hashable, call_bytes: int, peak_bytes: int, expected_bytes: Callable[[], int | None] | None = None
    ) -> None:
        """A call of kind ``key`` with microbatches of ``call_bytes`` has run well."""
        with self._lock:
            seen = self._seen.get(key)
            if seen is not None:
                call_bytes, peak_bytes = max(call_bytes, seen.call_bytes), max(peak_bytes, seen.peak_bytes)
            self._seen[key] = _Seen(call_bytes, peak_bytes, expected_bytes)

    def seen(self, key: Hashable, call_bytes: int) -> int | None:
        """The peak of such calls, in proportion where their microbatches were smaller; None: there was none."""
        with self._lock:
            seen = self._seen.get(key)
        if seen is None:
            return None
        if seen.call_bytes == 0:  # no tensor came from the caller
            return seen.peak_bytes
        return seen.peak_bytes * max(call_bytes, seen.call_bytes) // seen.call_bytes

    def excess(self, call_bytes: int) -> int | None:
        """How much more training calls have taken than their sizes of activations say; None: none has run."""
        with self._lock:
            expected = {key: seen.expected_bytes for key, seen in self._seen.items()}
        found = [(self.seen(key, call_bytes) or 0, of()) for key, of in expected.items() if of is not None]
        return max((max(0, peak - size) for peak, size in found if size is not None), default=None)

    def expected(self, key: Hashable, revision: int, of: Callable[[], int | None]) -> int | None:
        """What ``of`` gave at this revision of the sizes: it looks at every layer."""
        found = self._expected.get(key)
        if found is None or found[0] != revision:
            found = self._expected[key] = (revision, of())
        return found[1]

    def among_recent(self, key: Hashable, peak_bytes: int) -> int:
        """The larger of ``peak_bytes``, which training calls of kind ``key`` need, and what those before it need."""
        self._calls += 1
        self._recent.pop(key, None)
        self._recent[key] = (peak_bytes, self._calls)
        while len(self._recent) > _RECENT_KINDS:
            oldest = next(iter(self._recent))
            if self._recent[oldest][1] > self._calls - _RECENT_CALLS:
                break
            del self._recent[oldest]
        return max(peak for peak, _ in self._recent.values())
