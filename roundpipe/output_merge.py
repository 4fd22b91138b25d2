"""Merging the microbatches' outputs into the output of the call.

Note [Automatic merge]
Tensors with dimensions are concatenated on dim 0; 0-dim tensors are averaged, every microbatch counting the same
(numbers that are not floating point become the default floating point type); all other leaves must be equal. Of a model
that was called with ``num_items_in_batch``, as those of transformers are, the microbatches' losses are added: each is a
sum over its own labels, divided by the count of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.batch_tree import Leaf, leaves, reject_hidden_tensors, structure
from roundpipe.chunk_spec import chunk_dim, is_chunk, is_reducer, is_replicate
from roundpipe.errors import SplitError
from roundpipe.packed import RoundPipePackedData, TransferEvent

__all__ = ["merge_outputs", "with_loss_of_batch"]

_REMEDY = "; set RoundPipeRunConfig.merge_output to a spec or a function that knows what to do, or to False"


def merge_outputs(
    outputs: Sequence[Any],
    spec: Any = None,
    transfer_events: Sequence[TransferEvent | None] | None = None,
    rows: Sequence[int] | None = None,
) -> Any:
    """Merges the outputs of the microbatches; see Note [Automatic merge]. Autograd history is kept.

    A single output is returned as it is (packed for ``spec=False``), and no function of the user is called.

    Args:
        outputs: one ``torch.utils._pytree`` tree a microbatch, all of one structure, in order.
        spec: None or True (automatic); a tree like an output, or one spec for all of it, of ``TensorChunkSpec(dim)``
            (concatenate), ``_CustomReducer`` (folded from its initial value in the order of the microbatches),
            ``_Replicate`` (all equal) and None (automatic); ``f(outputs)`` returning the merged value; or False: each
            leaf becomes a :class:`RoundPipePackedData`.
        transfer_events: for ``spec=False``, the event after which each microbatch's leaves can be read. Otherwise
            the caller has waited already.
        rows: rows of each microbatch. If given, a tensor of another size on dim 0 that is equal in all microbatches
            does not depend on the batch (such as embeddings of positions) and is taken once.

    Raises:
        SplitError: outputs of different structure, tensors that do not fit together, or unequal other leaves.
    """
    if not outputs:
        raise SplitError("there is no microbatch output to merge")
    function = callable(spec) and not is_replicate(spec)
    if len(outputs) == 1 and spec is not False:
        reject_hidden_tensors(leaves(outputs[0], "output"))
        return outputs[0]
    if function:
        merge: Callable[[list[Any]], Any] = spec
        return merge(list(outputs))
    first = leaves(outputs[0], "output", None if isinstance(spec, bool) else spec)
    tree = structure(outputs[0])
    columns: list[list[Any]] = [[] for _ in first]
    for i, output in enumerate(outputs):
        if structure(output) != tree:
            raise SplitError(
                f"the outputs of microbatches 0 and {i} differ in structure: {tree} and {structure(output)}{_REMEDY}"
            )
        found = leaves(output, "output")
        reject_hidden_tensors(found)
        for column, leaf in zip(columns, found, strict=True):
            column.append(leaf.value)
    if spec is False:
        packed = [RoundPipePackedData(column, transfer_events) for column in columns]
        return pytree.tree_unflatten(packed, tree)
    return pytree.tree_unflatten(
        [_merge(leaf, column, rows) for leaf, column in zip(first, columns, strict=True)], tree
    )


def with_loss_of_batch(merged: Any, outputs: Sequence[Any]) -> Any:
    """``merged`` with the sum of the microbatches' losses in place of their mean, see Note [Automatic merge].

    Only where it has a ``"loss"``, and no balancing loss is part of that: of such the mean is right.
    """
    if len(outputs) == 1 or not isinstance(merged, dict) or merged.get("aux_loss") is not None:
        return merged
    losses = [output.get("loss") for output in outputs]
    if all(isinstance(loss, torch.Tensor) and loss.dim() == 0 for loss in losses):
        merged["loss"] = torch.stack(losses).sum()
    return merged


def _merge(leaf: Leaf, values: list[Any], rows: Sequence[int] | None) -> Any:
    if is_reducer(leaf.spec):
        return reduce(leaf.spec.reduce_fn, values, leaf.spec.init_value)
    tensors = [isinstance(value, torch.Tensor) for value in values]
    if any(tensors) and not is_replicate(leaf.spec):
        if not all(tensors):
            raise SplitError(f"{leaf.name} is a tensor in some microbatches only{_REMEDY}")
        if is_chunk(leaf.spec):
            if values[0].dim() or leaf.exact:
                return _concatenate(leaf, values, chunk_dim(leaf.spec))
        elif any(value.dim() for value in values):
            if rows is not None and _is_unbatched(values, rows):
                return values[0]
            return _concatenate(leaf, values, 0)
        return _average(values)
    for i, value in enumerate(values):
        if not _equal(values[0], value):
            raise SplitError(
                f"{leaf.name} ({type(value).__name__}) is {values[0]!r} in microbatch 0 and {value!r} in microbatch "
                f"{i}, and must be equal to be merged{_REMEDY}"
            )
    return values[0]


def _is_unbatched(values: list[torch.Tensor], rows: Sequence[int]) -> bool:
    if any(value.dim() == 0 or value.size(0) == count for value, count in zip(values, rows, strict=True)):
        return False
    return all(_equal(values[0], value) for value in values)


def _concatenate(leaf: Leaf, values: list[torch.Tensor], dim: int) -> torch.Tensor:
    try:
        return torch.cat(values, dim)
    except (RuntimeError, IndexError) as error:
        shapes = [tuple(value.shape) for value in values]
        raise SplitError(f"{leaf.name}: shapes {shapes} cannot be concatenated on dim {dim}{_REMEDY}") from error


def _average(values: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(values)
    if not (stacked.is_floating_point() or stacked.is_complex()):
        stacked = stacked.to(torch.get_default_dtype())
    return stacked.mean()


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, float) and one != one:
        return bool(other != other)
    try:
        same = one == other
        if hasattr(same, "all") and one.shape == other.shape:  # arrays of NumPy and the like compare by element
            same = same.all()
        return bool(same)
    except (AttributeError, RuntimeError, ValueError, TypeError):  # a comparison without one truth value
        return False
