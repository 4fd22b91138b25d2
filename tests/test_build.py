"""The explicit source lists of setup.py name what the tree holds, no more and no less."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def listed() -> set[str]:
    """SOURCES and KERNELS, evaluated from setup.py's own assignments without running its setup()."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    wanted = {"OPS", "CORE", "CPU", "ROOMS", "SOURCES", "KERNELS"}
    assignments = [n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in wanted]
    names: dict[str, list[str]] = {}
    exec(compile(ast.Module(assignments, []), "setup.py", "exec"), names)
    return {*names["SOURCES"], *names["KERNELS"]}


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="runs in a source tree")
def test_every_source_is_built() -> None:
    rooms = ("ops", "core", "cpu", "cuda")
    tree = {str(p.relative_to(ROOT)) for r in rooms for e in ("cpp", "cu") for p in (ROOT / "csrc" / r).glob(f"*.{e}")}
    assert listed() == tree
