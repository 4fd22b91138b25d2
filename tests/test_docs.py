"""What the documents say about the code is so: operators, environment variables, files, limits."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops
from roundpipe.errors import DeviceOutOfMemory

from .at_rest import fresh_engine

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def read(*parts: str) -> str:
    return ROOT.joinpath(*parts).read_text(encoding="utf-8")


def schema_names() -> set[str]:
    return set(re.findall(r'def\("(\w+)\(', read("csrc", "ops", "schemas.h")))


def operator_table() -> set[str]:
    """Operators in the second column of README's table of concepts."""
    section = read("README.md").partition("## Concepts and the operators")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row[2])}


@pytest.fixture
def called_operators(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Fills with the names of the operators that Python calls during the test."""
    seen: set[str] = set()
    call = _ops._call

    def noting(name: str, *args: Any) -> Any:
        seen.add(name)
        return call(name, *args)

    monkeypatch.setattr(_ops, "_call", noting)
    return seen


def test_training_calls_every_operator_of_the_table(called_operators: set[str]) -> None:
    named = operator_table()
    assert len(named) > 10 and named <= schema_names()
    fresh_engine("host:2@64MiB")
    for grain, pin_model in (("stage", "alloc"), ("layer", "register")):
        wrapped = RoundPipe(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), pin_model=pin_model)
        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(2):
            wrapped.forward_backward(
                (torch.randn(6, 8),),
                loss_fn=lambda out, _: out.square().mean(),
                run_config=RoundPipeRunConfig(recompute_grain=grain),
            )
            wrapped.step(optimizer.step)
        wrapped.synchronize()
        compact = roundpipe.optim.SGD(wrapped, lr=0.1, max_grad_norm=1.0)
        wrapped.forward_backward((torch.randn(6, 8),), loss_fn=lambda out, _: out.square().mean())
        wrapped.step(compact)
        compact.max_grad_norm = None
        wrapped.forward_backward((torch.randn(6, 8),), loss_fn=lambda out, _: out.square().mean(), step=compact)
        wrapped.synchronize()
        del wrapped, optimizer, compact
        gc.collect()
    assert named - called_operators == set()


def test_operators_said_to_be_unused_are_unused() -> None:
    sentence = read("README.md").partition("end what was\nbegun.")[2].partition("no part of the Python package")[0]
    unused = set(re.findall(r"`(\w+)`", sentence))
    assert unused, "README no longer has the sentence about operators that nothing calls"
    sources = [
        path.read_text(encoding="utf-8") for path in (ROOT / "roundpipe").rglob("*.py") if path.parent.name != "_ops"
    ]
    for name in unused:
        assert hasattr(_ops, name), name
        assert not any(re.search(rf"\b{name}\(", source) for source in sources), name


def environment_reads() -> Iterator[tuple[str, str]]:
    """(variable, file) wherever the code reads its environment."""
    quoted = re.compile(
        r"""(?:environ(?:\.get\(|\.setdefault\(|\[)|getenv\()\s*["'](\w+)["']|^ENVIRONMENT_VARIABLE = "(\w+)\"""", re.M
    )
    files = [ROOT / "setup.py"]
    for directory, endings in (("roundpipe", "py"), ("tests", "py cpp"), ("csrc", "cpp h cu"), ("examples", "py")):
        files += [path for ending in endings.split() for path in (ROOT / directory).rglob(f"*.{ending}")]
    for path in files:
        for match in quoted.finditer(path.read_text(encoding="utf-8")):
            yield match[1] or match[2], str(path.relative_to(ROOT))
    for name in re.findall(r"^(\w+) \?=", read("Makefile"), re.M):
        yield name, "Makefile"
    for name in re.findall(r"\$\{(\w+):-", read(".ci", "run")):
        yield name, ".ci/run"


def test_the_table_of_environment_variables_is_complete() -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", read("docs", "environment.md"), re.M))
    found = {name: where for name, where in environment_reads() if not name.startswith(("PYTHONPATH", "PYTEST_"))}
    assert {name: where for name, where in found.items() if name not in documented} == {}
    # CUDA reads its own variable.
    assert documented - found.keys() - {"CUDA_VISIBLE_DEVICES"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)  # x[0](y) is no link
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_rooms_and_notes_that_the_design_names_exist() -> None:
    design = read("docs", "design.md")
    core = design.partition("### csrc/core")[2].partition("### csrc/cpu")[0]
    for room in re.findall(r"\*\*(\w+)\*\*", core):
        assert (ROOT / "csrc" / "core" / f"{room}.h").exists(), room
    rooms_said = set(re.findall(r"\*\*(\w+)\*\*", core)) | {"host_stream"}
    for header in (ROOT / "csrc" / "core").glob("*.h"):
        small = {"argument_checks", "errors", "saturating_deadline"}
        assert header.stem in rooms_said | small, f"{header.name} has no place in docs/design.md"
    python = design.partition("### roundpipe (Python)")[2].partition("## 3")[0]
    for name in re.findall(r"`([\w/]+\.py)`", python):
        assert (ROOT / "roundpipe" / name).exists(), name
    sources = "".join(
        path.read_text(encoding="utf-8")
        for directory in ("csrc", "roundpipe")
        for path in (ROOT / directory).rglob("*")
        if path.suffix in (".h", ".py")
    )
    notes = set(re.findall(r"`(Note \[[\w ]+\])`", design))
    assert notes
    assert [note for note in notes if note not in sources] == []


def test_limits_that_readme_admits_are_still_there() -> None:
    """Who lifts one of these limits finds here that README must say so."""
    roundpipe.use_devices("host:2")

    def fails(grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model = RoundPipe(nn.Linear(4, 4))
    out = model(torch.ones(4, 4), roundpipe_run_config=RoundPipeRunConfig(on_oom="adapt"))
    model.model.weight.register_hook(fails)
    out.sum().backward()
    with pytest.raises(DeviceOutOfMemory):
        model.synchronize()
