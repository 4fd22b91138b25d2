"""Merging outputs: the automatic rule, specs, functions, packing, and what is refused."""

import dataclasses

import numpy
import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from roundpipe.batch import RoundPipePackedData, merge_outputs
from roundpipe.errors import SplitError

ZERO, REPLICATE = TensorChunkSpec(0), _Replicate()


@dataclasses.dataclass
class Hidden:
    x: object


def test_automatic():
    outputs = [
        {"x": torch.full((rows, 2), float(rows)), "loss": torch.tensor(float(rows)), "n": 3, "t": ("a", None)}
        for rows in (3, 2, 1)
    ]
    for spec in (None, True):
        merged = merge_outputs(outputs, spec)
        assert merged["x"][:, 0].tolist() == [3, 3, 3, 2, 2, 1]
        assert merged["loss"].item() == 2.0
        assert merged["loss"].dim() == 0
        assert (merged["n"], merged["t"]) == (3, ("a", None))


def test_gradients_flow_through_the_merge():
    parts = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    merged = merge_outputs([(part, part.sum()) for part in parts])
    (merged[0].sum() + merged[1]).backward()
    assert parts[0].grad.tolist() == [1.5, 1.5]
    assert parts[1].grad.tolist() == [1.5]


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.complex64, torch.complex64),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_average_of_0_dim_tensors(dtype, want):
    merged = merge_outputs([torch.tensor(1, dtype=dtype), torch.tensor(0, dtype=dtype)])
    assert merged.dtype == want
    assert merged.item() == 0.5


def test_single_output_is_itself():
    output = {"x": torch.ones(2)}
    assert merge_outputs([output]) is output
    assert merge_outputs([output], lambda outputs: pytest.fail("called for one microbatch")) is output
    assert merge_outputs([output], {"x": TensorChunkSpec(5)}) is output


def test_specs():
    outputs = [(torch.full((2, rows), float(i)), torch.tensor(i), i) for i, rows in enumerate((1, 2))]
    merged = merge_outputs(
        outputs,
        (TensorChunkSpec(1), _CustomReducer(torch.tensor(10), torch.add), _CustomReducer([], lambda a, b: [*a, b])),
    )
    assert merged[0].shape == (2, 3)
    assert merged[1].item() == 11
    assert merged[2] == [0, 1]
    same = torch.arange(3)
    assert merge_outputs([same, same.clone()], REPLICATE) is same
    assert merge_outputs([same, same], _Replicate) is same
    assert merge_outputs([same, same], ZERO).tolist() == [0, 1, 2, 0, 1, 2]
    assert merge_outputs([[same, same], [same, same]], [None, REPLICATE])[0].shape == (6,)
    one_for_all = merge_outputs([(torch.ones(1, 1), torch.tensor(1.0))] * 2, TensorChunkSpec(1))
    assert [tuple(t.shape) for t in one_for_all] == [(1, 2), ()]


def test_functions_see_all_outputs():
    assert merge_outputs([1, 2, 3], sum) == 6


def test_packing():
    event = object()
    outputs = [{"x": torch.ones(2), "k": 1}, {"x": torch.ones(1), "k": 2}]
    packed = merge_outputs(outputs, False, [event, None])
    assert isinstance(packed["x"], RoundPipePackedData)
    assert packed["x"][1] is outputs[1]["x"]
    assert packed["x"].transfer_event == [event, None]
    assert packed["k"] == [1, 2]
    single = merge_outputs([torch.ones(2)], False)
    assert isinstance(single, RoundPipePackedData)
    assert len(single) == 1


@pytest.mark.parametrize(
    ("outputs", "spec", "said"),
    [
        ([], None, "no microbatch output"),
        ([(1, 2), (1,)], None, "0 and 1 differ in structure"),
        ([{"n": 1}, {"n": 2}], None, r"output\['n'\] .* 1 in microbatch 0 and 2 in microbatch 1"),
        ([1, 1.0], None, "must be equal"),
        ([torch.ones(2, 3), torch.ones(2, 4)], None, r"shapes \[\(2, 3\), \(2, 4\)\] cannot be concatenated on dim 0"),
        ([torch.ones(2), torch.tensor(1.0)], None, "cannot be concatenated"),
        ([torch.tensor(1.0), torch.ones(2)], None, "cannot be concatenated"),
        ([torch.ones(2), None], None, "tensor in some microbatches only"),
        ([torch.ones(2), torch.ones(2)], TensorChunkSpec(1), "on dim 1"),
        ([torch.tensor(1.0), torch.tensor(1.0)], ZERO, "cannot be concatenated"),
        ([torch.ones(2), torch.zeros(2)], REPLICATE, "must be equal"),
        ([(1, 2), (1, 2)], (ZERO,), "1 entries for 2"),
        ([Hidden(torch.ones(2)), Hidden(torch.ones(2))], None, "register_pytree_node"),
        ([Hidden(torch.ones(2))], None, "register_pytree_node"),
        ([Hidden(torch.ones(2))], False, "register_pytree_node"),
    ],
)
def test_refused(outputs, spec, said):
    with pytest.raises(SplitError, match=said):
        merge_outputs(outputs, spec)


def test_arrays_are_compared_by_element():
    ones, zeros = numpy.ones(2), numpy.array([1.0, 0.0])
    assert merge_outputs([ones, ones.copy()]) is ones
    for other in (zeros, numpy.ones(3), numpy.ones((1, 2))):
        with pytest.raises(SplitError, match="must be equal"):
            merge_outputs([ones, other])


def test_equal_in_unusual_ways():
    nan = float("nan")
    assert merge_outputs([nan, float("nan")]) != 0
    array = numpy.ones(2)
    assert merge_outputs([array, array]) is array


def test_what_does_not_depend_on_the_batch_is_taken_once_where_rows_are_known():
    position = torch.randn(5, 2)
    assert torch.equal(merge_outputs([position, position.clone()], rows=[3, 2]), position)
    assert len(merge_outputs([position, position.clone()])) == 10
    assert len(merge_outputs([position, position + 1], rows=[3, 2])) == 10, "these do depend on it"
    assert len(merge_outputs([torch.ones(2, 2), torch.ones(2, 2)], rows=[2, 2])) == 4, "rows of the batch"
