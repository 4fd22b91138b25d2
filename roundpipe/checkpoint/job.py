"""One save: what is to be written, the thread that writes it, and who waits for which part of it.

Note [Snapshots]
  A checkpoint holds the values as of the call of ``save``, although it is written while training goes on, and although
  there is no second copy of them. What may still be overwritten is in groups: a unit's weights with what a compact
  optimizer keeps for them, or all that a step function's optimizer changes. Whoever is about to overwrite a group asks
  its *hold*, waits until the group was written, and lets it be written next. Groups are written one after the other, so
  a step follows the writer through the model. Small things (buffers, counts, learning rates, random numbers) are
  copied when ``save`` is called. The writer reads through one buffer of a few megabytes, and only where bytes must be
  converted; the rest goes from where it lies to the file.
  Nobody can hold back the caller's own edits of host weights between two calls. They count a version; a value whose
  version has changed when it was written makes the save fail instead of being wrong.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import CheckpointError, ConfigError, RoundPipeError
from ..interrupts import uninterrupted
from . import disk
from .checksum import WrittenFiles
from .chunks import bytes_of, chunks
from .tensor_file import FileLayout, Spec

logger = logging.getLogger(__name__)


@dataclass
class Entry:
    """A tensor to be written, as ``dtype``. ``tensor`` is the live one; of another device's a copy is made.

    Raises ConfigError for tensors whose values do not simply stand in their memory.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    version: int = field(init=False)

    def __post_init__(self) -> None:
        tensor = self.tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
            what = type(tensor).__name__ if tensor.layout == torch.strided else str(tensor.layout)
            raise ConfigError(f"{self.name!r} is a {what}; a checkpoint holds ordinary (strided) tensors only")
        self.tensor = tensor if tensor.device.type == "cpu" else tensor.cpu()
        self.version = self._version()

    def _version(self) -> int:
        return 0 if self.tensor.is_inference() else self.tensor._version

    def was_changed(self) -> bool:
        return self._version() != self.version

    @property
    def spec(self) -> Spec:
        return Spec(self.dtype, tuple(self.tensor.shape))


class Hold:
    """Asked by whoever overwrites what a group holds; see Note [Snapshots]."""

    def __init__(self) -> None:
        self._written = threading.Event()
        self.urgent = False

    def wait(self) -> None:
        """Blocks until the group was written, or the save has failed. Does not raise."""
        if self._written.is_set():
            return
        self.urgent = True
        while not self._written_within_slice():
            pass

    def _written_within_slice(self) -> bool:
        with uninterrupted():  # Ctrl-C inside Event.wait could leave the event's lock taken
            return self._written.wait(timeout=0.1)

    def release(self) -> None:
        self._written.set()


@dataclass
class Group:
    hold: Hold
    entries: list[tuple[str, Entry]] = field(default_factory=list)  # with the kind of file that they belong to


class SaveHandle:
    """A checkpoint that is being written. Made by ``roundpipe.save``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ended = threading.Event()
        self._error: CheckpointError | None = None
        self._told = False
        self._process = os.getpid()
        self.covers: frozenset[int] = frozenset()  # parameters, by id

    def done(self) -> bool:
        """Whether the writer has ended, well or not; does not wait and does not raise."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until the checkpoint is on the disk, under its name.

        Raises:
            CheckpointError: it could not be written; the checkpoint that was there before, if any, still is.
            TimeoutError: it took longer than ``timeout_s`` seconds; the writer goes on.
        """
        if os.getpid() != self._process:
            raise RoundPipeError("a save is written by the process that called it, not by this forked child")
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended_within_slice(0.1 if until is None else min(0.1, max(0.0, until - time.monotonic()))):
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self.directory} was not written within {timeout_s:g} s; the writer goes on")
        if self._error is not None:
            self._told = True
            raise self._error

    def _ended_within_slice(self, slice_s: float) -> bool:
        with uninterrupted():
            return self._ended.wait(timeout=slice_s)

    def raise_untold(self) -> None:
        """Raises its failure if nobody was told of it yet; does not wait."""
        if self._ended.is_set() and self._error is not None and not self._told:
            self._told = True
            raise self._error

    def wait_quietly(self) -> None:
        """Blocks until the writer has ended; a failure is still to be told."""
        while not self._ended_within_slice(0.1):
            pass

    def __repr__(self) -> str:
        state = "being written" if not self.done() else "failed" if self._error is not None else "written"
        return f"<checkpoint {str(self.directory)!r}, {state}>"


_running: set[SaveHandle] = set()


def wait_for_saves_of(parameters: Set[int]) -> None:
    """Blocks while any of these parameters (by id) is being written: a new wrapper may train them."""
    for handle in list(_running):
        if handle.covers & parameters:
            handle.wait_quietly()


def wait_for_saves_to(directory: Path) -> None:
    """Blocks while a checkpoint of this name is being written."""
    for handle in list(_running):
        if handle.directory == directory:
            handle.wait_quietly()


class SaveJob:
    """Writes ``groups`` into the files of ``layouts`` (by kind), and ``others`` (name -> bytes), in ``beside``;
    ``last``: the name of one more, and what gives its bytes for the checksums of the others (by name).

    ``beside`` exists, with ``lock`` on it; it becomes ``handle.directory``. ``progress`` is called after each piece.
    """

    def __init__(
        self,
        handle: SaveHandle,
        beside: Path,
        overwrite: bool,
        groups: Sequence[Group],
        layouts: Mapping[str, Sequence[FileLayout]],
        others: Mapping[str, bytes],
        last: tuple[str, Callable[[Mapping[str, int]], bytes]],
        progress: Callable[[], None],
        lock: int,
    ) -> None:
        self.handle = handle
        self._lock = lock
        self._beside = beside
        self._overwrite = overwrite
        self._groups = list(groups)
        self._layouts = [layout for of_kind in layouts.values() for layout in of_kind]
        self._place = {
            (kind, name): layout for kind, made in layouts.items() for layout in made for name in layout.offsets
        }
        self._others = dict(others)
        self._last = last
        self._sums: WrittenFiles | None = None
        self._progress = progress
        self._open: dict[str, int] = {}
        self._now = ""  # what is being written, for messages

    def start(self) -> None:
        _running.add(self.handle)
        # No daemon: a checkpoint that has begun is completed when the interpreter exits.
        try:
            threading.Thread(target=self.run, name="roundpipe-save", daemon=False).start()
        except RuntimeError:  # there are no new threads any more: the interpreter is going down
            self.run()

    def run(self) -> None:
        handle = self.handle
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 (reaches the caller through the handle)
            handle._error = self._failure(error)
            logger.error("%s", handle._error)
            disk.remove(self._beside)
        finally:
            for group in self._groups:
                group.hold.release()
            self._groups, self._place = [], {}
            _running.discard(handle)
            disk.close(self._lock)
            handle._ended.set()

    def _failure(self, error: BaseException) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        where = f" while writing {self._now}" if self._now else ""
        failure = CheckpointError(
            f"saving to {self.handle.directory} failed{where}: {error or type(error).__name__}. The checkpoint "
            "that was there before, if any, still is; training is not affected."
        )
        failure.__cause__ = error
        return failure

    def _write(self) -> None:
        self._sums = WrittenFiles()
        try:
            for layout in self._layouts:
                self._create(layout.name, layout.size_bytes, layout.header)
            remaining = list(self._groups)
            while remaining:
                group = next((one for one in remaining if one.hold.urgent), remaining[0])
                remaining.remove(group)
                for kind, entry in group.entries:
                    self._write_entry(kind, entry)
                group.entries.clear()
                group.hold.release()
            for name, data in self._others.items():
                self._create(name, len(data), data)
            name, make = self._last
            data = make({name: self._sums.total(name) for name in self._open})
            self._create(name, len(data), data)
            for name, descriptor in self._open.items():  # nobody waits for this
                self._now = name
                disk.sync(descriptor)
                self._progress()
        finally:
            self._sums.close()
            for descriptor in self._open.values():
                disk.close(descriptor)
        self._now = ""
        disk.sync_directory(self._beside)
        disk.put_in_place(self._beside, self.handle.directory, self._overwrite)

    def _create(self, name: str, size_bytes: int, begins_with: bytes) -> None:
        self._now = name
        self._open[name] = disk.open_new(self._beside / name, size_bytes)
        self._write_piece(name, memoryview(begins_with), 0)

    def _write_piece(self, name: str, data: memoryview, offset: int) -> None:
        assert self._sums is not None
        self._sums.begin(name, offset, data)
        try:
            disk.write_at(self._open[name], data, offset)
        finally:
            self._sums.end()

    def _write_entry(self, kind: str, entry: Entry) -> None:
        layout = self._place[kind, entry.name]
        self._now = layout.name
        offset = layout.offsets[entry.name]
        for piece in chunks(entry.tensor, entry.dtype):
            data = bytes_of(piece)
            self._write_piece(layout.name, data, offset)
            offset += len(data)
            self._progress()
        if entry.was_changed():
            raise CheckpointError(
                f"saving to {self.handle.directory} failed: {entry.name!r} was changed by the caller before it was "
                "written. Call wait() on what roundpipe.save returned before you edit weights or optimizer state. "
                "The checkpoint that was there before, if any, still is."
            )
