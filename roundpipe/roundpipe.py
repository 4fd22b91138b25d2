"""``RoundPipe`` under the path that scripts import them from."""

from __future__ import annotations

from .model import RoundPipe

__all__ = ["RoundPipe"]
