"""The programs of docs/huggingface.md run as they stand, given the model and the data that they speak of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import roundpipe

from .pages import ROOT, python_blocks, run_block

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

PAGE = ROOT / "docs" / "huggingface.md"


@pytest.fixture(autouse=True)
def two_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


def block(mention: str) -> tuple[int, str]:
    found = [(line, code) for line, code in python_blocks(PAGE) if mention in code]
    assert len(found) == 1, mention
    return found[0]


def setting(tmp_path) -> dict[str, Any]:
    from .test_trainer import LLAMA, Texts

    return dict(hf_model=LLAMA.make(), dataset=Texts(32), directory=tmp_path)


def test_every_block_is_one_of_these() -> None:
    mentions = ("TrainingArguments", "SFTTrainer", "Accelerator")
    assert sorted(python_blocks(PAGE)) == sorted(map(block, mentions))


def test_the_oldest_transformers_is_the_same_everywhere() -> None:
    found = re.search(r'"transformers>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found
    oldest = found[1]
    for page in (PAGE, ROOT / "README.md"):
        assert f"transformers {oldest} or newer" in " ".join(page.read_text().split()), page
    assert f"transformers=={oldest}.0 trl" in (ROOT / "CONTRIBUTING.md").read_text()
    assert tuple(map(int, transformers.__version__.split(".")[:2])) >= tuple(map(int, oldest.split(".")))


def test_the_trainer(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    line, code = block("TrainingArguments")
    variables = setting(tmp_path)
    run_block(PAGE, line, code.replace('"out",', '"out", use_cpu=True, report_to=[], max_steps=1,'), variables)
    assert variables["trainer"].state.global_step == 1


def test_sft_trainer() -> None:
    pytest.importorskip("trl")
    variables: dict[str, Any] = {}
    run_block(PAGE, *block("SFTTrainer"), variables)
    assert issubclass(variables["RoundPipeSFTTrainer"], transformers.Trainer)


def test_the_loop_with_accelerate(tmp_path, monkeypatch) -> None:
    """Its weights are those of the plain loop."""
    variables = setting(tmp_path)
    plain = type(variables["hf_model"])(variables["hf_model"].config)
    plain.load_state_dict(variables["hf_model"].state_dict())
    rows: list[dict[str, torch.Tensor]] = []
    original = variables["dataset"]

    class Noting(torch.utils.data.Dataset):  # accelerate shuffles in its own way
        def __len__(self):
            return len(original)

        def __getitem__(self, row):
            rows.append(original[row])
            return rows[-1]

    variables["dataset"] = Noting()
    run_block(PAGE, *block("Accelerator"), variables)
    assert len(rows) == 32

    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for batch in torch.utils.data.DataLoader(rows, batch_size=8):  # type: ignore[arg-type]
        plain(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, got), (_, want) in zip(saved.named_parameters(), plain.named_parameters(), strict=True):
        assert (got - want).abs().max() <= 1e-3 * want.abs().max(), name
