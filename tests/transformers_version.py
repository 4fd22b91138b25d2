"""What older versions of transformers that we support cannot do, with or without us."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])


def skip_before(*version: int, reason: str) -> None:
    """Skips the running test under an older transformers."""
    if version > VERSION:
        pytest.skip(f"transformers {transformers.__version__}: {reason}")
