"""``RoundPipe`` and ``AutoRoundPipe`` under the path that scripts import them from."""

from __future__ import annotations

from .auto_model import AutoRoundPipe
from .model import RoundPipe

__all__ = ["AutoRoundPipe", "RoundPipe"]
