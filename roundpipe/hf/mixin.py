"""`RoundPipeTrainer` in front of another subclass of the Trainer, such as TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

from roundpipe.errors import ConfigError

__all__ = ["check_mixin", "without_foreign_forward"]

_SFT = "SFTTrainer"
_SFT_LOSSES = ("nll", "chunked_nll")  # both are the model's own loss, the second one computed in chunks, as ours is


def check_mixin(kind: type, first: type, args: Any) -> None:
    """Raises ConfigError where a class behind `first` in the order of `kind` computes a loss that would be passed over.

    A class in front of `first`, which calls `super().compute_loss`, is another matter: its loss is streamed.
    """
    order = kind.__mro__[kind.__mro__.index(first) + 1 :]
    for base in order[: order.index(transformers.Trainer)]:
        if "compute_loss" not in vars(base):
            continue
        if base.__name__ != _SFT:
            raise ConfigError(
                f"{kind.__name__} puts {first.__name__} in front of {base.__name__}, whose own loss would not be used; "
                f"only TRL's {_SFT} can stand there. Write its loss as compute_loss_func, or override compute_loss in "
                f"{kind.__name__}"
            )
        loss_type = getattr(args, "loss_type", "nll")
        if loss_type not in _SFT_LOSSES:
            raise ConfigError(
                f"loss_type={loss_type!r} cannot be used with {kind.__name__}: the loss is the model's own; expected "
                f"one of {', '.join(map(repr, _SFT_LOSSES))}, or write it as compute_loss_func"
            )


def without_foreign_forward(model: nn.Module) -> None:
    """Takes away the forward that TRL hangs on a model to compute its loss in chunks: ours does so too, and a method of
    one object cannot be cut."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    function = getattr(vars(inside).get("forward"), "__func__", None)
    # Not its __module__, which functools.wraps has copied from the model's own.
    if function is not None and function.__globals__["__name__"].startswith("trl."):
        del inside.forward
