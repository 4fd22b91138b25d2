"""Packed data: a list with an event a value."""

import copy
import operator
import pickle

import pytest
import torch

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


def halves() -> tuple[RoundPipePackedData, torch.Tensor]:
    torch.manual_seed(0)
    whole = torch.rand(5, 3) + 1
    return RoundPipePackedData(whole.tensor_split(2), [Event(), Event()]), whole


@pytest.mark.parametrize(
    "use",
    [
        torch.relu,
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.nn.functional.pad(x, (1, 1)),
        lambda x: x.flatten(),
        lambda x: x.size(0) * x.shape[1] + x.dim(),
        lambda x: x[:, 1],
        lambda x: x[torch.tensor([0, 2])],
        lambda x: x[..., None],
        lambda x: x.mean(),
        operator.neg,
    ],
)
def test_where_a_tensor_is_expected_it_is_merged(use):
    packed, whole = halves()
    got, want = use(packed), use(whole)
    assert got == want if isinstance(want, int) else torch.equal(got, want)
    assert all(event.waits > 0 for event in packed.transfer_event)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_operators_of_tensors(name):
    packed, whole = halves()
    apply = getattr(operator, name)
    for one, other in ((packed, 2.0), (2.0, packed), (packed, whole), (whole, packed), (packed, packed)):
        plain = [whole if value is packed else value for value in (one, other)]
        assert torch.equal(apply(one, other), apply(*plain))
    packed += 1.0
    assert torch.equal(packed, whole + 1.0)


def test_what_lists_do_stays_so():
    packed, whole = halves()
    assert len(packed) == 2 and torch.equal(packed[0], whole[:3]) and torch.equal(packed[-1], whole[3:])
    assert type(packed[:1]) is list and [len(value) for value in packed] == [3, 2]
    more = [1]
    assert len(packed + more) == 3 and len(more + packed) == 3
    assert packed.transfer_event[0].waits == 0, "nothing has looked at a value"
    with pytest.raises(AttributeError, match="nonsense"):
        _ = packed.nonsense
    assert not hasattr(packed, "__fancy__")


def test_gradients_pass_through_the_merge():
    leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    packed = RoundPipePackedData([leaf * 2 for leaf in leaves])
    (packed * torch.arange(4.0)[:, None]).sum().backward()
    assert torch.equal(leaves[1].grad, 2 * torch.tensor([[2.0], [3.0]]).expand(2, 3))


def test_what_does_not_depend_on_the_batch_is_merged_once():
    position = torch.randn(1, 3)
    packed = RoundPipePackedData([position, position.clone()])
    assert (packed * 1).shape == (2, 3)
    packed.rows = [2, 2]
    assert (packed * 1).shape == (1, 3)
