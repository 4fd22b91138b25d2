"""An optimizer as a Trainer's loop sees it, whose step runs where the gradients of a streamed model are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from roundpipe.errors import ConfigError

if TYPE_CHECKING:
    from roundpipe import RoundPipe

__all__ = ["StreamedOptimizer"]


class StreamedOptimizer(torch.optim.Optimizer):
    """Gives everything on to `inner`; `step` is an exact step of `model`, with what was asked of it since the last."""

    _is_accelerate_prepared = True  # accelerate leaves it as it is

    def __init__(self, inner: torch.optim.Optimizer, model: RoundPipe, scaler: Any = None) -> None:
        own = {id(parameter) for parameter in model.optim_parameters()}
        foreign = [p for group in inner.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ConfigError(
                f"the optimizer holds {len(foreign)} parameters (the first of shape {tuple(foreign[0].shape)}) that "
                "are not optimizer parameters of the streamed model, so it would train nothing: let the Trainer build "
                "it, or build it from trainer.streamed.optim_parameters() in create_optimizer"
            )
        self.inner = inner
        self._model = model
        self._scaler = scaler
        self._max_norm: float | None = None
        self._norm = torch.zeros(())
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
        self._norm = torch.zeros(())
        return self._norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ConfigError("step(closure) cannot be streamed: the closure would have to be a forward and backward")
        max_norm, self._max_norm = self._max_norm, None
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
        if self._scaler is not None:
            before = self._scaler.get_scale(up_to_date=True)
            self._scaler.update(is_async=False)
            self.step_was_skipped = self._scaler.get_scale(up_to_date=True) < before


def clip(optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
    """Scales the gradients to a global norm of at most `max_norm` and gives the norm that they had."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if math.isinf(max_norm):
        grads = [p.grad for p in parameters if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
