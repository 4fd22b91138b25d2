"""Splitting a call's arguments into microbatches.

Note [Automatic split]
The batch size is the dim 0 of the first tensor with dimensions among the positional arguments, or, when they hold
none, among the keyword arguments. Positional arguments and labels: every tensor with dimensions is divided on dim 0
and must fit. Keyword arguments: those whose dim 0 is the batch size are divided. Everything else goes to every
microbatch as it is. Pieces are made as ``torch.tensor_split`` makes them (the first ones are a row longer where the
rows do not divide evenly) and are views with their autograd history, so gradients flow through the split.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from roundpipe.batch_tree import Leaf, is_block_mask, leaves, reject_hidden_tensors, structure
from roundpipe.call_site import caller_level
from roundpipe.errors import SplitError
from roundpipe.leaf_split import REMEDY, check_list, divide, explicit_dim, is_automatic, packed_rows, rows_of
from roundpipe.packed import RoundPipePackedData, TransferEvent

__all__ = ["InputPieces", "split_inputs"]

_warned_small_batch = False


class InputPieces(list[tuple[tuple[Any, ...], dict[str, Any]]]):
    """The microbatches' ``(args, kwargs)``.

    Attributes:
        row_counts: rows of each microbatch, where a tensor with a batch dimension was divided; None otherwise.
        transfer_events: for each microbatch the events after which its packed inputs may be read.
    """

    def __init__(self, pieces: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(pieces)
        self.row_counts: list[int] | None = None
        self.transfer_events: list[list[TransferEvent]] = [[] for _ in pieces]

    @property
    def batch_size(self) -> int | None:
        """Rows of the whole batch, or None when nothing was divided by rows."""
        return None if self.row_counts is None else sum(self.row_counts)


def split_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    num_microbatch: int,
    spec: tuple[Any, Any] | Callable[..., Any] | None = None,
) -> InputPieces:
    """Splits the arguments of a call; see Note [Automatic split].

    Fewer microbatches than asked for come back when the batch has fewer rows (a warning says so once), when packed
    inputs bring their own number, or when there is nothing to divide (then one). With one microbatch nothing is split
    and no function of the user is called.

    Args:
        args: positional arguments, any ``torch.utils._pytree`` tree.
        kwargs: keyword arguments, likewise.
        num_microbatch: the number asked for, at least 1.
        spec: None (automatic), ``(args_spec or None, kwargs_spec or None)``, or ``f(args, kwargs, n)`` returning the
            list of the microbatches' args and the list of their kwargs.

    Raises:
        SplitError: what must be divided cannot be, a spec or the result of ``f`` does not fit, or a value holds
            tensors where PyTorch's trees do not see them.
    """
    args_spec, kwargs_spec = (None, None) if spec is None or callable(spec) else spec
    args_leaves = leaves(args, "args", args_spec)
    kwargs_leaves = leaves(kwargs, "kwargs", kwargs_spec)
    found = args_leaves + kwargs_leaves
    reject_hidden_tensors(found)
    packed = [leaf for leaf in found if isinstance(leaf.value, RoundPipePackedData)]
    count = _packed_count(packed) if packed else num_microbatch
    if count > 1 and callable(spec):
        return _call_split(spec, args, kwargs, count, packed)

    dims = _dims(args_leaves, kwargs_leaves, count) if count > 1 else [None] * len(found)
    divided = [(leaf, dim) for leaf, dim in zip(found, dims, strict=True) if dim is not None]
    if divided:
        count = _fit_count(divided, count, fixed=bool(packed))
    elif not packed and all(leaf.spec is None for leaf in found):
        count = 1
    sizes = _row_counts(rows_of(*divided[0]) if divided else None, packed, count)
    columns = [divide(leaf, dim if count > 1 else None, count, sizes) for leaf, dim in zip(found, dims, strict=True)]
    args_tree, kwargs_tree = structure(args), structure(kwargs)
    pieces = InputPieces(
        [
            (
                pytree.tree_unflatten([column[i] for column in columns[: len(args_leaves)]], args_tree),
                pytree.tree_unflatten([column[i] for column in columns[len(args_leaves) :]], kwargs_tree),
            )
            for i in range(count)
        ]
    )
    pieces.row_counts = sizes
    pieces.transfer_events = [
        [event for leaf in packed if (event := leaf.value.transfer_event[i]) is not None] for i in range(count)
    ]
    return pieces


def _packed_count(packed: Sequence[Leaf]) -> int:
    lengths = {leaf.name: len(leaf.value) for leaf in packed}
    count = min(lengths.values())
    if count == 0:
        raise SplitError(f"packed inputs without a microbatch: {lengths}")
    if max(lengths.values()) != count:
        warnings.warn(
            f"packed inputs have different numbers of microbatches {lengths}; the shortest one's, {count}, is used and "
            "the rest of the others is left out",
            stacklevel=caller_level(),
        )
    return count


def _dims(args_leaves: Sequence[Leaf], kwargs_leaves: Sequence[Leaf], count: int) -> list[int | None]:
    """For each leaf the dimension on which it is divided, or None."""
    batch: int | None = None
    origin = ""

    def take(leaf: Leaf, dim: int | None) -> None:
        nonlocal batch, origin
        if batch is not None:
            return
        if dim is not None:
            batch, origin = rows_of(leaf, dim), leaf.name
        elif isinstance(leaf.value, RoundPipePackedData) and (packed := packed_rows(leaf, count)):
            batch, origin = sum(packed), leaf.name

    dims: list[int | None] = []
    for leaf in args_leaves:
        dim = 0 if is_automatic(leaf) else explicit_dim(leaf)
        dims.append(dim)
        # Packed values may be anything a model put out; only what is divided here can set the batch size at once.
        if not isinstance(leaf.value, RoundPipePackedData):
            take(leaf, dim)
    for leaf in args_leaves:
        take(leaf, None)
    for leaf, dim in zip(args_leaves, dims, strict=True):
        if dim == 0 and is_automatic(leaf) and rows_of(leaf, 0) != batch:
            raise SplitError(f"{leaf.name} has {rows_of(leaf, 0)} rows, but {origin} has {batch}{REMEDY}")
    for leaf in kwargs_leaves:
        dim = explicit_dim(leaf)
        automatic = is_automatic(leaf)
        take(leaf, 0 if automatic else dim)
        if automatic and rows_of(leaf, 0) == batch:
            dim = 0
        elif automatic and is_block_mask(leaf.value):
            raise SplitError(f"{leaf.name} is a BlockMask of {rows_of(leaf, 0)} rows, but {origin} has {batch}")
        dims.append(dim)
    return dims


def _fit_count(divided: Sequence[tuple[Leaf, int]], count: int, *, fixed: bool) -> int:
    """The number of microbatches that what is divided has rows for."""
    global _warned_small_batch
    leaf, dim = min(divided, key=lambda item: rows_of(*item))
    rows = rows_of(leaf, dim)
    if rows >= count:
        return count
    if fixed:
        raise SplitError(
            f"{leaf.name} has size {rows} on dim {dim}, too small for the {count} microbatches of the packed inputs"
        )
    if not _warned_small_batch:
        _warned_small_batch = True
        warnings.warn(
            f"{leaf.name} has {rows} rows for num_microbatch={count}: such batches run with as many microbatches as "
            "they have rows. This is said once.",
            stacklevel=caller_level(),
        )
    return max(rows, 1)


def _row_counts(rows: int | None, packed: Sequence[Leaf], count: int) -> list[int] | None:
    """Rows of each microbatch. Packed values of the same batch may be cut elsewhere than tensor_split would cut."""
    for leaf in packed:
        sizes = packed_rows(leaf, count)
        if sizes is not None and (rows is None or sum(sizes) == rows):
            return sizes
    if rows is None:
        return None
    return [rows // count + (i < rows % count) for i in range(count)]


def _call_split(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], count: int, packed: Sequence[Leaf]
) -> InputPieces:
    who = "split_input's function"
    made = function(args, kwargs, count)
    if not isinstance(made, (list, tuple)) or len(made) != 2:
        raise SplitError(f"{who} returned {type(made).__name__}, expected (list of args, list of kwargs)")
    check_list(made[0], count, who, "args")
    check_list(made[1], count, who, "kwargs")
    pieces = InputPieces([])
    for i, (piece_args, piece_kwargs) in enumerate(zip(*made, strict=True)):
        if not isinstance(piece_args, (list, tuple)) or not isinstance(piece_kwargs, dict):
            raise SplitError(
                f"{who} returned args of type {type(piece_args).__name__} and kwargs of type "
                f"{type(piece_kwargs).__name__} for microbatch {i}, expected a tuple and a dict"
            )
        reject_hidden_tensors(leaves(piece_args, f"args of microbatch {i}"))
        reject_hidden_tensors(leaves(piece_kwargs, f"kwargs of microbatch {i}"))
        pieces.append((tuple(piece_args), piece_kwargs))
    # The function may have handed out packed values in any order, so each microbatch waits for all of them.
    events = [event for leaf in packed for event in leaf.value.transfer_event if event is not None]
    pieces.transfer_events = [list(events) for _ in range(count)]
    return pieces
