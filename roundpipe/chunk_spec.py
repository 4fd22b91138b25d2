"""Reading the split and merge specs of ``torch.distributed.pipelining.microbatch`` without importing them.

That package takes most of a second to import and few programs use a spec. A spec object can only exist where its
module has been imported, so its classes are looked up among the imported modules.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils import _pytree as pytree

from roundpipe.errors import ConfigTypeError

__all__ = ["check_spec", "chunk_dim", "is_chunk", "is_reducer", "is_replicate", "is_spec"]

_MODULE = "torch.distributed.pipelining.microbatch"


def _class(name: str) -> type | None:
    found = getattr(sys.modules.get(_MODULE), name, None)
    return found if isinstance(found, type) else None


def is_chunk(value: object) -> bool:
    """Whether ``value`` is a ``TensorChunkSpec(dim)``."""
    kind = _class("TensorChunkSpec")
    return kind is not None and isinstance(value, kind)


def is_replicate(value: object) -> bool:
    """Whether ``value`` is ``_Replicate``; the class itself means the same as an instance, as in PyTorch."""
    kind = _class("_Replicate")
    return kind is not None and (value is kind or isinstance(value, kind))


def is_reducer(value: object) -> bool:
    """Whether ``value`` is a ``_CustomReducer(init_value, reduce_fn)``."""
    kind = _class("_CustomReducer")
    return kind is not None and isinstance(value, kind)


def is_spec(value: object) -> bool:
    """Whether ``value`` is one spec, not a tree of them."""
    return is_chunk(value) or is_replicate(value) or is_reducer(value)


def chunk_dim(spec: Any) -> int:
    """The dimension of a ``TensorChunkSpec``."""
    return int(spec.split_dim)


def check_spec(spec: object, name: str, *, reducers: bool) -> None:
    """Checks that every leaf of the tree ``spec`` is a spec or None ("automatic").

    Args:
        name: the field, for messages.
        reducers: whether a ``_CustomReducer`` has a meaning here (merging only).

    Raises:
        ConfigTypeError: a leaf is something else.
    """
    for leaf in pytree.tree_leaves(spec, is_leaf=lambda node: node is None):
        if leaf is None or is_chunk(leaf) or is_replicate(leaf) or (reducers and is_reducer(leaf)):
            continue
        expected = "TensorChunkSpec(dim), _Replicate" + (" or _CustomReducer" if reducers else "")
        raise ConfigTypeError(
            f"{name}: the spec holds {leaf!r} ({type(leaf).__name__}), expected a tree of {expected} from {_MODULE}, "
            "with None where the automatic rule is wanted"
        )
