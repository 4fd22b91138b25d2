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
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from . import _ops
from .errors import HostOutOfMemory, RoundPipeError
from .host_advice import Remedy, explain, format_bytes

__all__ = ["MODES", "Needs", "Placement", "choose", "is_dense"]

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


@dataclass(frozen=True)
class Needs:
    """What a model's weights take on the host, in bytes; found before they move."""

    weights_bytes: int
    """All weights, page-locked by "alloc" and "register"."""
    mapped_bytes: int
    """Of these, mapped from files: locking them in place copies them into memory."""
    frozen_mapped_bytes: int
    """And of these, of weights that do not require grad."""
    copying_bytes: int
    """The most by which memory grows while weights are copied layer by layer ("alloc")."""
    gradients_bytes: int
    """One image of all gradients, page-locked in every mode."""

    @classmethod
    def of(cls, layers: Sequence[nn.Module]) -> Needs:
        parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
        trained = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
        weights = sum(p.numel() * p.element_size() for p in parameters)
        mapped = _mapped_bytes(parameters)
        frozen = _mapped_bytes([p for p in parameters if not p.requires_grad]) if mapped else 0
        return cls(weights, mapped, frozen, peak_of_copying(layers, mapped == 0), trained)

    def remedies(self, mode: str) -> list[Remedy]:
        """What the other modes take less than ``mode`` while the model is wrapped, where that is worth a word."""
        takes = {"alloc": self.copying_bytes, "register": self.mapped_bytes, "off": 0}
        after = list(takes)[list(takes).index(mode) + 1 :]
        found = [(f'pin_model="{other}"', takes[mode] - takes[other]) for other in after]
        return [remedy for remedy in found if remedy[1] > takes[mode] // 100]


class Placement:
    """How one model's weights are placed, and its claim on their memory with the present engine."""

    def __init__(self, asked: str, needs: Needs, mode: str | None = None) -> None:
        self.asked = asked
        self.needs = needs
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
                self._tell_what_stays_pageable()
                return
            except RoundPipeError as error:
                if self.asked != "auto":
                    raise _with_remedy(error, self.needs) from error
                logger.warning('pin_model="auto": "off" instead of "register": %s', str(error))
                self.mode = "off"
        self.claim = _ops.host_claim(engine, homes, False)

    def _tell_what_stays_pageable(self) -> None:
        _, _, pageable, _, registrations = _ops.host_claim_stats(self.claim)
        if pageable > self.needs.weights_bytes // 10:
            logger.info(
                'pin_model="register": %s of %s of weights stay pageable and go up through bounce buffers: tensors too '
                "small to lock, or more than the driver's registrations (%d were made); few large storages are "
                'faster, as pin_model="alloc" makes them',
                format_bytes(pageable),
                format_bytes(self.needs.weights_bytes),
                registrations,
            )

    def close(self) -> None:
        claim, self.claim = self.claim, 0
        if claim:
            _ops.drop_quietly(_ops.host_claim_drop, claim)


def _with_remedy(error: RoundPipeError, needs: Needs) -> RoundPipeError:
    text = f'pin_model="register": {error} Weights that stay pageable need no locked memory: pin_model="off".'
    if isinstance(error, HostOutOfMemory):
        failure = HostOutOfMemory(
            text,
            asked_bytes=error.asked_bytes,
            available_bytes=error.available_bytes,
            limit_bytes=error.limit_bytes,
            holders=error.holders,
            remedies=error.remedies,
        )
        return explain(failure, needs.remedies("register"))
    return RoundPipeError(text)


def _check_skipped() -> bool:
    """As memory_check_skipped() in csrc/core/memory_limits.cpp."""
    return os.environ.get("ROUNDPIPE_SKIP_MEMORY_CHECK", "0") not in ("", "0")


def choose(pin_model: str, layers: Sequence[nn.Module], name: str) -> Placement:
    """The placement that ``pin_model`` asks for; "auto" compares with the memory that is left, and logs why.

    Raises:
        HostOutOfMemory: "alloc" needs more than there is; nothing has moved.
    """
    needs = Needs.of(layers)
    limits = _ops.host_limits()
    room, lockable = (1 << 62, 1 << 62) if _check_skipped() else (limits[4], limits[5])
    if pin_model == "alloc" and (needs.copying_bytes > room or needs.weights_bytes > lockable):
        raise explain(_too_large(needs, limits, name), needs.remedies("alloc"))
    if pin_model != "auto":
        return Placement(pin_model, needs)
    locked = needs.weights_bytes + needs.gradients_bytes
    copying = needs.copying_bytes + needs.gradients_bytes
    in_place = needs.mapped_bytes + needs.gradients_bytes
    if copying <= room and locked <= lockable:
        mode = "alloc"
    elif in_place <= room and locked <= lockable:
        mode = "register"
    else:
        mode = "off"
    sizes = (needs.weights_bytes, needs.mapped_bytes, needs.gradients_bytes, copying, in_place, room)
    logger.info(
        '%s: pin_model="auto" chose "%s": %s of weights (%s mapped from files) and %s of gradients; copying them takes '
        "%s at the peak, locking them in place %s, and %s of host memory are left%s",
        name,
        mode,
        *map(format_bytes, sizes),
        "" if lockable >= room else f", of which {format_bytes(lockable)} can be page-locked",
    )
    return Placement("auto", needs, mode)


def _too_large(needs: Needs, limits: Sequence[int], name: str) -> HostOutOfMemory:
    total, available, group, used, room, lockable, *_ = limits
    lacks_room = needs.copying_bytes > room
    asked = needs.copying_bytes if lacks_room else needs.weights_bytes
    why = f"{format_bytes(room)} are left (MemAvailable {format_bytes(available)} of {format_bytes(total)}"
    why += f", cgroup limit {format_bytes(group)} with {format_bytes(used)} used)" if group else ", no cgroup limit)"
    if not lacks_room:
        why = f"{format_bytes(lockable)} can still be page-locked"
    return HostOutOfMemory(
        f'{name}: pin_model="alloc" copies {format_bytes(needs.weights_bytes)} of weights into pinned memory and needs '
        f"{format_bytes(asked)} ({asked} bytes) for it at the peak, but {why}; nothing has moved. If this machine's "
        "memory grows as it is used, set ROUNDPIPE_SKIP_MEMORY_CHECK=1",
        asked_bytes=asked,
        available_bytes=room if lacks_room else lockable,
        limit_bytes=group or total,
    )


def instead_of_copying(error: HostOutOfMemory, needs: Needs) -> Placement:
    logger.warning('pin_model="auto": "register" instead of "alloc": %s', str(error))
    return Placement("auto", needs, "register")


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


def _mapped_bytes(parameters: Sequence[nn.Parameter]) -> int:
    return _ops.host_file_bytes([flat for p in parameters if (flat := _flat(p)) is not None])


def _flat(parameter: torch.Tensor) -> torch.Tensor | None:
    if parameter.device.type != "cpu" or parameter.numel() == 0 or not is_dense(parameter):
        return None
    return flat_home(parameter)


def flat_home(parameter: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in memory order, one-dimensional, without the version counter of the parameter."""
    return parameter.data.as_strided((parameter.numel(),), (1,))
