"""Units of weights: what is packed, streamed and updated together, and where it lives on the host.

Parameters that are used by exactly the same layers form one unit: a layer's own parameters are one unit, a parameter
shared by several layers belongs to a unit of that set of layers. On the device its weights are packed in one image. On
the host they are packed the same way in pinned memory, so that a unit moves in one copy, or stay where they are (Note
[Placements]). Up to two gradient images are packed in pinned memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import _ops
from .errors import ConfigError
from .host_placement import Placement, flat_home, is_dense

if TYPE_CHECKING:
    from .checkpoint.job import Hold

ALIGNMENT_BYTES = 256


def align(size_bytes: int) -> int:
    """Rounds up to the packing alignment, in bytes."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class TensorLayout:
    """One tensor inside a packed image: dtype, sizes, strides (in elements) and byte offset."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    nbytes: int

    def view(self, image: torch.Tensor, base: int = 0) -> torch.Tensor:
        """The tensor inside ``image`` (uint8, one-dimensional), whose packed image begins at byte ``base``."""
        return self.shaped(self.flat(image, base))

    def flat(self, image: torch.Tensor, base: int = 0) -> torch.Tensor:
        """The elements in memory order, one-dimensional."""
        return image.narrow(0, base + self.offset, self.nbytes).view(self.dtype)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride)


def layouts_of(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorLayout], int]:
    """How tensors are packed into one image, and its size in bytes."""
    layouts = []
    offset = 0
    for tensor in tensors:
        dense = tensor.numel() > 0 and is_dense(tensor)
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        nbytes = tensor.numel() * tensor.element_size()
        layouts.append(TensorLayout(tensor.dtype, tensor.shape, tuple(stride), offset, nbytes))
        offset = align(offset + nbytes)
    return layouts, offset


@dataclass
class GradientState:
    """What the host knows of a unit's gradients in the present accumulation window (caller's thread only)."""

    image: torch.Tensor | None = None  # holds the sum; None: nothing has accumulated
    has_gradient: list[bool] = field(default_factory=list)  # per trainable parameter: False means .grad is None


class Unit:
    """One packed group of parameters.

    Args:
        names: qualified name of each parameter, for messages.
        parameters: the host model's parameters; what ``placement`` does not keep is moved into a packed image.
        layers: indices of the layers that use exactly these parameters, ascending.
        placement: of the model.
    """

    _next_id = itertools.count(1)

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], layers: Sequence[int], placement: Placement
    ) -> None:
        self.key = next(Unit._next_id)
        self.names = list(names)
        self.parameters = list(parameters)
        self.layers = tuple(layers)
        self.placement = placement
        self.layouts, self.weight_bytes = layouts_of([p.detach() for p in parameters])
        moving = [i for i, p in enumerate(self.parameters) if not placement.keeps(p)]
        self.is_packed = len(moving) == len(self.parameters)  # the image is as on the device
        places, size_bytes = layouts_of([self.parameters[i].detach() for i in moving])
        self.image = _ops.host_empty([size_bytes], torch.uint8)
        # Where each weight lives: its elements in memory order, one-dimensional.
        self.homes = [torch.empty(0, dtype=p.dtype) if i in moving else flat_home(p) for i, p in enumerate(parameters)]
        for i, place in zip(moving, places, strict=True):
            view = place.view(self.image)
            with torch.no_grad():
                view.copy_(self.parameters[i])
            self.parameters[i].data = view
            self.homes[i] = place.flat(self.image)
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self.handle = 0
        self.hold: Hold | None = None  # a save that has yet to write the weights and what an optimizer keeps for them
        self._images: list[torch.Tensor] = []
        self._without_image = 0  # announced steps in a row
        self.layout_gradients()

    # -- gradients -----------------------------------------------------------------------------------------------
    def layout_gradients(self, frozen: Container[int] = ()) -> None:
        """Packs the gradients of those parameters that now require grad; drops what had accumulated.

        ``frozen``: parameters (by id) that count as if they required grad.
        """
        self.trainable = self._wanted(frozen)
        self.gradient_layouts, self.gradient_bytes = layouts_of([self.parameters[i].detach() for i in self.trainable])
        self._images = []
        self.gradients = GradientState(None, [False] * len(self.trainable))

    def layout_is_current(self, frozen: Container[int] = ()) -> bool:
        """Whether requires_grad of every parameter is as it was when the gradients were packed."""
        return self.trainable == self._wanted(frozen)

    def _wanted(self, frozen: Container[int]) -> list[int]:
        return [i for i, p in enumerate(self.parameters) if p.requires_grad or id(p) in frozen]

    def gradient_image(self, other_than: torch.Tensor | None) -> torch.Tensor:
        """A gradient image to write while ``other_than`` holds the sum of the calls before; made on first need."""
        self._without_image = 0
        for image in self._images:
            if image is not other_than:
                return image
        self._images.append(_ops.host_empty([self.gradient_bytes], torch.uint8))
        return self._images[-1]

    def do_without_image(self) -> None:
        """An announced step whose gradients pass through the pool; nothing has accumulated. Jobs under way hold what
        they still read or write."""
        self._without_image += 1
        if self._without_image > 1:
            self._images = []

    def gradient_views(self, image: torch.Tensor) -> list[torch.Tensor]:
        return [layout.view(image) for layout in self.gradient_layouts]

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.parameters[i] for i in self.trainable]

    @property
    def host_gradient_bytes(self) -> int:
        return sum(int(image.numel()) for image in self._images)

    # -- engine --------------------------------------------------------------------------------------------------
    def open(self, engine: int) -> None:
        """Registers the unit with an engine; the old registration, if any, is closed. No work is under way."""
        self.follow_publishes()
        self.close()
        homes, offsets = ([self.image], [0]) if self.is_packed else (self.homes, [lay.offset for lay in self.layouts])
        claim = self.placement.claim
        self.handle = _ops.unit_open(engine, homes, offsets, self.weight_bytes, self.gradient_bytes, claim)

    def follow_publishes(self) -> None:
        """Waits for every publish issued so far: the weights may be read on this thread, or registered anew."""
        if self.handle:
            ticket = _ops.ticket_issue(self.handle, 0)
            try:
                _ops.wait(_ops.ticket_wait, ticket)
            finally:
                _ops.ticket_finish(ticket, False)

    def wait_saved(self) -> None:
        """Before anything that a checkpoint holds of the unit is overwritten; see Note [Snapshots]."""
        if self.hold is not None:
            self.hold.wait()
            self.hold = None

    def close(self) -> None:
        if self.handle:
            handle, self.handle = self.handle, 0
            _ops.unit_close(handle)

    def job_bytes(self, gradients: bool) -> int:
        """Device bytes of the unit in one job."""
        return self.weight_bytes + (self.gradient_bytes if gradients else 0)

    def home(self, parameter: nn.Parameter) -> torch.Tensor:
        """The elements of one of the unit's host weights, in memory order, one-dimensional."""
        return self.homes[self._index[id(parameter)]]

    def is_home(self, index: int) -> bool:
        """Whether a parameter's data is where the unit has it."""
        parameter, home = self.parameters[index], self.homes[index]
        return home.numel() == 0 or parameter.data_ptr() == home.data_ptr()

    def bring_home(self) -> None:
        """Moves weights that were re-pointed (``p.data = ...``, ``load_state_dict(assign=True)``) back into place."""
        for i, (name, parameter, layout) in enumerate(zip(self.names, self.parameters, self.layouts, strict=True)):
            if self.is_home(i):
                continue
            if parameter.shape != layout.size or parameter.dtype != layout.dtype:
                raise ConfigError(
                    f"parameter {name!r} was replaced by a tensor of shape {tuple(parameter.shape)} and dtype "
                    f"{parameter.dtype}; expected {tuple(layout.size)}, {layout.dtype}. Wrap the model again after "
                    "changing the shape or dtype of a parameter."
                )
            view = layout.shaped(self.homes[i])
            with torch.no_grad():
                view.copy_(parameter)
            parameter.data = view

    def leave_image(self) -> None:
        """Weights go back to memory of their own: the model could not be placed as a whole."""
        for parameter, home in zip(self.parameters, self.homes, strict=True):
            if home.untyped_storage().data_ptr() == self.image.untyped_storage().data_ptr():
                parameter.data = parameter.data.clone()


def build_units(layers: Iterable[nn.Module], placement: Placement) -> tuple[list[Unit], list[list[Unit]]]:
    """Groups the parameters of all layers into units.

    Returns the units and, for each layer, the units it uses in the order of the layer's parameters.

    Raises:
        ConfigError: two different Parameter objects share memory.
        HostOutOfMemory: there is not enough memory to pin; all weights are in ordinary memory then.
    """
    found, groups, order = group_parameters(layers)
    _check_aliases(list(found.values()))
    units: dict[tuple[int, ...], Unit] = {}
    try:
        for sharers, keys in groups.items():
            units[sharers] = Unit([found[k][0] for k in keys], [found[k][1] for k in keys], sharers, placement)
    except BaseException:
        while units:  # one by one, so that each one's pinned memory goes before the next is copied
            units.popitem()[1].leave_image()
        raise
    return list(units.values()), [[units[sharers] for sharers in used] for used in order]


def group_parameters(
    layers: Iterable[nn.Module],
) -> tuple[dict[int, tuple[str, nn.Parameter]], dict[tuple[int, ...], list[int]], list[list[tuple[int, ...]]]]:
    """Which parameters form a unit.

    Returns the parameters by id, with their names; for each set of layers the ids of those that exactly these layers
    use; and for each layer the sets that it is in, in the order of its parameters.
    """
    users: dict[int, list[int]] = {}
    found: dict[int, tuple[str, nn.Parameter]] = {}
    seen: list[list[int]] = []
    for index, layer in enumerate(layers):
        seen.append([])
        for name, parameter in layer.named_parameters():
            key = id(parameter)
            found.setdefault(key, (f"{index}.{name}", parameter))
            users.setdefault(key, []).append(index)
            seen[-1].append(key)
    sharers = {key: tuple(sorted(set(used_by))) for key, used_by in users.items()}
    groups: dict[tuple[int, ...], list[int]] = {}
    for key, used_by in sharers.items():
        groups.setdefault(used_by, []).append(key)
    return found, groups, [list({sharers[key]: None for key in keys}) for keys in seen]


def check_parameters(layers: Iterable[nn.Module]) -> None:
    """Before anything is asked of their sizes and storages, which not every kind of parameter has.

    Raises ConfigError for a parameter that cannot be streamed.
    """
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            _check_parameter(f"{index}.{name}", parameter)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigError(f"parameter {name!r} is not initialised (a lazy module); run one forward before wrapping.")
    if parameter.device.type == "meta":
        raise ConfigError(f"parameter {name!r} is on the meta device and has no values; load the weights first.")
    if parameter.device.type != "cpu":
        raise ConfigError(
            f"parameter {name!r} is on {parameter.device}; expected a model on the CPU: RoundPipe keeps weights in "
            "host memory and streams them. Call model.cpu() before wrapping it."
        )
    if parameter.layout != torch.strided:
        raise ConfigError(f"parameter {name!r} has layout {parameter.layout}; expected a dense (strided) tensor.")


def _check_aliases(parameters: list[tuple[str, nn.Parameter]]) -> None:
    spans = []
    for name, parameter in parameters:
        if parameter.numel():
            begin = parameter.data_ptr()
            extent = sum((s - 1) * abs(st) for s, st in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            spans.append((begin, begin + extent * parameter.element_size(), name))
    spans.sort()
    for (_, end, first), (begin, _, second) in itertools.pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"parameters {first!r} and {second!r} are different Parameter objects over one memory; moving them "
                "to pinned memory would silently untie them. Tie weights by assigning the same Parameter object."
            )
