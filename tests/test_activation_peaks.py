"""What calls took beside their regions, and the regions that follow from it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.activation_peaks import ActivationPeaks, Beside
from roundpipe.engine import Worker

MIB = 1 << 20


def test_regions_are_as_small_as_they_can_be_while_nothing_is_known() -> None:
    unknown = Beside(None, 64 * MIB)
    assert unknown.region_bytes(40 * MIB, 20 * MIB) == 21 * MIB  # a 64th of the device more
    assert unknown.region_bytes(1000, 600) == 1000  # two jobs of no weight
    assert unknown.ceiling_bytes == 0


def test_regions_are_those_of_two_jobs_where_there_is_room() -> None:
    assert Beside().region_bytes(40 * MIB, 20 * MIB) == 40 * MIB
    assert Beside().ceiling_bytes is None
    for peak, region in ((10 * MIB, 40 * MIB), (30 * MIB, 34 * MIB), (60 * MIB, 20 * MIB), (90 * MIB, 20 * MIB)):
        assert Beside.counted(peak, 64 * MIB).region_bytes(40 * MIB, 20 * MIB) == region


def test_a_peak_that_differs_a_little_changes_no_region() -> None:
    assert Beside.counted(30 * MIB - 5, 64 * MIB) == Beside.counted(29 * MIB + 5, 64 * MIB)


def test_the_largest_peak_of_a_kind_counts_and_larger_microbatches_take_more() -> None:
    peaks = ActivationPeaks()
    assert peaks.seen("kind", 100) is None
    peaks.note("kind", 100, 1000)
    peaks.note("kind", 100, 900)
    assert [peaks.seen("kind", size) for size in (50, 100, 200)] == [1000, 1000, 2000]
    peaks.note("kind", 200, 1500)
    assert peaks.seen("kind", 200) == 1500
    peaks.note("made from no tensors", 0, 1000)
    assert peaks.seen("made from no tensors", 0) == 1000
    peaks.clear()
    assert peaks.seen("kind", 100) is None


def test_what_sizes_do_not_tell_is_taken_from_other_kinds_of_training() -> None:
    peaks = ActivationPeaks()
    peaks.note("inference", 100, 5000)
    assert peaks.excess(100) is None
    peaks.note("careful", 100, 1000, lambda: 700)
    peaks.note("roomy", 100, 1000, lambda: 1200)
    assert peaks.excess(100) == 300
    peaks.note("other", 100, 9000, lambda: None)
    assert peaks.excess(100) == 300


def test_sizes_are_added_up_once_for_each_revision() -> None:
    peaks, asked = ActivationPeaks(), []
    for revision in (1, 1, 2):
        assert peaks.expected("kind", revision, lambda: asked.append(0) or 7) == 7
    assert len(asked) == 2


def test_kinds_of_training_that_alternate_have_one_region() -> None:
    peaks = ActivationPeaks()
    assert [peaks.among_recent(*use) for use in (("a", 10), ("b", 30), ("a", 10), ("b", 30))] == [10, 30, 30, 30]
    assert [peaks.among_recent("a", 10) for _ in range(100)] == [30] * 100  # one call of b in many, and again
    assert [peaks.among_recent(*use) for use in (("c", 5), ("a", 10), ("c", 5))] == [10, 10, 10]  # b is over


def test_so_have_three_kinds_that_take_turns() -> None:
    """As where the number of microbatches follows the size of the batch."""
    peaks = ActivationPeaks()
    turns = [peaks.among_recent(*use) for _ in range(5) for use in (("a", 30), ("b", 10), ("c", 10))]
    assert turns == [30] * 15
    assert 10 in [peaks.among_recent(*use) for _ in range(10) for use in (("b", 10), ("c", 10))]  # a is over


def test_regions_stay_where_three_kinds_of_call_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:1@4MiB")
    model = RoundPipe(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]))
    made: list[int] = []
    set_region = Worker.set_region
    monkeypatch.setattr(Worker, "set_region", lambda worker, size: (made.append(size), set_region(worker, size)))
    for turn in range(6):
        if turn == 3:
            made.clear()
        for pieces in (1, 2, 4):
            config = RoundPipeRunConfig(num_microbatch=pieces)
            model.forward_backward(
                (torch.ones(256, 256),), loss_fn=lambda out, _: out.square().mean(), run_config=config
            )
            model.synchronize()
            model.zero_grad()
    assert not made
