"""Optimizers for parameters in host memory: drop-in for those of ``torch.optim``, one pass over memory each.

Given a wrapped model instead of parameters, each is a :class:`CompactOptimizer`: it trains the model's weights in
place, for ``model.step(optimizer)``.
"""

from __future__ import annotations

from .adam import Adam, AdamW
from .compact import CompactOptimizer
from .compact_classes import CompactAdam, CompactAdamW, CompactLion, CompactSGD
from .lion import Lion
from .sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CompactAdam",
    "CompactAdamW",
    "CompactLion",
    "CompactOptimizer",
    "CompactSGD",
    "Lion",
]
