"""How many bytes of activations a microbatch has at the boundaries of layers and, for backward, inside them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .boundary import Boundary, HostTensor, LiveTree
from .compiled import uncompiled

_FORGOTTEN = -1
"""Bytes of a microbatch that any other exceeds."""

__all__ = ["ActivationSizes", "SavedBytes", "microbatch_bytes"]


class ActivationSizes:
    """What calls have shown of one model.

    Entries are replaced as wholes, so workers may write while the caller's thread reads. ``entries[i]``:
    (bytes of the call's microbatch, bytes of the layer's input, bytes that its graph holds beside that input), or None.
    """

    def __init__(self, num_layers: int) -> None:
        self.entries: list[tuple[int, int, int] | None] = [None] * num_layers
        self.largest_bytes = 0  # of the microbatches of training calls so far
        self.revision = 0  # counts what may change a plan
        self._failed = False  # the largest microbatch was too large: the next call says how large they are

    @property
    def known(self) -> bool:
        return all(entry is not None for entry in self.entries)

    def begin(self, call_bytes: int) -> bool:
        """A call with microbatches of ``call_bytes``; whether it is to be measured."""
        if call_bytes > self.largest_bytes or self._failed:
            self._failed = False
            self.largest_bytes = call_bytes
            self.revision += 1
        return any(entry is None or entry[0] < call_bytes for entry in self.entries)

    def call_failed(self) -> None:
        """A device ran out of memory; whatever comes next is what plans must hold for."""
        self._failed = True

    @contextlib.contextmanager
    def supposing(self, call_bytes: int | None) -> Iterator[None]:
        """As if microbatches had ``call_bytes``; None: as they are."""
        before = self.largest_bytes
        if call_bytes is not None:
            self.largest_bytes = call_bytes
        try:
            yield
        finally:
            self.largest_bytes = before

    def forget(self) -> None:
        """Other parameters are trained from now on: the next call is measured, and counts more than those before."""
        self.entries = [None if entry is None else (_FORGOTTEN, *entry[1:]) for entry in self.entries]

    def note(self, layer: int, call_bytes: int, input_bytes: int, inner_bytes: int, more: bool = False) -> None:
        """``more``: in addition to what the same call has noted."""
        entry = self.entries[layer]
        if entry is not None and more and entry[0] == call_bytes:
            self.entries[layer] = (call_bytes, entry[1], entry[2] + inner_bytes)
        elif entry is None or call_bytes >= entry[0]:
            self.entries[layer] = (call_bytes, input_bytes, inner_bytes)
        self.revision += 1

    def of_layer(self, layer: int) -> tuple[int, int] | None:
        """(input, inner) bytes of the largest microbatch seen; in proportion where another size was measured."""
        entry = self.entries[layer]
        if entry is None:
            return None
        measured, input_bytes, inner_bytes = entry
        if measured > 0 and measured != self.largest_bytes > 0:
            ratio = self.largest_bytes / measured
            return int(input_bytes * ratio), int(inner_bytes * ratio)
        return input_bytes, inner_bytes


class SavedBytes:
    """Counts the memory that autograd wants to keep for one layer's backward, by the hooks of saved tensors.

    Memory that several saved tensors share counts once. Storages are held until ``note``, or memory that is freed (a
    forward that keeps nothing) and handed out again would be taken for the same.
    """

    def __init__(
        self,
        sizes: ActivationSizes,
        layer: int,
        call_bytes: int,
        live: LiveTree,
        weights: torch.Tensor,
        more: bool = False,
    ) -> None:
        self._sizes, self._layer, self._call_bytes, self._more = sizes, layer, call_bytes, more
        inputs = _storages(live.leaves)
        self._input_bytes = sum(inputs.values())
        self._elsewhere = {weights.untyped_storage().data_ptr(), *inputs}
        self._held: dict[int, torch.UntypedStorage] = {}

    @uncompiled
    def count(self, tensor: torch.Tensor) -> None:
        storage = _storage(tensor)
        if storage is not None:
            self._held.setdefault(storage.data_ptr(), storage)

    @uncompiled
    def keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """For a graph that is kept: beside the tensor its version, which hooks make autograd forget to check."""
        self.count(tensor)
        return tensor.detach(), tensor._version

    @staticmethod
    @uncompiled
    def unpack(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected {version}."
            )
        return tensor

    def note(self, outputs: Iterable[Any]) -> None:
        """The layer has given ``outputs``, which its successor needs whether or not this layer saved them."""
        held = {pointer: storage.nbytes() for pointer, storage in self._held.items()} | _storages(outputs)
        self._held.clear()
        inner = sum(size for pointer, size in held.items() if pointer not in self._elsewhere)
        self._sizes.note(self._layer, self._call_bytes, self._input_bytes, inner, self._more)


def microbatch_bytes(*boundaries: Iterable[Boundary]) -> int:
    """Bytes of the largest microbatch: inputs and labels together."""
    return max((sum(_host_bytes(b) for b in of_one) for of_one in zip(*boundaries, strict=False)), default=0)


def _host_bytes(boundary: Boundary) -> int:
    found = {id(leaf): leaf for leaf in boundary.leaves if isinstance(leaf, HostTensor)}
    return sum(leaf.nbytes for leaf in found.values())


def _storages(leaves: Iterable[Any]) -> dict[int, int]:
    found = (_storage(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage is not None}


@uncompiled
def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """None: a kind of tensor that has none, or an empty one."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.nbytes() and storage.data_ptr() else None
    except (NotImplementedError, RuntimeError):
        return None
