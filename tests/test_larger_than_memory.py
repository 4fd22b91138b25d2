"""A frozen model larger than the memory that its process may have trains adapters: the benchmark of it, in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MIB = 1 << 20


@pytest.mark.timeout(300)
def test_a_model_larger_than_its_control_group_trains_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where control groups can be made; the limit is real, and beyond it the kernel kills."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent), prepend=":")
    monkeypatch.setenv("ROUNDPIPE_CHECK", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    try:
        import larger_than_memory
        from memory_group import NoGroups, memory_group

        try:
            with memory_group(64 * MIB):
                pass
        except NoGroups as error:
            pytest.skip(str(error))
        options = f"--device host:1 --file-mib 448 --room-mib 192 --layer-mib 8 --steps 1 --folder {tmp_path}"
        assert larger_than_memory.main([*options.split(), "--results", str(tmp_path)]) == 0
    finally:
        for name in ("larger_than_memory", "memory_group", "file_weights", "common"):
            sys.modules.pop(name, None)
    (file,) = tmp_path.glob("larger_than_memory-*.json")
    result = json.loads(file.read_text())
    whole, limited = result["without limit"], result["limited"]
    assert result["equal"] and whole["losses"] == limited["losses"]
    assert limited["weights_bytes"] == 448 * MIB > limited["limit_bytes"]
    assert limited["group_peak_bytes"] <= limited["limit_bytes"]
    assert 0 < limited["resident_bytes_at_most"] < limited["limit_bytes"] - limited["base_bytes"] // 2
    assert limited["read_bytes"] >= 448 * MIB  # they came from the disk, each at least once
