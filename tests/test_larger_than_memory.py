"""A frozen model larger than the memory that its process may have trains adapters: the benchmark of it, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("memory_is_checked")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MIB = 1 << 20
FILE_MIB = 640  # beyond the limit also where the process itself is large: torch with CUDA


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
        options = f"--device host:1 --file-mib {FILE_MIB} --room-mib 192 --layer-mib 8 --steps 1 --folder {tmp_path}"
        assert larger_than_memory.main([*options.split(), "--results", str(tmp_path)]) == 0
    finally:
        for name in ("larger_than_memory", "memory_group", "file_weights", "common"):
            sys.modules.pop(name, None)
    (file,) = tmp_path.glob("larger_than_memory-*.json")
    result = json.loads(file.read_text())
    whole, limited = result["without limit"], result["limited"]
    assert result["equal"] and whole["losses"] == limited["losses"]
    assert limited["weights_bytes"] == FILE_MIB * MIB > limited["limit_bytes"]
    assert limited["group_peak_bytes"] <= limited["limit_bytes"]
    assert 0 < limited["resident_bytes_at_most"] < limited["limit_bytes"] - limited["base_bytes"] // 2
    assert limited["read_bytes"] >= FILE_MIB * MIB  # they came from the disk, each at least once


IN_A_GROUP = """
import sys
sys.path[:0] = [{benchmarks!r}, {root!r}]
from memory_group import join
join({group!r})
import torch, roundpipe
from pathlib import Path
from torch import nn
from file_weights import Looked, mapped_weights
from roundpipe.errors import HostOutOfMemory

roundpipe.use_devices("host:1@192MiB")  # its memory is of the group too
path = Path({file!r})
with open(path, "wb") as file:
    file.truncate(1 << 30)  # holes: larger than the group, and no disk is needed
model = nn.Sequential(*(Looked(weight, 8) for weight in mapped_weights(path, 16)))
for pin_model in ("alloc", "register"):
    try:
        roundpipe.RoundPipe(model, pin_model=pin_model)
    except HostOutOfMemory as error:
        assert error.limit_bytes == {limit}, error.limit_bytes
        assert error.available_bytes < {limit} and error.asked_bytes >= 1 << 30, error
        assert dict(error.remedies)['pin_model="off"'] >= 1 << 30, error.remedies
        assert "cgroup limit" in str(error), error
        print(pin_model)
wrapped = roundpipe.RoundPipe(model, pin_model="auto")
with torch.no_grad():
    out = wrapped(torch.zeros(2, 8))
assert torch.equal(out, torch.zeros(2, 8))
print(wrapped._state.placement.mode)
"""


@pytest.mark.timeout(300)
def test_what_the_group_would_be_killed_for_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        from memory_group import NoGroups, memory_group

        limit = 768 * MIB
        try:
            with memory_group(limit) as group:
                code = IN_A_GROUP.format(
                    benchmarks=str(BENCHMARKS),
                    root=str(BENCHMARKS.parent),
                    group=str(group.path),
                    file=str(tmp_path / "weights.bin"),
                    limit=limit,
                )
                done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
        except NoGroups as error:
            pytest.skip(str(error))
    finally:
        sys.modules.pop("memory_group", None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["alloc", "register", "off"]
