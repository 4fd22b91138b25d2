"""A wrapped model in a Trainer of transformers that knows nothing of it: an error before anything runs.

Such a Trainer takes its batches by the signature of ``forward``, builds its optimizer on the host's weights and steps
it by hand. It gives nobody a sign of itself, but the first thing its constructor does with a model is to read
attributes that hardly anybody else asks for; so that is where it is looked for, among the callers.
"""

from __future__ import annotations

import sys
from typing import Any

from .errors import ConfigError

__all__ = ["ASKED_FOR", "refuse_plain_trainer"]

ASKED_FOR = frozenset({"is_quantized", "hf_quantizer", "hf_device_map"})
"""Attributes that the constructor reads, in the versions of transformers that have a ``processing_class``."""

_LIBRARIES = ("transformers", "trl")
_FRAMES = 6


def refuse_plain_trainer(name: str) -> None:
    """Raises ConfigError if a Trainer is asking that trains, by a step that is not the user's own (nor ours)."""
    trainer_module = sys.modules.get("transformers.trainer")
    kind: Any = getattr(trainer_module, "Trainer", None)
    if kind is None:
        return
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_back is None:
            return
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            if frame.f_locals.get("train_dataset", getattr(caller, "train_dataset", None)) is None:
                return  # it only evaluates
            step_of = next(c for c in type(caller).__mro__ if "training_step" in vars(c))
            if step_of.__module__.partition(".")[0] in _LIBRARIES:
                raise ConfigError(_message(name, type(caller), kind))
            return


def _message(name: str, given_to: type, plain: type) -> str:
    remedy = "roundpipe.hf.RoundPipeTrainer, which takes the same arguments"
    if given_to is not plain:
        remedy += f" (put it in front: class Mine(RoundPipeTrainer, {given_to.__name__}))"
    return (
        f"the wrapped model {name!r} was given to {given_to.__module__.partition('.')[0]}'s {given_to.__name__}, which "
        "builds an optimizer on the host weights and steps it by hand, so it would train nothing. Give it to "
        f"{remedy}, or write a loop of forward_backward and step."
    )
