"""Files hold the values as of the call of save, whatever training does while they are written."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import engine as engines
from roundpipe.checkpoint import disk, job
from roundpipe.checkpoint.job import Hold
from roundpipe.errors import CheckpointError
from roundpipe.optimizer_params import OptimizerParameters
from roundpipe.units import Unit

from .checkpoint_runs import Run, assert_same

PATIENCE_S = 60


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


class Writer:
    """The writer stops before one of its writes of tensors, until it may go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None  # which write
        self.count = 0
        self.stopped, self.go = threading.Event(), threading.Event()
        self.asked: list[Any] = []
        self.order: list[str] = []
        write_at, wait, write_entry = disk.write_at, Hold.wait, job.SaveJob._write_entry
        wait_quietly = job.SaveHandle.wait_quietly

        def stopping(descriptor: int, data: memoryview, offset: int) -> None:
            if offset:  # not a header
                if self.count == self.at:
                    self.stopped.set()
                    assert self.go.wait(PATIENCE_S)
                self.count += 1
            write_at(descriptor, data, offset)

        def asking(hold: Hold) -> None:
            self.asked.append(hold)
            wait(hold)

        def asking_for_all(handle: job.SaveHandle) -> None:
            if not handle.done():
                self.asked.append(handle)
            wait_quietly(handle)

        def noting(one: job.SaveJob, kind: str, entry: job.Entry) -> None:
            self.order.append(entry.name)
            write_entry(one, kind, entry)

        patch.setattr(disk, "write_at", stopping)
        patch.setattr(Hold, "wait", asking)
        patch.setattr(job.SaveHandle, "wait_quietly", asking_for_all)
        patch.setattr(job.SaveJob, "_write_entry", noting)

    def stop_at(self, write: int) -> None:
        self.at, self.count = write, 0
        self.stopped.clear()
        self.go.clear()
        self.asked.clear()
        self.order.clear()

    def while_stopped(self, work: Callable[[], Any]) -> None:
        """Runs ``work`` on a thread; the writer goes on when that waits for it, or is done."""
        assert self.stopped.wait(PATIENCE_S)
        thread = threading.Thread(target=work)
        thread.start()
        until = time.monotonic() + PATIENCE_S
        while thread.is_alive() and not self.somebody_waits() and time.monotonic() < until:
            time.sleep(0.001)
        self.go.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

    def somebody_waits(self) -> bool:
        return any(not isinstance(one, Hold) or one.urgent for one in self.asked)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    made = Writer(monkeypatch)
    yield made
    made.go.set()


CASES = [
    ("split", "exact"),
    ("split", "async"),
    ("float32", "announced"),
    ("adamw", "exact"),
    ("adamw", "async"),
    ("sgd", "exact"),
]


def loaded(how: str, mode: str, directory: Path) -> dict[str, Any]:
    run = Run(how, mode, seed=9)
    torch.manual_seed(0)
    return run.load(directory).bits()


@pytest.mark.parametrize(("how", "mode"), CASES)
def test_a_step_waits_for_the_writer(tmp_path: Path, writer: Writer, how: str, mode: str) -> None:
    for write in (0, 7):
        run = Run(how, mode).train(3)
        want = run.bits()
        writer.stop_at(write)
        handle = run.save(tmp_path / str(write))
        writer.while_stopped(lambda run=run: (run.train(2), run.model.synchronize()))
        assert writer.asked, "the step did not wait"
        handle.wait()
        assert_same(loaded(how, mode, tmp_path / str(write)), want)


@pytest.mark.parametrize(
    ("how", "mode"),
    [("split", "exact"), ("split", "async"), ("float32", "announced"), ("sgd", "exact"), ("adamw", "async")],
)
def test_without_waiting_the_files_would_be_wrong(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch, how: str, mode: str
) -> None:
    """That the test above can fail."""
    run = Run(how, mode).train(3)
    want = run.bits()
    for kind in (Unit, OptimizerParameters):
        monkeypatch.setattr(kind, "wait_saved", lambda self: None)
    writer.stop_at(0)
    handle = run.save(tmp_path / "torn")

    def train() -> None:
        with contextlib.suppress(CheckpointError):
            run.train(2).model.synchronize()

    writer.while_stopped(train)
    with pytest.raises((AssertionError, CheckpointError)):
        handle.wait()
        assert_same(loaded(how, mode, tmp_path / "torn"), want)
    handle._told = True


def test_what_is_waited_for_is_written_next(tmp_path: Path, writer: Writer) -> None:
    """Asynchronous updates begin with the last layer, files with the first."""
    run = Run("split", "async").train(1)
    run.model.synchronize()
    writer.stop_at(0)
    handle = run.save(tmp_path / "a")
    writer.while_stopped(lambda: (run.train(1), run.model._state.drain()))
    handle.wait()
    layers = [name.rpartition("/")[2].partition(".")[0] for name in writer.order]
    layers = [layer for layer, before in zip(layers, [None, *layers], strict=False) if layer != before]
    assert layers[:2] == ["0", "2"]


def test_loading_waits_for_the_writer(tmp_path: Path, writer: Writer) -> None:
    run = Run("split", "exact").train(2)
    other = Run("split", "exact", seed=3)
    zeros = {name: torch.zeros_like(value) for name, value in run.model.state_dict().items()}
    state = other.train(1).optimizer.state_dict()
    loads = [lambda: run.model.load_state_dict(zeros), lambda: run.optimizer.load_state_dict(state)]
    for number, load in enumerate(loads):
        if number:
            run.load(tmp_path / "0")
        want = run.bits()
        writer.stop_at(3)
        handle = run.save(tmp_path / str(number))
        writer.while_stopped(load)
        assert writer.asked, "loading did not wait"
        handle.wait()
        assert_same(loaded("split", "exact", tmp_path / str(number)), want)


def test_loading_what_is_being_written_waits(tmp_path: Path, writer: Writer) -> None:
    other = Run("split", "exact", seed=3)
    run = Run("split", "exact").train(2)
    want = run.bits()
    writer.stop_at(0)
    run.save(tmp_path / "a")
    writer.while_stopped(lambda: other.load(tmp_path / "a"))
    assert writer.asked
    assert_same(other.bits(), want)


@pytest.mark.parametrize("how", ["split", "adamw"])
def test_an_edit_by_the_caller_is_noticed(tmp_path: Path, writer: Writer, how: str) -> None:
    """Nothing holds his hand, so the save fails; the checkpoint before stays, and training goes on with the edit."""
    run = Run(how, "exact").train(1)
    run.save(tmp_path / "a").wait()
    want = loaded(how, "exact", tmp_path / "a")
    run.train(1)
    writer.stop_at(0)
    handle = run.save(tmp_path / "a", overwrite=True)
    assert writer.stopped.wait(PATIENCE_S)
    with torch.no_grad():
        run.model.model[1].linear.weight.fill_(0.5)
    writer.go.set()
    with pytest.raises(CheckpointError, match=r"1\.linear\.weight.*changed by the caller"):
        handle.wait()
    assert bool((run.model.state_dict()["1.linear.weight"] == 0.5).all())
    assert_same(loaded(how, "exact", tmp_path / "a"), want)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_one_save_at_a_time(tmp_path: Path, writer: Writer) -> None:
    run = Run("split", "exact").train(1)
    writer.stop_at(0)
    first = run.save(tmp_path / "a")
    assert writer.stopped.wait(PATIENCE_S) and not first.done()
    with pytest.raises(TimeoutError):
        first.wait(timeout_s=0.01)
    handles = []
    thread = threading.Thread(target=lambda: handles.append(run.save(tmp_path / "b")))
    thread.start()
    writer.go.set()
    thread.join(PATIENCE_S)
    assert first.done()
    handles[0].wait()
    assert first.directory == tmp_path / "a" and "written" in repr(first)


def test_a_new_wrapper_of_the_same_weights_waits(tmp_path: Path, writer: Writer) -> None:
    run = Run("split", "exact").train(1)
    want = run.bits()
    module = run.model.model
    writer.stop_at(0)
    handle = run.save(tmp_path / "a")
    del run
    made = []
    writer.while_stopped(lambda: made.append(roundpipe.RoundPipe(module, pin_model="register")))
    handle.wait()
    assert_same(loaded("split", "exact", tmp_path / "a"), want)


def test_a_step_that_waits_for_the_disk_is_no_stall(tmp_path: Path, writer: Writer) -> None:
    """The watchdog sees every piece as progress."""
    run = Run("split", "exact").train(1)
    run.model.synchronize()
    engine = engines.current()
    before = engine.progress
    run.save(tmp_path / "a").wait()
    assert engine.progress - before >= len(writer.order) > 40


def test_without_a_thread_it_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the interpreter there are no new ones."""
    run = Run("split", "exact").train(1)
    want = run.bits()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        handle = run.save(tmp_path / "a")
    assert handle.done()
    assert_same(loaded("split", "exact", tmp_path / "a"), want)
