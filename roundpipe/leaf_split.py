"""How one leaf is divided: whether, on which dimension, and into which pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from roundpipe.batch_tree import Leaf, is_block_mask
from roundpipe.chunk_spec import chunk_dim, is_chunk
from roundpipe.errors import SplitError
from roundpipe.packed import RoundPipePackedData

__all__ = ["REMEDY", "check_list", "divide", "explicit_dim", "is_automatic", "packed_rows", "rows_of"]

REMEDY = (
    "; say by a spec what to do with it: TensorChunkSpec(dim) or _Replicate in RoundPipeRunConfig.split_input or "
    "split_label"
)


def is_automatic(leaf: Leaf) -> bool:
    """Whether the automatic rule divides this leaf, provided that its rows fit."""
    if leaf.spec is not None:
        return False
    if is_block_mask(leaf.value):
        return int(leaf.value.kv_num_blocks.size(0)) != 1  # a mask for one row is broadcast over the batch
    return isinstance(leaf.value, torch.Tensor) and leaf.value.dim() > 0


def explicit_dim(leaf: Leaf) -> int | None:
    """The dimension on which a spec divides this leaf, or None."""
    if not is_chunk(leaf.spec):
        return None
    dim, value = chunk_dim(leaf.spec), leaf.value
    if is_block_mask(value):
        if dim != 0:
            raise SplitError(f"{leaf.name}: a BlockMask can be divided on dim 0 only, the spec says {dim}")
        return 0 if value.kv_num_blocks.size(0) != 1 else None
    if isinstance(value, torch.Tensor):
        if -value.dim() <= dim < value.dim():
            return dim
        if leaf.exact or value.dim() > 0:
            raise SplitError(f"{leaf.name}: TensorChunkSpec({dim}) does not fit a tensor of shape {tuple(value.shape)}")
        return None
    if leaf.exact and value is not None and not isinstance(value, RoundPipePackedData):
        raise SplitError(
            f"{leaf.name}: TensorChunkSpec({dim}) is for tensors, got {type(value).__name__}; use _Replicate"
        )
    return None


def rows_of(leaf: Leaf, dim: int) -> int:
    """Size of the leaf on ``dim``."""
    tensor = leaf.value.kv_num_blocks if is_block_mask(leaf.value) else leaf.value
    return int(tensor.size(dim))


def packed_rows(leaf: Leaf, count: int) -> list[int] | None:
    """Rows of the first ``count`` values of a packed leaf, or None where they have no rows."""
    values = leaf.value[:count]
    if all(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values):
        return [int(value.size(0)) for value in values]
    return None


def divide(leaf: Leaf, dim: int | None, count: int, sizes: Sequence[int] | None) -> Sequence[Any]:
    """The ``count`` pieces of a leaf: cut on ``dim``, or the whole leaf for each when ``dim`` is None.

    ``sizes`` are the rows of the microbatches, followed by every tensor with as many rows in all.
    """
    value = leaf.value
    if isinstance(value, RoundPipePackedData):
        return value[:count]
    if dim is None:
        return [value] * count
    if is_block_mask(value):
        return _divide_block_mask(leaf, count, sizes)
    # Sizes hold for tensors with the batch's rows; another dimension that a spec divides is cut by itself.
    aligned = sizes is not None and sum(sizes) == value.size(dim)
    try:
        return torch.tensor_split(value, list(accumulate(sizes))[:-1] if aligned and sizes else count, dim)
    except (RuntimeError, NotImplementedError) as error:  # sparse and jagged layouts
        raise SplitError(f"{leaf.name}: a tensor of layout {value.layout} cannot be divided on dim {dim}") from error


def _divide_block_mask(leaf: Leaf, count: int, sizes: Sequence[int] | None) -> Sequence[Any]:
    import torch.distributed.pipelining.microbatch as microbatch

    split = getattr(microbatch, "_split_block_mask", None)
    even = [rows_of(leaf, 0) // count + (i < rows_of(leaf, 0) % count) for i in range(count)]
    if split is None or (sizes is not None and list(sizes) != even):
        raise SplitError(
            f"{leaf.name}: this BlockMask cannot be divided into {count} microbatches here; build it with B=1, or "
            "split the inputs with a function (RoundPipeRunConfig.split_input)"
        )
    pieces: Sequence[Any] = split(leaf.value, count)
    return pieces


def check_list(made: Any, count: int, who: str, what: str) -> None:
    """Refuses what a user's function returned unless it is a list with one entry a microbatch."""
    if not isinstance(made, (list, tuple)):
        raise SplitError(f"{who} returned {type(made).__name__} for the {what}, expected a list of {count}")
    if len(made) != count:
        raise SplitError(f"{who} returned {len(made)} {what}, expected one for each of {count} microbatches")
