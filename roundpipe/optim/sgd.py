"""Stochastic gradient descent for parameters in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .. import _ops, errors
from .flat_memory import FlatMemory
from .host_optimizer import HostOptimizer, check_implementation, check_number, refuse_compact, scalar

if TYPE_CHECKING:
    from ..model import RoundPipe
    from .compact import CompactOptions


class SGD(HostOptimizer):
    """SGD with the arguments and results of ``torch.optim.SGD`` (within rounding), fast on the CPU.

    Args:
        params: parameters, or groups of them; of any float or complex dtype. The momentum buffer has the parameter's
            dtype, arithmetic is float32 (float64 for float64).
        lr: learning rate, a number or a tensor of one element.
        momentum: decay of the buffer; 0: no buffer.
        dampening: the gradient enters the buffer times ``1 - dampening``, but for the first one.
        weight_decay: added to the gradient times the weight.
        nesterov: needs a momentum and no dampening.
        maximize: ascend.
        foreach, fused: ignored, with a warning when given.
        differentiable: must be False.

    Raises ConfigError (a ValueError) for options out of range. Sparse gradients are taken where torch's operators can.
    """

    _implementation = ("foreach", "fused", "differentiable")

    def __init__(
        self,
        params: ParamsT | RoundPipe,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **compact: Unpack[CompactOptions],
    ) -> None:
        refuse_compact(type(self).__name__, compact)
        check_implementation(type(self).__name__, foreach, fused, False, differentiable)
        check_number("lr", lr)
        check_number("momentum", momentum)
        check_number("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise errors.ConfigError(
                f"nesterov needs a momentum above 0 and no dampening, got momentum={momentum}, dampening={dampening}"
            )
        defaults = dict(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=None,
            differentiable=False,
            fused=None,
        )
        super().__init__(params, defaults)  # type: ignore[arg-type]

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        options: dict[str, Any] = dict(
            lr=scalar(group["lr"]),
            momentum=scalar(group["momentum"]),
            dampening=scalar(group["dampening"]),
            weight_decay=scalar(group["weight_decay"]),
            nesterov=bool(group["nesterov"]),
            maximize=bool(group["maximize"]),
        )
        memory = FlatMemory()
        rows: list[tuple[Tensor, ...]] = []
        first: list[int] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            buffers: list[Tensor] = []
            new = False
            if options["momentum"] != 0:
                state = self.state[parameter]
                new = state.get("momentum_buffer") is None
                buffers = [torch.zeros_like(parameter) if new else state["momentum_buffer"]]
            row = memory.views(parameter, gradient, buffers)
            if row is not None:
                rows.append(row)
                first.append(new)
            else:
                buffers = _step_by_torch(parameter, gradient, [] if new else buffers, **options)
            if buffers:
                self.state[parameter]["momentum_buffer"] = buffers[0]
        if rows:
            masters, gradients, *lists = map(list, zip(*rows, strict=True))
            _ops.sgd_update(masters, [], gradients, lists[0] if lists else [], first, **options)
            memory.write_back()


def _step_by_torch(
    parameter: Tensor,
    gradient: Tensor,
    buffers: list[Tensor],
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
) -> list[Tensor]:
    """The step, and the momentum buffer if there is one; the operations are linear, also for complex numbers."""
    if maximize:
        gradient = -gradient
    if weight_decay != 0:
        gradient = gradient.add(parameter, alpha=weight_decay)
    if momentum != 0:
        if buffers:
            buffers[0].mul_(momentum).add_(gradient, alpha=1 - dampening)
        else:
            buffers = [gradient.clone()]
        gradient = gradient.add(buffers[0], alpha=momentum) if nesterov else buffers[0]
    parameter.add_(gradient, alpha=-lr)
    return buffers
