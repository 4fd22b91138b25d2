"""Packed data: a list with an event a value."""

import copy
import pickle

import pytest

from roundpipe.batch import RoundPipePackedData
from roundpipe.errors import ConfigError


class Event:
    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


def test_is_a_list_with_events():
    events = [Event(), None, Event()]
    packed = RoundPipePackedData([1, 2, 3], events)
    assert packed == [1, 2, 3]
    assert packed.transfer_event == events
    packed.synchronize()
    assert [events[0].waits, events[2].waits] == [1, 1]
    assert repr(packed) == "RoundPipePackedData([1, 2, 3])"


def test_without_events_it_can_be_read_at_once():
    packed = RoundPipePackedData(iter([1, 2]))
    assert packed.transfer_event == [None, None]
    packed.synchronize()


def test_numbers_must_agree():
    with pytest.raises(ConfigError, match="1 transfer events for 2 values"):
        RoundPipePackedData([1, 2], [None])


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_wait_first_and_carry_no_events(again):
    event = Event()
    twin = again(RoundPipePackedData([1, [2]], [event, None]))
    assert type(twin) is RoundPipePackedData
    assert twin == [1, [2]]
    assert twin.transfer_event == [None, None]
    assert event.waits == 1
