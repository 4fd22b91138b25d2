"""docs/checkpoints.md is one program."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.checkpoint import chunks, snapshot

from .pages import ROOT, python_blocks, run_block

PAGE = ROOT / "docs" / "checkpoints.md"


def test_the_page_runs(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("safetensors")
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    variables: dict[str, Any] = {}
    blocks = python_blocks(PAGE)
    assert len(blocks) == 3
    with caplog.at_level(logging.ERROR):
        for line, code in blocks:
            run_block(PAGE, line, code, variables)
    assert not caplog.records


def test_its_numbers() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"one buffer of {chunks.CHUNK_BYTES >> 20} MiB" in text
    assert f"Buffers up to {snapshot._COPIED_BYTES >> 20} MiB" in text
