"""The Python blocks of the documents, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """(line of the first statement, code) of every block marked as Python."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start(2)) + 1, m[2]) for m in FENCE.finditer(text) if m[1] == "python"]


def run_block(page: Path, line: int, code: str, variables: dict[str, Any]) -> None:
    """Line numbers in a traceback are those of the page."""
    variables["__name__"] = f"{page.name}:{line}"
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), variables)
