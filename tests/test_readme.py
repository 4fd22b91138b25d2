"""Every Python block of README runs as it stands, from the first line to the last, and trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe

README = Path(__file__).parents[1] / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks() -> list[tuple[int, str]]:
    """(line of the first statement, code) of every block marked as Python."""
    text = README.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)) + 1, m[2]) for m in FENCE.finditer(text) if m[1] == "python"]


def run_block(line: int, code: str, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs a block; the losses of its calls are noted on the way."""
    call = roundpipe.RoundPipe.forward_backward

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = call(self, *args, **kwargs)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(roundpipe.RoundPipe, "forward_backward", noting)
    torch.manual_seed(0)
    variables: dict[str, Any] = {"__name__": f"README.md:{line}"}
    # Line numbers in a traceback are those of README.
    exec(compile("\n" * (line - 1) + code, str(README), "exec"), variables)
    return variables


def test_there_are_blocks_to_run() -> None:
    blocks = python_blocks()
    assert any("RoundPipe(" in code for _, code in blocks)
    assert any("wrap_model_to_roundpipe(" in code for _, code in blocks)


@pytest.mark.parametrize("devices", ["host:1", "host:3"])
@pytest.mark.parametrize(
    ("line", "code"), python_blocks(), ids=lambda value: f"line{value}" if isinstance(value, int) else ""
)
def test_block_trains(line: int, code: str, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in code:
        pytest.importorskip("transformers")
    roundpipe.use_devices(devices)
    losses: list[float] = []
    variables = run_block(line, code, losses, monkeypatch)
    # Asynchronous steps: the first two iterations have the same weights.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[-1] < 0.95 * losses[0], losses
    if "accuracy" in variables:
        assert float(variables["accuracy"]) > 0.5
    del variables["model"]
