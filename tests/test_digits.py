"""The digits example learns: as a script, and as a notebook, whose cells run one after the other without Jupyter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe

pytest.importorskip("sklearn")

EXAMPLES = Path(__file__).parents[1] / "examples"
BAR = 0.97  # about what logistic regression reaches


@pytest.fixture(autouse=True)
def two_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


def test_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    assert digits.main(["--epochs", "5"]) == 0
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0] / 5
    found = re.search(r"held-out accuracy: ([\d.]+) of 360 images", printed)
    assert found and float(found[1]) > BAR, printed
    # Untrained, it only guesses.
    with torch.no_grad():
        images, labels = digits.digits()[1].tensors
        guesses = digits.network().eval()(images).argmax(1)
    assert (guesses == labels).float().mean().item() < 0.5


def test_notebook() -> None:
    notebook = json.loads((EXAMPLES / "digits.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert cell["id"] and cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None  # stored without results
            exec(compile("".join(cell["source"]), f"digits.ipynb:{cell['id']}", "exec"), names)
    assert names["accuracy"] > BAR
    assert names["losses"][-1] < names["losses"][0] / 5
