"""The optimizer's own copy of the trainable parameters, and the conversions between it and the host weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import _ops, finite_checks, optimizer_states
from .engine import Engine
from .units import TensorLayout, Unit

if TYPE_CHECKING:
    from .checkpoint.job import Hold

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _flat(image: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """The elements of a packed tensor in memory order, one-dimensional."""
    return image.narrow(0, layout.offset, layout.nbytes).view(layout.dtype)


@dataclass
class OptimizerParameter:
    """One trainable parameter as the optimizer sees it; ``flat`` is its memory, with the order of the host weight."""

    host: nn.Parameter
    flat: torch.Tensor
    parameter: nn.Parameter
    layout: TensorLayout
    gradient: torch.Tensor | None = None  # kept over steps, so that no step pays for fresh pages

    def free_gradient(self) -> torch.Tensor:
        """Memory for a gradient that nobody else looks at (one-dimensional, in the order of ``flat``)."""
        # Two references: this object's and getrefcount's argument. More: someone kept an old .grad (a view of it).
        if self.gradient is None or sys.getrefcount(self.gradient) > 2 or self._viewed():
            self.gradient = _ops.host_empty([self.flat.numel()], self.flat.dtype)
        return self.gradient

    def _viewed(self) -> bool:
        assert self.gradient is not None
        return torch._C._storage_Use_Count(self.gradient.untyped_storage()._cdata) > 2

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.layout.size, self.layout.stride)


class OptimizerParameters:
    """All optimizer parameters of a model; made on first use for those that require grad."""

    def __init__(self, units: list[Unit], dtype: torch.dtype | None) -> None:
        self._units = units
        self.dtype = dtype
        self._made: dict[int, OptimizerParameter] = {}
        self._hosts: dict[int, nn.Parameter] = {}  # by id of the optimizer's parameter
        self.hold: Hold | None = None  # a save that has yet to write these and the state of their optimizer

    def __bool__(self) -> bool:
        return bool(self._made)

    @property
    def host_bytes(self) -> int:
        entries = self._made.values()
        return sum(e.flat.nbytes + (0 if e.gradient is None else e.gradient.nbytes) for e in entries)

    @property
    def state_bytes(self) -> int:
        """Of the optimizers that work on these parameters, as far as they are known; beside ``host_bytes``."""
        entries = self._made.values()
        if not entries:
            return 0
        own = [e.flat for e in entries] + [e.gradient for e in entries if e.gradient is not None]
        return optimizer_states.state_bytes(
            {id(e.parameter) for e in entries}, {t.untyped_storage().data_ptr() for t in own}
        )

    def ensure(self) -> list[str]:
        """Makes what is missing, from the present host weights. Requires that no publish is outstanding. Returns the
        names of those that were made now.
        """
        optimizer_states.watch()
        names = []
        for unit in self._units:
            # Of those too that were unfrozen after the gradients were packed.
            for index, (host, layout) in enumerate(zip(unit.parameters, unit.layouts, strict=True)):
                if id(host) in self._made or not host.requires_grad:
                    continue
                dtype = self.dtype if self.dtype is not None and host.is_floating_point() else host.dtype
                flat = _ops.host_empty([host.numel()], dtype)
                flat.copy_(unit.homes[index])
                parameter = nn.Parameter(flat.as_strided(layout.size, layout.stride))
                parameter.__dict__.update(host.__dict__)
                self._made[id(host)] = OptimizerParameter(host, flat, parameter, layout)
                self._hosts[id(parameter)] = host
                names.append(unit.names[index])
        return names

    def get(self, host: nn.Parameter) -> nn.Parameter | None:
        entry = self._made.get(id(host))
        return None if entry is None else entry.parameter

    def host_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """The host's parameter of the optimizer's; None for any other."""
        return self._hosts.get(id(parameter))

    def pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(the host's, the optimizer's) parameter."""
        for entry in self._made.values():
            yield entry.host, entry.parameter

    def wait_saved(self) -> None:
        """Before a step function may overwrite what a checkpoint holds of it; see Note [Snapshots]."""
        if self.hold is not None:
            self.hold.wait()
            self.hold = None

    def differs(self, host: nn.Parameter) -> bool:
        """Whether the host weight is another value than what was published from the optimizer's copy."""
        entry = self._made.get(id(host))
        return entry is None or not torch.equal(host, entry.parameter.to(host.dtype))

    def refresh(self, hosts: list[nn.Parameter]) -> None:
        """Takes over host weights that the user edited."""
        for host in hosts:
            entry = self._made.get(id(host))
            if entry is not None:
                with torch.no_grad():
                    entry.parameter.copy_(host)

    def zero_grad(self, set_to_none: bool) -> None:
        for entry in self._made.values():
            grad = entry.parameter.grad
            if grad is not None:
                if set_to_none:
                    entry.parameter.grad = None
                else:
                    grad.zero_()

    # -- conversions (optimizer thread) --------------------------------------------------------------------------
    def take(self, engine: Engine, unit: Unit, image: torch.Tensor, ticket: int) -> TakenUnit:
        """Starts converting a unit's gradients into memory of the optimizer's dtype, once ``ticket`` is ready."""
        sources, targets, entries = [], [], []
        for index, layout in zip(unit.trainable, unit.gradient_layouts, strict=True):
            entry = self._made[id(unit.parameters[index])]
            sources.append(_flat(image, layout))
            targets.append(entry.free_gradient())
            entries.append(entry)
        return TakenUnit(entries, targets, _Conversion(engine, ticket, sources, targets, check=finite_checks.wanted()))

    def publish(self, engine: Engine, unit: Unit, ticket: int) -> _Conversion:
        """Starts writing the optimizer's values into the host weights, once ``ticket`` is ready."""
        sources, targets = [], []
        for index in unit.trainable:
            entry = self._made.get(id(unit.parameters[index]))
            if entry is not None:
                sources.append(entry.flat)
                targets.append(unit.homes[index])
        return _Conversion(engine, ticket, sources, targets)


class _Conversion:
    """Element-wise conversion of several tensors under one ticket."""

    def __init__(
        self,
        engine: Engine,
        ticket: int,
        sources: list[torch.Tensor],
        targets: list[torch.Tensor],
        check: bool = False,
    ) -> None:
        self._engine = engine
        self._ticket = ticket
        self._pairs = list(zip(sources, targets, strict=True))
        self._update = 0
        self.non_finite: torch.Tensor | None = None  # once done, by source; None: nobody has looked
        if all(s.dtype in _KERNEL_DTYPES and t.dtype in _KERNEL_DTYPES for s, t in self._pairs):
            if check:
                self.non_finite = torch.zeros(len(sources), dtype=torch.uint8)
            none_added = [0] * len(targets)
            self._update = _ops.update_convert(engine.handle, ticket, sources, targets, none_added, self.non_finite)

    def wait(self) -> None:
        """Blocks until done. Raises Poisoned when what it waits for has failed."""
        if self._update:
            _ops.wait(_ops.update_wait, self._engine.handle, self._update)
            return
        # Dtypes without a kernel of ours (double, complex): torch converts, under the same ticket.
        state = 0
        while state == 0:
            state = _ops.ticket_wait(self._ticket, 100)
        if state == 1:
            with torch.no_grad():
                for source, target in self._pairs:
                    target.copy_(source)
        _ops.ticket_finish(self._ticket, state != 1)
        if state != 1:
            raise _ops.Poisoned("the gradients or weights that this update waits for have failed")


class TakenUnit:
    """Gradients of one unit on their way into the optimizer's memory."""

    def __init__(self, entries: list[OptimizerParameter], targets: list[torch.Tensor], conversion: _Conversion) -> None:
        self._entries = entries
        self._targets = targets
        self._conversion = conversion

    def wait(self) -> None:
        self._conversion.wait()

    def assign(self, touched: set[int]) -> None:
        """Adds to, or becomes, ``.grad`` of the parameters that got a gradient; None stays None."""
        flags = self._conversion.non_finite
        non_finite = None if flags is None else flags.tolist()
        for position in touched:
            entry = self._entries[position]
            grad = entry.shaped(self._targets[position])
            if entry.parameter.grad is None:
                entry.parameter.grad = grad
                if non_finite is not None:
                    finite_checks.note(entry.parameter.grad, bool(non_finite[position]))
            else:
                entry.parameter.grad = entry.parameter.grad + grad
        self._entries, self._targets = [], []
