"""docs/guide.md is one program: its blocks run in order, with the claims they assert, on any number of devices."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import roundpipe

from .pages import ROOT, python_blocks, run_block

GUIDE = ROOT / "docs" / "guide.md"


@pytest.mark.parametrize("devices", ["host:1", "host:2@64MiB"])
def test_the_guide_runs(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    roundpipe.use_devices(devices)
    torch.manual_seed(0)
    variables: dict[str, Any] = {}
    for line, code in python_blocks(GUIDE):
        run_block(GUIDE, line, code, variables)
    assert "predicted:" in capsys.readouterr().out  # the plan that it prints


def test_every_section_has_code_and_no_name_is_out_of_date() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    sections = text.split("\n## ")[1:]
    assert len(sections) == 8
    assert all("```python" in section for section in sections)
    for name in re.findall(r"`roundpipe\.(\w+)", text):
        assert hasattr(roundpipe, name), name
    for name in re.findall(r"`(\w+(?:Error|OutOfMemory))`", text):
        assert hasattr(roundpipe.errors, name) or name == "ValueError", name
