"""Checksums of a checkpoint's files: right in any order of writing, and damage anywhere is found before loading."""

from __future__ import annotations

import json
import random
import shutil
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe.checkpoint import checksum
from roundpipe.errors import CheckpointError, ConfigError

from .checkpoint_runs import Run, assert_same


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def test_pieces_in_any_order() -> None:
    generator = random.Random(0)
    for length in (0, 1, 2, 31, 1000, 70_001):
        data = generator.randbytes(length)
        for parts in (1, 2, 3, 17):
            cuts = sorted(generator.randint(0, length) for _ in range(parts - 1))
            bounds = list(zip([0, *cuts], [*cuts, length], strict=True))
            pieces = [(begin, end - begin, zlib.crc32(data[begin:end])) for begin, end in bounds]
            generator.shuffle(pieces)
            assert checksum.of_pieces(pieces) == zlib.crc32(data)
    with pytest.raises(AssertionError, match="bytes 2 to 3 have no checksum"):
        checksum.of_pieces([(0, 2, 1), (3, 1, 1)])
    long = 10 << 20  # by its length alone: zeros
    assert checksum.joined(zlib.crc32(b"head"), zlib.crc32(bytes(long)), long) == zlib.crc32(b"head" + bytes(long))


@pytest.mark.parametrize("threads", [True, False])
def test_files_that_are_written(monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    generator = random.Random(1)
    files = {name: generator.randbytes(length) for name, length in (("a", 1_500_000), ("b", 300), ("c", 0))}
    sums = checksum.WrittenFiles()
    step = 400_000
    places = [(name, begin) for name, data in files.items() for begin in range(0, len(data), step)]
    generator.shuffle(places)
    for name, begin in places:
        sums.begin(name, begin, memoryview(files[name])[begin : begin + step])
        sums.end()
    sums.close()
    assert {name: sums.total(name) for name in files} == {name: zlib.crc32(data) for name, data in files.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    roundpipe.use_devices("host:2")
    directory = tmp_path_factory.mktemp("whole") / "a"
    saving = Run("split", "async", scaled=True).train(3).save(directory, max_shard_bytes=600)
    saving.wait()
    return directory


def test_they_are_those_of_the_usual_tools(whole: Path) -> None:
    found = json.loads((whole / "checkpoint.json").read_text())
    files = {path.name: path.read_bytes() for path in whole.iterdir() if path.name != "checkpoint.json"}
    assert len(files) > 6
    assert found["crc32"] == {name: f"{zlib.crc32(data):08x}" for name, data in files.items()}
    assert found["bytes"] == {name: len(data) for name, data in files.items()}


def test_what_a_step_urges_is_summed_up_too(tmp_path: Path) -> None:
    run = Run("split", "async").train(2)
    saving = run.save(tmp_path / "a", max_shard_bytes=600)
    run.train(3)  # its steps choose the order of writing
    saving.wait()
    found = json.loads((tmp_path / "a" / "checkpoint.json").read_text())["crc32"]
    assert all(int(text, 16) == zlib.crc32((tmp_path / "a" / name).read_bytes()) for name, text in found.items())


def test_a_flipped_bit_anywhere_is_found_and_changes_nothing(tmp_path: Path, whole: Path) -> None:
    target = Run("split", "async", scaled=True, seed=7).train(2)
    want = target.bits()
    shutil.copytree(whole, tmp_path / "a")
    generator = random.Random(2)
    for path in sorted((tmp_path / "a").iterdir()):
        if path.name == "checkpoint.json":
            continue
        data = path.read_bytes()
        for place in (0, len(data) - 1, generator.randrange(len(data))):
            changed = bytearray(data)
            changed[place] ^= 1 << generator.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(CheckpointError) as caught:
                target.load(tmp_path / "a")
            assert path.name in str(caught.value)
        path.write_bytes(data)
    assert_same(target.bits(), want)
    target.load(tmp_path / "a")


def test_reading_may_be_spared(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "a")
    (path,) = (tmp_path / "a").glob("model-00001-of-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    run = Run("split", "async", scaled=True)
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged.*{zlib.crc32(data):08x}"):
        roundpipe.load(run.model, run.optimizer, run.scaler, tmp_path / "a")
    roundpipe.load(run.model, run.optimizer, run.scaler, tmp_path / "a", verify=False)
    with pytest.raises(ConfigError, match="verify"):
        roundpipe.load(run.model, run.optimizer, run.scaler, tmp_path / "a", verify=1)  # type: ignore[arg-type]


def test_checkpoints_from_before_there_were_checksums_load(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "a")
    path = tmp_path / "a" / "checkpoint.json"
    found = json.loads(path.read_text())
    del found["crc32"]
    found["bytes"] = {name: size for name, size in found["bytes"].items() if not name.endswith(".safetensors")}
    path.write_text(json.dumps(found))
    state = torch.load(tmp_path / "a" / "state.pt", weights_only=True)
    del state["random numbers"]["devices"]
    old = tmp_path / "state"
    torch.save(state, old)
    found["bytes"]["state.pt"] = old.stat().st_size
    old.rename(tmp_path / "a" / "state.pt")
    path.write_text(json.dumps(found))
    want = Run("split", "async", scaled=True, seed=1).load(whole).train(1).bits()
    assert_same(Run("split", "async", scaled=True, seed=2).load(tmp_path / "a").train(1).bits(), want)


def test_a_file_that_cannot_be_read_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"text")
    expected = [(tmp_path / "a", 0), (tmp_path / "b", zlib.crc32(b"text"))]
    with pytest.raises(CheckpointError, match="a cannot be read"):
        checksum.verify(expected)
    checksum.verify(expected[1:])
    checksum.verify([])
