"""What the optimizers share: the step, the checks of options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..call_site import caller_level


def scalar(value: float | Tensor) -> float:
    """The number, also of a tensor of one element (on a GPU this waits for it)."""
    return float(value.item()) if isinstance(value, Tensor) else float(value)


def check_number(name: str, value: float | Tensor, *, below: float | None = None) -> None:
    """ConfigError unless `value` is a number >= 0 (and < `below`), or a tensor of one such element."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise errors.ConfigError(f"{name} is a tensor of {value.numel()} elements, expected a number or 1 element")
    number = scalar(value)
    if not number >= 0 or (below is not None and not number < below):
        limit = "" if below is None else f" and below {below:g}"
        raise errors.ConfigError(f"invalid {name}: {number}, expected a number of at least 0{limit}")


def check_betas(betas: tuple[float | Tensor, float | Tensor]) -> None:
    for index, beta in enumerate(betas):
        check_number(f"betas[{index}]", beta, below=1.0)
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise errors.ConfigError("betas: one is a number, one a tensor; pass two numbers or two tensors")


def check_implementation(
    optimizer: str, foreach: bool | None, fused: bool | None, capturable: bool, differentiable: bool
) -> None:
    """Warns of options of torch that choose between implementations; refuses those that ask for what we cannot do."""
    for name, value in (("foreach", foreach), ("fused", fused)):
        if value is not None:
            warnings.warn(
                f"roundpipe.optim.{optimizer} ignores {name}={value}: it has one implementation, which is fused",
                stacklevel=caller_level(),
            )
    for name, asked in (("capturable", capturable), ("differentiable", differentiable)):
        if asked:
            raise errors.ConfigError(
                f"roundpipe.optim.{optimizer} has no {name}=True: it runs on the CPU and is not differentiated; "
                f"use torch.optim.{optimizer} for that"
            )


def refuse_compact(optimizer: str, options: Mapping[str, Any]) -> None:
    """Arguments of the compact path (and misspelt ones) on other parameters."""
    for name in options:
        raise errors.ConfigTypeError(
            f"roundpipe.optim.{optimizer} got {name}=...: an argument of the compact path is for an optimizer that is "
            f"given a RoundPipe model, roundpipe.optim.{optimizer}(model, ...); others do not exist"
        )


@torch._disable_dynamo
def _step_untraced(optimizer: HostOptimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """The operators are eager: a compiled training step breaks its graph here, and dynamo looks at no frame below.

    Called only where dynamo is loaded, because the decorator would load it, which takes seconds.
    """
    optimizer._step_group(group, parameters)


class HostOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose step updates each parameter in one pass over memory.

    :meth:`step` updates the parameters that have a gradient, in place, on the calling thread and torch's pool, and is
    done when it returns. Parameters on another device, of float64 or of tensor subclasses with behaviour of their own
    are updated by torch's operators. The state has the keys of the class of that name in ``torch.optim``, and each
    loads the other's.
    """

    _compact: type | None = None  # what the class becomes when it is given a wrapped model

    def __new__(cls, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        from .compact import is_compact

        return object.__new__(cls._compact if cls._compact is not None and is_compact(params) else cls)

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if isinstance(params, torch.nn.Module):
            name = type(self).__name__
            raise errors.ConfigTypeError(
                f"roundpipe.optim.{name}(params=...): got {type(params).__name__}, a module that is not wrapped; "
                f"expected its parameters (model.parameters()), or, for a compact optimizer, to be given a RoundPipe "
                f"model: roundpipe.optim.{name}(RoundPipe(model), ...)"
            )
        super().__init__(params, defaults)

    # What torch's classes keep in a group to choose an implementation; here they do not choose anything.
    _implementation: tuple[str, ...] = ()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step. ``closure``, if given, computes the gradients anew and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            if "torch._dynamo" in sys.modules:
                _step_untraced(self, group, parameters)
            else:
                self._step_group(group, parameters)
        return loss

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            # A state that was saved under another implementation's options goes on under ours.
            for name in self._implementation:
                group[name] = None if name in ("foreach", "fused") else False

    def _refuse_sparse(self, gradient: Tensor, remedy: str) -> None:
        if gradient.layout != torch.strided:
            raise errors.ConfigError(
                f"{type(self).__name__} does not support sparse gradients (got {gradient.layout}); {remedy}"
            )
