"""Trees of arguments, labels and outputs as named leaves, with the split or merge spec that applies to each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from roundpipe.chunk_spec import is_spec
from roundpipe.errors import SplitError
from roundpipe.packed import RoundPipePackedData

__all__ = ["Leaf", "is_block_mask", "leaves", "reject_hidden_tensors", "structure"]


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree.

    Attributes:
        name: how a user would reach it, such as ``kwargs['mask']``.
        spec: the spec that applies, None for the automatic rule.
        exact: the spec was given for this very leaf, not for a subtree around it.
    """

    name: str
    value: Any
    spec: Any = None
    exact: bool = False


def is_block_mask(value: object) -> bool:
    """Whether ``value`` is a FlexAttention ``BlockMask``, which is split as a whole, never tensor by tensor."""
    # As with chunk specs: an instance exists only where its module has been imported, which is slow to do here.
    kind = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "BlockMask", None)
    return isinstance(kind, type) and isinstance(value, kind)


def is_cache(value: object) -> bool:
    """Whether ``value`` is a key/value cache of transformers."""
    return any(c.__name__ == "Cache" and c.__module__.startswith("transformers.") for c in type(value).__mro__)


def structure(tree: Any) -> pytree.TreeSpec:
    """The structure of ``tree`` with the same leaves as :func:`leaves`."""
    return pytree.tree_structure(tree, is_leaf=is_block_mask)


def leaves(tree: Any, name: str, spec: Any = None) -> list[Leaf]:
    """The leaves of ``tree`` in the order of ``torch.utils._pytree``.

    ``spec`` is None, one spec for all of ``tree``, or a container like ``tree`` of such. Lists and tuples may stand
    for each other in it.

    Raises:
        SplitError: ``spec`` does not fit ``tree``.
    """
    return list(_walk(tree, name, spec))


@dataclass(frozen=True)
class _Level:
    """A node of a tree and its direct children."""

    children: list[Any]
    names: list[str]  # how to reach each child from the node
    fields: list[str] | None  # the attributes that the children are, where they are attributes
    node: pytree.TreeSpec


def _level(tree: Any) -> _Level | None:
    """The direct children of ``tree``, or None for a leaf."""
    if is_block_mask(tree):
        return None
    # By identity number: pytree's functions keep `is_leaf` in a reference cycle, and with it whatever it captured.
    itself = id(tree)
    children, node = pytree.tree_flatten(tree, is_leaf=lambda inner: id(inner) != itself)
    if node.is_leaf():
        return None
    try:
        pairs, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda inner: id(inner) != itself)
    except ValueError:  # a type registered without key paths
        return _Level(children, [f"[{i}]" for i in range(len(children))], None, node)
    keys = [path[0] for path, _ in pairs]
    fields = [key.name for key in keys if isinstance(key, pytree.GetAttrKey)]
    return _Level(children, [str(key) for key in keys], fields if len(fields) == len(keys) else None, node)


def _walk(tree: Any, name: str, spec: Any) -> Iterator[Leaf]:
    if isinstance(tree, PackedSequence):
        raise SplitError(
            f"{name} is a PackedSequence, whose rows lie mixed and whose batch sizes must stay on the CPU, so it can "
            "be neither cut nor moved to a device. Give the padded tensor and the lengths, and pack inside of a layer."
        )
    level = _level(tree)
    if level is None:
        if spec is not None and not is_spec(spec):
            raise SplitError(f"{name}: the spec is {spec!r}, but the value is a single {type(tree).__name__}")
        yield Leaf(name, tree, spec, exact=spec is not None)
        return
    children, names = level.children, [name + key for key in level.names]
    if spec is None or is_spec(spec):
        for child, child_name in zip(children, names, strict=True):
            for leaf in _walk(child, child_name, spec):
                yield dataclasses.replace(leaf, exact=False)
        return
    for child, child_name, child_spec in zip(children, names, _child_specs(tree, level, spec, name), strict=True):
        yield from _walk(child, child_name, child_spec)


def _child_specs(tree: Any, level: _Level, spec: Any, name: str) -> Sequence[Any]:
    if isinstance(tree, dict) and isinstance(spec, dict):
        missing, unknown = [k for k in tree if k not in spec], [k for k in spec if k not in tree]
        if missing or unknown:
            raise SplitError(
                f"{name}: the spec lacks {missing} and has unknown {unknown}; it needs exactly the keys {list(tree)} "
                "(None as a value stands for the automatic rule)"
            )
        return [spec[key] for key in tree]
    if isinstance(tree, (list, tuple)) and isinstance(spec, (list, tuple)):
        if len(tree) != len(spec):
            raise SplitError(f"{name}: the spec has {len(spec)} entries for {len(tree)} values")
        return list(spec)
    if type(tree) is type(spec) and level.fields is not None:
        return [getattr(spec, field) for field in level.fields]
    given = _level(spec)
    if given is None or given.node != level.node:
        raise SplitError(
            f"{name}: the spec is of type {type(spec).__name__}, which does not fit the value's {type(tree).__name__}; "
            "write the spec in the shape of the value, or one spec for the whole"
        )
    return given.children


def reject_hidden_tensors(found: Sequence[Leaf]) -> None:
    """Refuses leaves that hold tensors inside, or will make them: they could be neither split nor moved to a device.

    Raises:
        SplitError: naming the leaf, its type and what to do.
    """
    for leaf in found:
        value = leaf.value
        if isinstance(value, torch.Tensor) or is_block_mask(value) or isinstance(value, RoundPipePackedData):
            continue
        if is_cache(value):
            raise SplitError(
                f"{leaf.name} is a key/value cache ({type(value).__name__}), which layers write: microbatches would "
                "see each other's tokens. Call the model with use_cache=False."
            )
        kind = type(value)
        if isinstance(value, Iterator):
            raise SplitError(
                f"{leaf.name} is an iterator ({kind.__qualname__}), which can be read only once, and computes its "
                "values when it is read: in another microbatch, another layer, without the weights of the one that "
                "made it. Give a list or a tuple of the values."
            )
        if _holds_tensor(value, set()):
            plain = " or pass a plain dict, list or tuple" if isinstance(value, (Mapping, Sequence, Set)) else ""
            raise SplitError(
                f"{leaf.name}: {kind.__module__}.{kind.__qualname__} holds tensors, but is not known to PyTorch's "
                f"trees, so they could be neither split nor moved. Register the type with "
                f"torch.utils._pytree.register_pytree_node (or register_dataclass){plain}"
            )


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (str, bytes, range, type)) or id(value) in seen:
        return False
    seen.add(id(value))
    inner: Iterator[Any]
    if dataclasses.is_dataclass(value):
        inner = iter([getattr(value, field.name, None) for field in dataclasses.fields(value)])
    elif isinstance(value, Mapping):
        inner = iter(value.values())
    elif isinstance(value, (list, tuple, Set)):
        inner = iter(value)
    else:
        return False
    return any(_holds_tensor(item, seen) for item in inner)
