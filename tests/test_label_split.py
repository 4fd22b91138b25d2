"""Splitting labels into exactly as many pieces as the inputs, at the same places."""

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from roundpipe.batch import RoundPipePackedData, split_label
from roundpipe.errors import SplitError

ZERO, REPLICATE = TensorChunkSpec(0), _Replicate()


def test_automatic():
    label = {"y": torch.arange(7), "weight": torch.tensor(0.5), "kind": "ce", "none": None}
    pieces = split_label(label, 3, None, 7)
    assert [piece["y"].tolist() for piece in pieces] == [[0, 1, 2], [3, 4], [5, 6]]
    assert all(piece["weight"] is label["weight"] for piece in pieces)
    assert all((piece["kind"], piece["none"]) == ("ce", None) for piece in pieces)
    assert split_label(None, 3) == [None, None, None]


def test_gradients_flow_through_the_split():
    label = torch.ones(4, requires_grad=True)
    sum((i + 1) * piece.sum() for i, piece in enumerate(split_label(label, 2, None, 4))).backward()
    assert label.grad.tolist() == [1, 1, 2, 2]


def test_cut_where_the_inputs_are_cut():
    assert [len(p) for p in split_label(torch.arange(5), 2, None, [1, 4])] == [1, 4]


def test_rows_of_a_flattened_batch_stay_with_their_inputs():
    # Three sequences of two tokens in two microbatches: tensor_split alone would cut the second sequence in two.
    assert [p.tolist() for p in split_label(torch.arange(6), 2, None, [2, 1])] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("label", "count", "batch", "said"),
    [
        (torch.arange(7), 2, 4, "label has 7 rows, but the inputs have 4"),
        ({"a": [torch.arange(3)]}, 2, 4, r"label\['a'\]\[0\] has 3 rows"),
        (torch.arange(0), 2, 4, "too few for the 2"),
        ([torch.arange(4), torch.arange(5)], 2, None, r"label\[1\] has 5 rows, but label\[0\] has 4"),
        (torch.arange(2), 3, None, "too few for the 3"),
        (torch.arange(2), 3, 2, "too few for the 3"),
    ],
)
def test_labels_that_do_not_fit_are_never_silent(label, count, batch, said):
    with pytest.raises(SplitError, match=said):
        split_label(label, count, None, batch)


def test_specs():
    tokens, table = torch.arange(8).reshape(2, 4), torch.ones(3)
    pieces = split_label((tokens, table), 2, (TensorChunkSpec(1), REPLICATE), 9)
    assert pieces[1][0].tolist() == [[2, 3], [6, 7]]
    assert pieces[1][1] is table
    assert split_label(table, 2, _Replicate, 9)[0] is table
    assert [len(p) for p in split_label(torch.arange(7), 2, ZERO, 4)] == [4, 3]
    with pytest.raises(SplitError, match="size 3 on dim 0, too small for 4"):
        split_label(table, 4, ZERO)
    with pytest.raises(SplitError, match="for tensors, got int"):
        split_label([1], 2, [ZERO])


def test_functions():
    label = torch.arange(4)
    assert split_label(label, 2, lambda value, n: (value[:1], value[1:]))[1].tolist() == [1, 2, 3]
    with pytest.raises(SplitError, match="1 labels, expected one for each of 2"):
        split_label(label, 2, lambda value, n: [value])
    with pytest.raises(SplitError, match="Tensor for the labels"):
        split_label(label, 2, lambda value, n: value)


def test_one_microbatch_is_handed_through():
    label = torch.arange(3)
    assert split_label(label, 1, lambda *_: pytest.fail("called for one microbatch"), 7)[0] is label
    assert split_label(RoundPipePackedData([label]), 1)[0] is label


def test_packed_labels():
    assert split_label({"y": RoundPipePackedData([1, 2])}, 2) == [{"y": 1}, {"y": 2}]
    with pytest.raises(SplitError, match="packed in 3 microbatches, the inputs in 2"):
        split_label(RoundPipePackedData([1, 2, 3]), 2)
