"""Where weights live on the host: packed in pinned memory of ours, or in their own storages.

Note [Placements]
  "alloc": each unit is copied into pinned memory of its exact size, layer by layer; a storage that nobody else holds
  goes as soon as its last weight has moved.
  "register": weights stay where they are and their pages are locked.
  "off": weights stay where they are, pageable or mapped from a file, and go up through bounce buffers.
  In place, a weight whose elements overlap or have gaps cannot be sent as it lies: it is packed as with "alloc".
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import nn

from . import _ops
from .errors import HostOutOfMemory, RoundPipeError

__all__ = ["MODES", "Placement", "choose", "is_dense"]

logger = logging.getLogger(__name__)

MODES = ("alloc", "register", "off", "auto")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


class Placed(Protocol):
    homes: list[torch.Tensor]


class Placement:
    """How one model's weights are placed, and its claim on their memory with the present engine."""

    def __init__(self, asked: str, mode: str | None = None) -> None:
        self.asked = asked
        self.mode = asked if mode is None else mode
        self.claim = 0

    @property
    def in_place(self) -> bool:
        return self.mode != "alloc"

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Whether a weight stays in its own storage."""
        plain = not parameter.is_conj() and not parameter.is_neg()
        return self.in_place and parameter.numel() > 0 and plain and is_dense(parameter)

    def open(self, engine: int, units: Iterable[Placed]) -> None:
        """Claims the memory of all weights for an engine; the claim before ends with the units that hold it.

        Raises:
            HostOutOfMemory, RoundPipeError: the memory cannot be page-locked; nothing of it is locked then.
        """
        self.close()
        if not self.in_place:
            return
        homes = [home for unit in units for home in unit.homes]
        if self.mode == "register":
            try:
                self.claim = _ops.host_claim(engine, homes, True)
                return
            except RoundPipeError as error:
                if self.asked != "auto":
                    raise _with_remedy(error) from error
                logger.warning('pin_model="auto": "off" instead of "register": %s', str(error))
                self.mode = "off"
        self.claim = _ops.host_claim(engine, homes, False)

    def close(self) -> None:
        claim, self.claim = self.claim, 0
        if claim:
            _ops.drop_quietly(_ops.host_claim_drop, claim)


def _with_remedy(error: RoundPipeError) -> RoundPipeError:
    text = f'pin_model="register": {error} Weights that stay pageable need no locked memory: pin_model="off".'
    if isinstance(error, HostOutOfMemory):
        return HostOutOfMemory(text, asked_bytes=error.asked_bytes)
    return RoundPipeError(text)


def choose(pin_model: str, layers: Sequence[nn.Module], name: str) -> Placement:
    """The placement that ``pin_model`` asks for; "auto" compares with the memory that is left, and logs why."""
    if pin_model != "auto":
        return Placement(pin_model)
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    mapped = _ops.host_file_bytes([flat for p in parameters if (flat := _flat(p)) is not None])
    room = _ops.host_limits()[4]
    copying = peak_of_copying(layers, mapped == 0) + gradients
    mode = "alloc" if copying <= room else "register" if mapped + gradients <= room else "off"
    logger.info(
        '%s: pin_model="auto" chose "%s": %s of weights (%s mapped from files) and %s of gradients; copying them takes '
        "%s at the peak, locking them in place %s, and %s of host memory are left",
        name,
        mode,
        *map(_gib, (weights, mapped, gradients, copying, mapped + gradients, room)),
    )
    return Placement("auto", mode)


def instead_of_copying(error: HostOutOfMemory) -> Placement:
    logger.warning('pin_model="auto": "register" instead of "alloc": %s', str(error))
    return Placement("auto", "register")


def peak_of_copying(layers: Sequence[nn.Module], releases: bool) -> int:
    """The most bytes by which host memory grows while weights are copied layer by layer.

    ``releases``: storages go when their last weight was copied, as those do that nothing but the model holds.
    """
    left: dict[int, set[int]] = {}  # by storage: weights that have not moved yet
    sizes: dict[int, int] = {}
    for layer in layers:
        for p in layer.parameters():
            storage = p.untyped_storage()
            left.setdefault(storage.data_ptr(), set()).add(id(p))
            sizes[storage.data_ptr()] = storage.nbytes()
    held = peak = 0
    moved: set[int] = set()
    for layer in layers:
        own = [p for p in {id(p): p for p in layer.parameters()}.values() if id(p) not in moved]
        held += sum(p.numel() * p.element_size() for p in own)
        peak = max(peak, held)
        for p in own:
            moved.add(id(p))
            place = p.untyped_storage().data_ptr()
            left[place].discard(id(p))
            if releases and not left[place]:
                held -= sizes.pop(place, 0)
    return peak


def _flat(parameter: torch.Tensor) -> torch.Tensor | None:
    if parameter.device.type != "cpu" or parameter.numel() == 0 or not is_dense(parameter):
        return None
    return flat_home(parameter)


def flat_home(parameter: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order, one-dimensional, without the version counter of the parameter."""
    return parameter.data.as_strided((parameter.numel(),), (1,))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
