"""A process that is killed at any point of writing leaves the checkpoint before whole, or the new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import roundpipe

from .checkpoint_runs import Run, assert_same

ROOT = Path(__file__).parents[1]

# Children are forked for speed, so the tensors lie in plain memory: pinned memory is not for children.
WRITER = """
import functools, os, signal, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from roundpipe.checkpoint import disk, job, saving
from roundpipe.checkpoint.job import Entry, Group, Hold, SaveHandle, SaveJob
from roundpipe.checkpoint.manifest import INDEX_NAME, MANIFEST_NAME, index, manifest, open_checkpoint
from roundpipe.checkpoint.tensor_file import shards

TARGET = Path(sys.argv[1]) / "target"
if sys.argv[2] == "without exchange":
    disk.exchange = lambda one, other: False
CALLS = ("lock", "open_new", "write_at", "sync", "sync_directory", "rename", "exchange", "remove", "close")
NAME = Path(sys.argv[1] + " call")  # at which the child was killed
real = {name: getattr(disk, name) for name in CALLS}

def write(value):
    groups = [Group(Hold(), [("model", Entry(f"{i}.{j}", torch.full((64, 4), value), torch.float32)) for j in range(2)])
              for i in range(2)]
    specs = {e.name: e.spec for g in groups for _, e in g.entries}
    layouts = {"model": shards("model", specs, 2048), "previous": [], "optimizer": []}
    others = {INDEX_NAME: index(layouts["model"])}
    last = MANIFEST_NAME, functools.partial(manifest, layouts, others, False)
    handle = SaveHandle(TARGET)
    beside, lock = saving._make_beside(TARGET, 1)
    SaveJob(handle, beside, True, groups, layouts, others, last, lambda: None, lock).run()
    handle.wait()

def read(directory):
    contents = open_checkpoint(directory)
    values = {v for f in contents.kinds["model"].files for t in load_file(f.path).values() for v in t.unique().tolist()}
    assert len(values) == 1 and len(contents.kinds["model"].specs) == 4, values
    return values.pop()

def killed_at(number, half, value):
    '''Whether the child was killed before (or amid) its system call of this number.'''
    child = os.fork()
    if child == 0:
        count = [0]
        def counted(name):
            def call(*args):
                if count[0] == number:
                    NAME.write_text(name)
                    if half and name == "write_at":
                        real[name](args[0], args[1][: len(args[1]) // 2], args[2])
                    if half and name == "remove":
                        for path in sorted(args[0].iterdir())[:1] if args[0].exists() else []:
                            path.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1
                return real[name](*args)
            return call
        for name in CALLS:
            setattr(disk, name, counted(name))
        write(value)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0

write(1.0)
value, number = 1.0, 0
if sys.argv[2] == "without exchange":  # before that both do the same
    names = []
    for name in CALLS:
        setattr(disk, name, lambda *args, name=name: (names.append(name), real[name](*args))[1])
    write(value)
    for name in CALLS:
        setattr(disk, name, real[name])
    number = names.index("exchange")
kills, replaced, moved = 0, 0, 0
while True:
    ended = []
    for half in (False, True):
        ended.append(not killed_at(number, half, value + 1))
        place = TARGET
        if not TARGET.exists():
            place, moved = disk.previous_of(TARGET), moved + 1
        found = read(place)
        assert found in (value, value + 1), (number, found, value)
        replaced += found != value
        value = found
        if place != TARGET:
            os.rename(place, TARGET)
        kills += not ended[-1]
        if NAME.read_text() not in ("write_at", "remove"):
            break  # these alone can be half done
    number += 1
    if all(ended):
        break
write(0.5)
assert read(TARGET) == 0.5
assert [path.name for path in TARGET.parent.iterdir()] == ["target"], list(TARGET.parent.iterdir())
print(kills, replaced, moved)
"""


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=110, check=False
    )


@pytest.mark.parametrize("how", ["with exchange", "without exchange"])
def test_killed_at_every_system_call(tmp_path: Path, how: str) -> None:
    pytest.importorskip("safetensors")
    done = run_script(WRITER, str(tmp_path), how)
    assert done.returncode == 0, done.stderr
    kills, replaced, moved = map(int, done.stdout.split())
    assert kills > (30 if how == "with exchange" else 5) and replaced > 2
    assert (moved > 0) == (how == "without exchange")


KILLED = """
import os, signal, sys
from pathlib import Path
import torch, roundpipe
from tests.checkpoint_runs import Run
from roundpipe.checkpoint import disk

roundpipe.use_devices("host:2")
directory = Path(sys.argv[1])
torch.manual_seed(3)
run = Run("split", "async").train(2)
run.save(directory / "a").wait()
real, count = disk.write_at, [0]
def write_at(*args):
    count[0] += 1
    if count[0] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args)
disk.write_at = write_at
run.train(1).save(directory / "a", overwrite=True)
run.train(10)
"""


def test_a_training_process_that_is_killed(tmp_path: Path) -> None:
    """It leaves the checkpoint before, and beside it a directory that the next save removes."""
    done = run_script(KILLED, str(tmp_path))
    assert (done.returncode, done.stderr) == (-9, "")
    assert len(list(tmp_path.iterdir())) == 2
    roundpipe.use_devices("host:1")
    torch.manual_seed(3)
    want = Run("split", "async").train(3).bits()
    resumed = Run("split", "async", seed=1).load(tmp_path / "a").train(1)
    assert_same(resumed.bits(), want)
    resumed.save(tmp_path / "a", overwrite=True).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    from roundpipe.checkpoint import disk

    mine = disk.place_beside(tmp_path / "a", "1")
    mine.mkdir()
    lock = disk.lock(mine)
    disk.remove_leftovers(tmp_path / "a")
    assert mine.exists()
    disk.close(lock)
    disk.remove_leftovers(tmp_path / "a")
    assert not mine.exists()
