"""Splitting a label into the microbatches of the inputs; Note [Automatic split] in input_split.py."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.batch_tree import Leaf, leaves, reject_hidden_tensors, structure
from roundpipe.call_site import caller_level
from roundpipe.chunk_spec import is_replicate
from roundpipe.errors import SplitError
from roundpipe.leaf_split import REMEDY, check_list, divide, explicit_dim, is_automatic, rows_of
from roundpipe.packed import RoundPipePackedData

__all__ = ["split_label"]


def _warn_of_gradients(found: Sequence[Leaf]) -> None:
    for leaf in found:
        values = leaf.value if isinstance(leaf.value, RoundPipePackedData) else [leaf.value]
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in values):
            warnings.warn(
                f"{leaf.name} requires grad, but no gradient reaches a label. Make it under torch.no_grad() or detach "
                "it; if it is to get one, give it to the model as an argument and let the last layer hand it on.",
                stacklevel=caller_level(),
            )
            return


def split_label(
    label: Any, num_microbatch: int, spec: Any = None, row_counts: Sequence[int] | int | None = None
) -> list[Any]:
    """Splits a label into exactly ``num_microbatch`` pieces; see Note [Automatic split].

    Args:
        label: any ``torch.utils._pytree`` tree, or None.
        num_microbatch: the number of pieces of the inputs.
        spec: None (automatic), a spec like the label, or ``f(label, n)`` returning the list of the pieces.
        row_counts: ``InputPieces.row_counts`` of the inputs, or just the batch size. Automatically divided tensors
            must have as many rows, or a multiple of it (rows of a flattened batch), and are cut at the same places.
            None: not known.

    Raises:
        SplitError: as :func:`split_inputs`.
    """
    found = leaves(label, "label", None if callable(spec) and not is_replicate(spec) else spec)
    reject_hidden_tensors(found)
    _warn_of_gradients(found)
    by_function = callable(spec) and not is_replicate(spec) and num_microbatch > 1
    for leaf in found:
        if isinstance(leaf.value, RoundPipePackedData) and len(leaf.value) != num_microbatch and not by_function:
            raise SplitError(f"{leaf.name} is packed in {len(leaf.value)} microbatches, the inputs in {num_microbatch}")
    if num_microbatch == 1:
        columns = [divide(leaf, None, 1, None) for leaf in found]
        return [pytree.tree_unflatten([column[0] for column in columns], structure(label))]
    if by_function:
        made = spec(label, num_microbatch)
        check_list(made, num_microbatch, "split_label's function", "labels")
        for i, piece in enumerate(made):
            reject_hidden_tensors(leaves(piece, f"label of microbatch {i}"))
        return list(made)
    columns = []
    known = list(row_counts) if isinstance(row_counts, Sequence) else None
    batch = row_counts if isinstance(row_counts, int) else None
    if known is not None:
        batch = sum(known)
    first: Leaf | None = None
    for leaf in found:
        dim = explicit_dim(leaf)
        if dim is None and is_automatic(leaf):
            rows = rows_of(leaf, 0)
            if batch is None:
                first, batch = leaf, rows
            if rows % batch if batch else rows:
                origin = "the inputs have" if first is None else f"{first.name} has"
                raise SplitError(f"{leaf.name} has {rows} rows, but {origin} {batch}{REMEDY}")
            if rows < num_microbatch:
                raise SplitError(
                    f"{leaf.name} has {rows} rows, too few for the {num_microbatch} microbatches of the inputs{REMEDY}"
                )
            scale = rows // batch if batch else 1
            sizes = None if known is None else [count * scale for count in known]
            columns.append(divide(leaf, 0, num_microbatch, sizes))
            continue
        if dim is not None and rows_of(leaf, dim) < num_microbatch:
            raise SplitError(
                f"{leaf.name} has size {rows_of(leaf, dim)} on dim {dim}, too small for {num_microbatch} microbatches"
            )
        columns.append(divide(leaf, dim, num_microbatch, None))
    tree = structure(label)
    return [pytree.tree_unflatten([column[i] for column in columns], tree) for i in range(num_microbatch)]
