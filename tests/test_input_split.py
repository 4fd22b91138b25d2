"""Splitting arguments: the automatic rule, specs, functions, packed inputs, and what is refused."""

import warnings

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from roundpipe import input_split
from roundpipe.batch import RoundPipePackedData, split_inputs
from roundpipe.errors import SplitError

ZERO, REPLICATE = TensorChunkSpec(0), _Replicate()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(input_split, "_warned_small_batch", False)


def _x(rows, *rest):
    return torch.arange(rows * max(1, torch.Size(rest).numel()), dtype=torch.float32).reshape(rows, *rest)


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (7, 3), (5, 5), (10, 4)])
def test_pieces_are_those_of_tensor_split(rows, count):
    x, y, scale = _x(rows, 3).clone(), _x(rows), torch.tensor(2.0)
    pieces = split_inputs((x, {"y": [y]}, scale, "text", None), {}, count)
    want_x, want_y = torch.tensor_split(x, count), torch.tensor_split(y, count)
    assert len(pieces) == count
    for (args, kwargs), px, py in zip(pieces, want_x, want_y, strict=True):
        assert isinstance(args, tuple)
        assert torch.equal(args[0], px)
        assert torch.equal(args[1]["y"][0], py)
        assert args[2] is scale
        assert args[3:] == ("text", None)
        assert kwargs == {}
        assert args[0]._base is x  # a view, not a copy
    assert pieces.row_counts == [len(p) for p in want_x]
    assert pieces.batch_size == rows
    assert pieces.transfer_events == [[]] * count


def test_gradients_flow_through_the_split():
    x = _x(5, 2).requires_grad_()
    pieces = split_inputs((x,), {"w": x * 2}, 3)
    sum((i + 1) * (args[0].sum() + kwargs["w"].sum()) for i, (args, kwargs) in enumerate(pieces)).backward()
    assert torch.equal(x.grad[:, 0], 3 * torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0]))


def test_pieces_may_be_written_in_place_by_a_layer():
    x = _x(4).requires_grad_()
    for args, _ in split_inputs((x * 1,), {}, 2):
        args[0].mul_(2)  # outputs of torch.split would refuse this under autograd


def test_kwargs_follow_the_batch_size_of_the_args():
    mask, positions, scalar = _x(6, 2), _x(1, 2), torch.tensor(1)
    pieces = split_inputs((_x(6),), {"mask": mask, "positions": positions, "scalar": scalar, "n": 6}, 3)
    for i, (_, kwargs) in enumerate(pieces):
        assert torch.equal(kwargs["mask"], mask[2 * i : 2 * i + 2])
        assert kwargs["positions"] is positions
        assert kwargs["scalar"] is scalar
        assert kwargs["n"] == 6


def test_kwargs_alone_follow_the_first_tensor():
    first, second, other = _x(4, 2), _x(4), _x(3)
    pieces = split_inputs((), {"flag": True, "s": torch.tensor(0.0), "a": first, "b": {"c": second}, "d": other}, 2)
    assert torch.equal(pieces[1][1]["a"], first[2:])
    assert torch.equal(pieces[1][1]["b"]["c"], second[2:])
    assert pieces[1][1]["d"] is other
    # 0-dim and non-tensor args do not count as tensor args
    assert len(split_inputs((torch.tensor(1.0), 3), {"a": first}, 2)) == 2


def test_args_of_different_batch_sizes_are_refused_by_name():
    with pytest.raises(SplitError) as info:
        split_inputs((_x(4), {"ids": _x(3)}), {}, 2)
    assert "args[1]['ids'] has 3 rows, but args[0] has 4" in str(info.value)
    assert "TensorChunkSpec" in str(info.value)


def test_nothing_to_divide_is_one_microbatch():
    pieces = split_inputs((3, torch.tensor(1.0)), {"x": "y"}, 4)
    assert list(pieces) == [((3, torch.tensor(1.0)), {"x": "y"})]
    assert pieces.batch_size is None
    assert len(split_inputs((), {}, 4)) == 1


def test_one_microbatch_is_handed_through():
    x, y = _x(4), _x(3)
    (args, kwargs), *rest = split_inputs((x, y), {"k": x}, 1)
    assert not rest
    assert args[0] is x
    assert args[1] is y
    assert kwargs["k"] is x

    def never(*_):
        raise AssertionError("called for one microbatch")

    assert len(split_inputs((x,), {}, 1, never)) == 1


def test_small_batches_run_in_fewer_microbatches_and_warn_once():
    with pytest.warns(UserWarning, match=r"args\[0\] has 2 rows for num_microbatch=4") as caught:
        assert len(split_inputs((_x(2),), {}, 4)) == 2
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = split_inputs((_x(1, 3),), {}, 4)
        empty = split_inputs((_x(0, 3),), {}, 4)
    assert len(one) == 1
    assert one[0][0][0].shape == (1, 3)
    assert len(empty) == 1


def test_specs():
    a, b, c = _x(2, 6), _x(6, 2), _x(4)
    pieces = split_inputs((a, b), {"c": c, "d": None}, 3, ((TensorChunkSpec(1), None), {"c": REPLICATE, "d": ZERO}))
    for i, (args, kwargs) in enumerate(pieces):
        assert torch.equal(args[0], a[:, 2 * i : 2 * i + 2])
        assert torch.equal(args[1], b[2 * i : 2 * i + 2])
        assert kwargs["c"] is c
    kept = split_inputs((a,), {"c": c}, 3, ((_Replicate,), None))  # without divided args the first kwargs tensor counts
    assert [len(kwargs["c"]) for _, kwargs in kept] == [2, 1, 1]
    assert all(args[0] is a for args, _ in kept)
    assert [args[0].shape for args, _ in split_inputs((a,), {}, 2, ([TensorChunkSpec(-1)], None))] == [(2, 3), (2, 3)]
    assert len(split_inputs((a,), {}, 3, (REPLICATE, None))) == 3  # asked for in so many words


def test_explicit_specs_may_divide_different_sizes():
    pieces = split_inputs((_x(4), _x(6)), {}, 2, ((ZERO, ZERO), None))
    assert [(len(args[0]), len(args[1])) for args, _ in pieces] == [(2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("args", "spec", "said"),
    [
        ((torch.ones(4), 3), ((ZERO, ZERO), None), r"args\[1\].*for tensors, got int"),
        ((torch.ones(4),), ((TensorChunkSpec(1),), None), r"TensorChunkSpec\(1\) does not fit"),
        ((torch.ones(4), torch.ones(4)), ((ZERO,), None), "1 entries for 2"),
        ((torch.ones(4),), (None, {"missing": ZERO}), "missing"),
        ((torch.ones(4), torch.ones(3)), ((ZERO, None), None), "3 rows"),
    ],
)
def test_specs_that_do_not_fit(args, spec, said):
    with pytest.raises(SplitError, match=said):
        split_inputs(args, {}, 2, spec)


def test_functions():
    seen = []

    def halves(args, kwargs, n):
        seen.append((args, kwargs, n))
        return [[i] for i in range(n)], [{"i": i} for i in range(n)]

    x = _x(5)
    assert list(split_inputs((x,), {"k": 1}, 2, halves)) == [((0,), {"i": 0}), ((1,), {"i": 1})]
    assert seen[0][0][0] is x
    assert seen[0][1:] == ({"k": 1}, 2)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "NoneType, expected"),
        (([()], [{}], []), "expected .list of args, list of kwargs"),
        (([()], [{}, {}]), "1 args, expected one for each of 2"),
        (([(), ()], [{}]), "1 kwargs, expected one for each of 2"),
        (({}, [{}, {}]), "dict for the args"),
        (([torch.ones(1), ()], [{}, {}]), "Tensor and kwargs"),
    ],
)
def test_functions_that_return_something_else(made, said):
    with pytest.raises(SplitError, match=said):
        split_inputs((_x(4),), {}, 2, lambda *_: made)


class _Event:
    def synchronize(self):
        raise AssertionError("splitting must not wait")


def test_packed_inputs_set_the_count_and_hand_over_their_events():
    events = [_Event(), None, _Event()]
    packed = RoundPipePackedData([_x(2), _x(2) + 10, _x(1) + 20], events)
    mask = _x(5)
    pieces = split_inputs((packed,), {"mask": mask, "other": 1}, 7)
    assert [args[0] is value for (args, _), value in zip(pieces, packed, strict=True)] == [True] * 3
    assert [kwargs["mask"].tolist() for _, kwargs in pieces] == [[0, 1], [2, 3], [4]]
    assert pieces.transfer_events == [[events[0]], [], [events[2]]]
    assert pieces.row_counts == [2, 2, 1]
    # tensors of the same batch are cut where the packed ones are, not where tensor_split would
    uneven = RoundPipePackedData([_x(1), _x(4)])
    assert [len(kwargs["mask"]) for _, kwargs in split_inputs((uneven,), {"mask": mask}, 2)] == [1, 4]
    assert [len(args[1]) for args, _ in split_inputs((uneven, mask), {}, 2)] == [1, 4]


def test_the_shortest_packed_input_wins_with_a_warning():
    long, short = RoundPipePackedData([_x(2), _x(2), _x(2)]), RoundPipePackedData([1, 2])
    with pytest.warns(UserWarning, match=r"'args\[0\]': 3, 'kwargs\['k'\]': 2|different numbers"):
        pieces = split_inputs((long,), {"k": short}, 3)
    assert [kwargs["k"] for _, kwargs in pieces] == [1, 2]
    assert pieces.row_counts == [2, 2]


def test_packed_edge_cases():
    single = RoundPipePackedData([_x(3)])
    assert split_inputs((single,), {}, 4)[0][0][0] is single[0]
    with pytest.raises(SplitError, match="without a microbatch"):
        split_inputs((RoundPipePackedData([]),), {}, 2)
    with pytest.raises(SplitError, match=r"args\[1\] has size 2 on dim 0, too small for the 3"):
        split_inputs((RoundPipePackedData([1, 2, 3]), _x(2)), {}, 2)
    event = _Event()
    packed = RoundPipePackedData([1, 2], [event, None])
    pieces = split_inputs((packed,), {}, 2, lambda args, kwargs, n: ([(v,) for v in args[0][::-1]], [{}] * n))
    assert pieces.transfer_events == [[event], [event]]  # the function may have changed their order


def test_layouts_that_cannot_be_divided():
    with pytest.raises(SplitError, match=r"args\[0\].*sparse"):
        split_inputs((torch.eye(4).to_sparse(),), {}, 2)


def test_block_masks_are_divided_as_a_whole():
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = torch.tensor([100, 200, 300, 256])

    def visible(b, h, q, k):
        return k < lengths[b]

    mask = create_block_mask(visible, 4, None, 256, 256, device="cpu")
    pieces = split_inputs((_x(4, 256),), {"mask": mask}, 2)
    assert [kwargs["mask"].kv_num_blocks.size(0) for _, kwargs in pieces] == [2, 2]
    assert torch.equal(pieces[1][1]["mask"].kv_num_blocks, mask.kv_num_blocks[2:])
    shared = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    assert all(kwargs["mask"] is shared for _, kwargs in split_inputs((_x(4),), {"mask": shared}, 2))
    with pytest.raises(SplitError, match="BlockMask of 4 rows"):
        split_inputs((_x(6),), {"mask": mask}, 2)
