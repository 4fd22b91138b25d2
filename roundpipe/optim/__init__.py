"""Optimizers for parameters in host memory: drop-in for those of ``torch.optim``, one pass over memory each."""

from __future__ import annotations

from .adam import Adam, AdamW
from .lion import Lion
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Lion"]
