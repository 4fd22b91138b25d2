"""Checkpoints of model, optimizer and what belongs to them: written in the background, loaded as a whole."""

from __future__ import annotations

from .job import SaveHandle
from .loading import load
from .saving import save

__all__ = ["SaveHandle", "load", "save"]
