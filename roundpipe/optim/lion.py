"""Lion for parameters in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .. import _ops
from .flat_memory import FlatMemory, real
from .host_optimizer import HostOptimizer, check_betas, check_number, refuse_compact, scalar

if TYPE_CHECKING:
    from ..model import RoundPipe
    from .compact import CompactOptions


class Lion(HostOptimizer):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023), fast on the CPU.

    ``weight = weight * (1 - lr * weight_decay) - lr * sign(beta1 * average + (1 - beta1) * gradient)``, then
    ``average = beta2 * average + (1 - beta2) * gradient``. Complex numbers are pairs of real ones. A gradient that is
    NaN makes its weight NaN: the usual ``sign(NaN) = 0`` would end that weight's training in silence.

    Args:
        params: parameters, or groups of them; of any float or complex dtype. The average has the parameter's dtype,
            arithmetic is float32 (float64 for float64).
        lr: learning rate, a number or a tensor of one element; usually 3 to 10 times smaller than Adam's.
        betas: decay of the average in the direction, and of the average; two numbers or two tensors of one element.
        weight_decay: scales the weight, usually 3 to 10 times larger than AdamW's.
        maximize: ascend.

    Raises ConfigError (a ValueError) for options out of range, and for sparse gradients.
    """

    def __init__(
        self,
        params: ParamsT | RoundPipe,
        lr: float | Tensor = 1e-4,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
        **compact: Unpack[CompactOptions],
    ) -> None:
        refuse_compact(type(self).__name__, compact)
        check_number("lr", lr)
        check_number("weight_decay", weight_decay)
        check_betas(betas)
        defaults = dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize)
        super().__init__(params, defaults)  # type: ignore[arg-type]

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        beta1, beta2 = map(scalar, group["betas"])
        options: dict[str, Any] = dict(
            lr=scalar(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=scalar(group["weight_decay"]),
            maximize=bool(group["maximize"]),
        )
        memory = FlatMemory()
        rows: list[tuple[Tensor, ...]] = []
        for parameter in parameters:
            assert parameter.grad is not None
            self._refuse_sparse(parameter.grad, "use torch.optim.SGD for them, or a layer with sparse=False")
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            row = memory.views(parameter, gradient, [state["exp_avg"]])
            if row is not None:
                rows.append(row)
            else:
                _step_by_torch(parameter, gradient, state["exp_avg"], **options)
        if rows:
            masters, gradients, averages = map(list, zip(*rows, strict=True))
            _ops.lion_update(masters, [], gradients, averages, **options)
            memory.write_back()


def _step_by_torch(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    weight, gradient, average = real(parameter), real(gradient), real(exp_avg)
    if maximize:
        gradient = -gradient
    direction = average.mul(beta1).add_(gradient, alpha=1 - beta1)
    direction = torch.where(direction.isnan(), direction, direction.sign())
    weight.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr)
    average.mul_(beta2).add_(gradient, alpha=1 - beta2)
