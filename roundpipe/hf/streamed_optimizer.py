"""An optimizer as a Trainer's loop sees it, whose step runs where the gradients of a streamed model are."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from roundpipe import optim
from roundpipe.errors import ConfigError
from roundpipe.optim.compact import CompactOptimizer

if TYPE_CHECKING:
    from roundpipe import RoundPipe

__all__ = ["StreamedOptimizer", "compact_optimizer", "is_compact_class"]


class GradientNorm(torch.Tensor):
    """A number that the step fills; `item` waits for a step under way that computes it."""

    read: Callable[[], float | None] | None = None

    def item(self) -> float:  # type: ignore[override]
        if self.read is not None:
            norm, self.read = self.read(), None
            if norm is not None:
                self.fill_(norm)
        return float(super().item())


def _new_norm() -> GradientNorm:
    return torch.zeros(()).as_subclass(GradientNorm)


class StreamedOptimizer(torch.optim.Optimizer):
    """Gives everything on to `inner`; `step` is an exact step of `model`, with what was asked of it since the last."""

    _is_accelerate_prepared = True  # accelerate leaves it as it is

    def __init__(self, inner: torch.optim.Optimizer, model: RoundPipe, scaler: Any = None) -> None:
        if isinstance(inner, CompactOptimizer):
            model._check_own(inner)
        else:
            own = {id(parameter) for parameter in model.optim_parameters()}
            foreign = [p for group in inner.param_groups for p in group["params"] if id(p) not in own]
            if foreign:
                raise ConfigError(
                    f"the optimizer holds {len(foreign)} parameters (the first of shape {tuple(foreign[0].shape)}) "
                    "that are not optimizer parameters of the streamed model, so it would train nothing: let the "
                    "Trainer build it (optimizer_cls_and_kwargs), or build it from "
                    "trainer.streamed.optim_parameters() in create_optimizer"
                )
        self.inner = inner
        self._model = model
        self._scaler = scaler
        self._max_norm: float | None = None
        self._norm = _new_norm()
        self.step_was_skipped = False

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.inner.param_groups = value

    @property
    def defaults(self) -> Any:
        return self.inner.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        self.inner.defaults = value

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> Any:
        self._model.synchronize()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._model.synchronize()
        self.inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none)

    def clip_at_step(self, max_norm: float) -> torch.Tensor:
        """The next step clips to this global norm (`inf`: only measures it); gives the tensor that will hold it."""
        self._max_norm = max_norm
        self._norm = _new_norm()
        return self._norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError("step(closure) cannot be streamed: the closure would have to be a forward and backward")
        max_norm, self._max_norm = self._max_norm, None
        if isinstance(self.inner, CompactOptimizer):
            self._compact_step(self.inner, max_norm)
        else:
            self._plain_step(max_norm)
        if self._scaler is not None:
            before = self._scaler.get_scale(up_to_date=True)
            self._scaler.update(is_async=False)
            self.step_was_skipped = self._scaler.get_scale(up_to_date=True) < before

    def _compact_step(self, inner: CompactOptimizer, max_norm: float | None) -> None:
        """Does not wait: each layer is updated before its next upload, beside the next forward."""
        inner.max_grad_norm = max_norm
        if self._scaler is None:
            self._model.step(inner, is_async=False)
        else:
            self._model.step(inner, is_async=False, scaler=self._scaler)

        def read() -> float | None:
            self._model.synchronize()
            return inner.grad_norm

        if max_norm is not None:
            self._norm.read = read

    def _plain_step(self, max_norm: float | None) -> None:
        norm = self._norm

        def update() -> None:
            inner, scaler = self.inner, self._scaler
            if scaler is not None:
                scaler.unscale_(inner)
            if max_norm is not None:
                norm.copy_(clip(inner, max_norm))
            if scaler is None:
                inner.step()
            else:
                scaler.step(inner)
            inner.zero_grad()

        self._model.step(update, is_async=False)


def is_compact_class(kind: object) -> bool:
    """Whether this is a class of `roundpipe.optim`, which trains a wrapped model's weights in place."""
    return isinstance(kind, type) and issubclass(kind, (optim.Adam, optim.SGD, optim.Lion))


def compact_optimizer(
    kind: Callable[..., Any], options: Mapping[str, Any], model: RoundPipe, args: Any, decayed: Collection[str]
) -> torch.optim.Optimizer:
    """`kind(model, ...)` with two groups, as the Trainer makes them. Options that are not given are the arguments'.

    decayed: names of the parameters that decay.
    """
    defaults = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if isinstance(kind, type) and issubclass(kind, optim.Adam):
        defaults |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    trained = [name for name, parameter in model._naming_model().named_parameters() if parameter.requires_grad]
    groups = []
    if any(name not in decayed for name in trained):
        groups = [{"params": lambda name, _: name not in decayed, "weight_decay": 0.0}]
    # Set anew for each step; that it is not None lets the devices measure their gradients from the first call on.
    return kind(model, groups=groups, **{**defaults, "max_grad_norm": float("inf"), **options})


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Scales the gradients to a global norm of at most `max_norm` and gives the norm that they had."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if math.isinf(max_norm):
        grads = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
