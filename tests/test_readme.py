"""Every Python block of README runs as it stands, from the first line to the last, and trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import roundpipe

from .pages import ROOT, python_blocks, run_block

README = ROOT / "README.md"


def run_noting_losses(line: int, code: str, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs a block; the losses of its calls are noted on the way."""
    call = roundpipe.RoundPipe.forward_backward

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = call(self, *args, **kwargs)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(roundpipe.RoundPipe, "forward_backward", noting)
    torch.manual_seed(0)
    variables: dict[str, Any] = {}
    run_block(README, line, code, variables)
    return variables


def test_there_are_blocks_to_run() -> None:
    blocks = python_blocks(README)
    assert any("RoundPipe(" in code for _, code in blocks)
    assert any("wrap_model_to_roundpipe(" in code for _, code in blocks)


@pytest.mark.parametrize("devices", ["host:1", "host:3"])
@pytest.mark.parametrize(
    ("line", "code"), python_blocks(README), ids=lambda value: f"line{value}" if isinstance(value, int) else ""
)
def test_block_trains(line: int, code: str, devices: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "transformers" in code:
        pytest.importorskip("transformers")
    roundpipe.use_devices(devices)
    losses: list[float] = []
    variables = run_noting_losses(line, code, losses, monkeypatch)
    # Asynchronous steps: the first two iterations have the same weights.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[-1] < 0.95 * losses[0], losses
    if "accuracy" in variables:
        assert float(variables["accuracy"]) > 0.5
    del variables["model"]
