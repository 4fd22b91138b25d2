"""Adam and AdamW for parameters in host memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from .. import _ops
from .flat_memory import FlatMemory, real
from .host_optimizer import HostOptimizer, check_betas, check_implementation, check_number, refuse_compact, scalar

if TYPE_CHECKING:
    from ..model import RoundPipe
    from .compact import CompactOptions


class Adam(HostOptimizer):
    """Adam with the arguments and results of ``torch.optim.Adam`` (within rounding), fast on the CPU.

    Args:
        params: parameters, or groups of them, as every ``torch.optim.Optimizer`` takes; of any float or complex dtype.
            Moments have the parameter's dtype, arithmetic is float32 (float64 for float64).
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the averages of gradients and of their squares; two numbers or two tensors of one element.
        eps: added to the root of the second average.
        weight_decay: added to the gradient times the weight, or, with ``decoupled_weight_decay``, scaling the weight.
        amsgrad: divide by the largest second average so far.
        maximize: ascend.
        foreach, fused: ignored, with a warning when given.
        capturable, differentiable: must be False.

    Raises ConfigError (a ValueError) for options out of range, and for sparse gradients.
    """

    _implementation = ("foreach", "fused", "capturable", "differentiable")

    def __init__(
        self,
        params: ParamsT | RoundPipe,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **compact: Unpack[CompactOptions],
    ) -> None:
        refuse_compact(type(self).__name__, compact)
        check_implementation(type(self).__name__, foreach, fused, capturable, differentiable)
        check_number("lr", lr)
        check_number("eps", eps)
        check_number("weight_decay", weight_decay)
        check_betas(betas)
        defaults = dict(
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=None,
            capturable=False,
            differentiable=False,
            fused=None,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        super().__init__(params, defaults)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for of_parameter in self.state.values():
            if "step" in of_parameter and not isinstance(of_parameter["step"], Tensor):
                of_parameter["step"] = torch.tensor(float(of_parameter["step"]), dtype=_step_dtype())

    def _new_state(self, parameter: Tensor, amsgrad: bool) -> dict[str, Tensor]:
        state = {
            "step": torch.tensor(0.0, dtype=_step_dtype()),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
        if amsgrad:
            state["max_exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        options = _options(group)
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        memory = FlatMemory()
        rows: list[tuple[Tensor, ...]] = []
        counters: list[Tensor] = []
        steps: list[float] = []
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            self._refuse_sparse(gradient, "torch.optim.SparseAdam does")
        for parameter in parameters:
            gradient = parameter.grad
            assert gradient is not None
            state = self.state[parameter]
            if not state:
                state.update(self._new_state(parameter, group["amsgrad"]))
            moments = [state[name] for name in names]
            row = memory.views(parameter, gradient, moments)
            if row is not None:
                rows.append(row)
                counters.append(state["step"])
                steps.append(state["step"].item() + 1)
            else:
                state["step"] += 1
                _step_by_torch(parameter, gradient, moments, state["step"].item(), **options)
        if rows:
            masters, gradients, *averages = map(list, zip(*rows, strict=True))
            largest = averages[2] if group["amsgrad"] else []
            _ops.adam_update(masters, [], gradients, averages[0], averages[1], largest, steps, **options)
            memory.write_back()
            # With a number in place of the tensor each addition would make a tensor of it, several times the cost.
            torch._foreach_add_(counters, torch.tensor(1.0, device="cpu"), alpha=1.0)


class AdamW(Adam):
    """AdamW with the arguments and results of ``torch.optim.AdamW``: Adam whose weight decay scales the weight.

    Arguments as of :class:`Adam`.
    """

    def __init__(
        self,
        params: ParamsT | RoundPipe,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **compact: Unpack[CompactOptions],
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            **compact,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


def _step_dtype() -> torch.dtype:
    """Counts have to be exact whatever the default dtype."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def _options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = map(scalar, group["betas"])
    return dict(
        lr=scalar(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=scalar(group["eps"]),
        weight_decay=scalar(group["weight_decay"]),
        decoupled=bool(group["decoupled_weight_decay"]),
        maximize=bool(group["maximize"]),
    )


def _step_by_torch(
    parameter: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    step: float,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
) -> None:
    weight, gradient = real(parameter), real(gradient)
    average, variance, *largest = map(real, moments)
    if maximize:
        gradient = -gradient
    if weight_decay != 0 and decoupled:
        weight.mul_(1 - lr * weight_decay)
    elif weight_decay != 0:
        gradient = gradient.add(weight, alpha=weight_decay)
    average.lerp_(gradient, 1 - beta1)
    variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if largest:
        variance = torch.maximum(largest[0], variance, out=largest[0])
    denominator = (variance.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    weight.addcdiv_(average, denominator, value=-lr / (1 - beta1**step))
