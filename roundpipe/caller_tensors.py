"""Tensors between the caller and the engine: inputs on their way in, packed outputs on their way out.

Packed outputs stay where they are, in pinned memory, and the next model's call reads them there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from . import _ops
from .boundary import Boundary, HostTensor, Traffic
from .engine import Engine
from .output_merge import merge_outputs
from .packed import TransferEvent


class OutputTransfer:
    """The copies to the host of one microbatch's outputs; a ``TransferEvent``."""

    def __init__(self, values: Iterable[HostTensor]) -> None:
        self._values = list(values)

    def synchronize(self) -> None:
        """Waits on the calling thread until the outputs can be read. Raises RoundPipeError when a copy failed."""
        for value in self._values:
            value.wait()

    def query(self) -> bool:
        """Whether the outputs can be read now."""
        return all(_ops.record_wait(value.record, 0) for value in self._values)

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """As ``synchronize``: what any stream does after it comes after the copies."""
        self.synchronize()


class _HandedOut:
    """Which host tensor lies behind a tensor that was given to the caller, as long as both are the same.

    Note [Handed out]
      Neither tensors nor containers carry this themselves: a deepcopy or a pickle would take it along. An entry ends
      with its tensor object; where one is missing the tensor is simply copied, after its transfer event.
    """

    def __init__(self) -> None:
        # No lock, which a fork could copy locked: single operations on a dictionary are atomic, and an entry's own
        # thread ends it before the address can be another tensor's.
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int, HostTensor, weakref.ref[Engine]]] = {}

    def note(self, tensor: torch.Tensor, host: HostTensor, engine: Engine) -> None:
        key, entries = id(tensor), self._entries
        ended = weakref.ref(tensor, lambda _: entries.pop(key, None))
        entries[key] = (ended, tensor._version, host, weakref.ref(engine))

    def source(self, tensor: torch.Tensor, engine: Engine) -> HostTensor | None:
        """The host tensor with this tensor's values in the engine's own memory; None: there is none any more."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor or entry[3]() is not engine:
            return None
        return entry[2] if entry[1] == tensor._version else None


handed_out = _HandedOut()


def unread_leaves(boundary: Boundary, is_saved: Callable[[HostTensor], bool]) -> list[Any]:
    """The leaves of one microbatch's output over the records' own memory, before their bytes have come.

    ``is_saved``: whether recompute will read a tensor again. The caller gets a copy of such a one, since he may write
    what he gets.
    """
    made: dict[int, torch.Tensor] = {}
    for leaf in boundary.leaves:
        if isinstance(leaf, HostTensor) and id(leaf) not in made:
            with torch.inference_mode(False):  # an inference tensor counts no versions: a write would not be seen
                if is_saved(leaf):
                    leaf.wait()
                    made[id(leaf)] = leaf.host().clone()
                else:
                    made[id(leaf)] = (
                        leaf.memory().data
                    )  # no view: autograd forbids writing one that a function returned
    return [made[id(leaf)] if isinstance(leaf, HostTensor) else leaf for leaf in boundary.leaves]


def pack(
    engine: Engine, boundaries: Sequence[Boundary], leaves: Sequence[list[Any]], rows: list[int] | None = None
) -> Any:
    """The outputs as a tree of ``RoundPipePackedData``; ``leaves`` as made by ``unread_leaves``, perhaps in a graph;
    ``rows`` as in ``merge_outputs``.
    """
    events = []
    for boundary, values in zip(boundaries, leaves, strict=True):
        hosts = {id(host): host for host in boundary.leaves if isinstance(host, HostTensor)}
        for host, value in zip(boundary.leaves, values, strict=True):
            if isinstance(host, HostTensor) and not host.on_host:  # as an input such a one goes to a device
                handed_out.note(value, host, engine)
        events.append(OutputTransfer(hosts.values()) if hosts else None)
    trees = [pytree.tree_unflatten(values, b.spec) for values, b in zip(leaves, boundaries, strict=True)]
    made = merge_outputs(trees, False, events)
    for packed in pytree.tree_leaves(made):
        packed.rows = rows
    return made


def host_boundary(
    engine: Engine, tree: Any, traffic: Traffic = Traffic.INPUTS, events: Sequence[TransferEvent] = ()
) -> Boundary:
    """A boundary from the caller's own tensors: copied into pinned memory now, unless another model put them out and
    they are unchanged since. ``events``: after which those that must be copied can be read.
    """
    leaves, spec = pytree.tree_flatten(tree)
    made: dict[int, HostTensor] = {}
    out: list[Any] = []
    grads = []
    unread = list(events)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in made:
                source = handed_out.source(leaf, engine)
                if source is None:
                    while unread:
                        unread.pop().synchronize()
                    source = HostTensor.from_host(engine, leaf, traffic)
                made[id(leaf)] = source
            out.append(made[id(leaf)])
            grads.append(leaf.requires_grad)
        else:
            out.append(leaf)
            grads.append(False)
    return Boundary(spec, out, grads)
