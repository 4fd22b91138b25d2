"""Split and merge together: a batch goes through microbatches and comes back, whatever its shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe import batch, input_split


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(input_split, "_warned_small_batch", True)


def test_names():
    assert set(batch.__all__) >= {"RoundPipePackedData", "split_inputs", "split_label", "merge_outputs"}
    assert all(hasattr(batch, name) for name in batch.__all__)


def _trees(rows):
    leaf = st.one_of(
        st.lists(st.integers(0, 3), max_size=2).map(lambda rest: torch.rand(rows, *rest)),
        st.just(torch.tensor(3.0)),
        st.sampled_from(["text", 1, None, 2.5]),
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        max_leaves=6,
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 9), count=st.integers(1, 5))
def test_round_trip(data, rows, count):
    args = (torch.rand(rows, 2), data.draw(_trees(rows)))
    kwargs = {"k": data.draw(_trees(rows))}
    pieces = batch.split_inputs(args, kwargs, count)
    assert len(pieces) == min(rows, count)
    merged_args, merged_kwargs = batch.merge_outputs(list(pieces))
    torch.testing.assert_close((merged_args, merged_kwargs), (args, kwargs), rtol=0, atol=0) if _only_tensors(
        (args, kwargs)
    ) else _assert_same((merged_args, merged_kwargs), (args, kwargs))
    labels = batch.split_label(args, len(pieces), None, pieces.row_counts)
    for label, (piece, _) in zip(labels, pieces, strict=True):
        _assert_same(label, piece)


def _only_tensors(tree):
    return all(isinstance(leaf, torch.Tensor) for leaf in torch.utils._pytree.tree_leaves(tree))


def _assert_same(one, other):
    left, left_tree = torch.utils._pytree.tree_flatten(one)
    right, right_tree = torch.utils._pytree.tree_flatten(other)
    assert left_tree == right_tree
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(2, 9), count=st.integers(2, 5))
def test_packed_outputs_are_inputs_of_the_next(rows, count):
    x, mask = torch.rand(rows, 2), torch.rand(rows)
    first = batch.split_inputs((x,), {}, count)
    packed = batch.merge_outputs([{"h": args[0] * 2} for args, _ in first], False)
    second = batch.split_inputs((packed["h"],), {"mask": mask}, 99)
    assert len(second) == len(first)
    merged = batch.merge_outputs([(args[0], kwargs["mask"]) for args, kwargs in second])
    _assert_same(merged, (x * 2, mask))
