"""CRC-32 of files, as ``zlib`` and the usual tools compute it: of files written in any order, and of whole ones.

Note [Checksums]
  Files are written piece by piece in whatever order training wants. The checksum of a file follows from those of its
  pieces: appending n zero bytes is a linear map of the 32 bits, and its powers of two are known, so joining two pieces
  is a few products with 32 x 32 matrices of bits. So nothing is read back. A piece's own checksum is computed on a
  thread beside its write, where it costs no time as long as it is faster than the disk (about 3 GB/s on one core).
"""

from __future__ import annotations

import functools
import queue
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

_POLYNOMIAL = 0xEDB88320
_INLINE_BYTES = 1 << 18  # handing a smaller piece to the other thread takes longer
_READ_BYTES = 8 << 20
_READERS = 4

_Matrix = tuple[int, ...]
Piece = tuple[int, int, int]
"""Offset in the file, length in bytes, checksum."""


def _times(matrix: _Matrix, bits: int) -> int:
    out, row = 0, 0
    while bits:
        if bits & 1:
            out ^= matrix[row]
        bits >>= 1
        row += 1
    return out


@functools.cache
def _zeros(power: int) -> _Matrix:
    """What 2**power zero bytes, appended, make of a checksum."""
    if power == 0:
        one: _Matrix = (_POLYNOMIAL, *(1 << n for n in range(31)))  # one zero bit
        for _ in range(3):
            one = tuple(_times(one, row) for row in one)
        return one
    half = _zeros(power - 1)
    return tuple(_times(half, row) for row in half)


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two texts, one after the other, from those of both and the length of the second."""
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _times(_zeros(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


def of_pieces(pieces: Iterable[Piece]) -> int:
    """Of a file, from the pieces of which it is made without gaps, in any order."""
    total = end = 0
    for offset, length, checksum in sorted(pieces):
        assert offset == end, f"bytes {end} to {offset} have no checksum"
        total, end = joined(total, checksum, length), offset + length
    return total


class WrittenFiles:
    """Checksums of files that one thread writes. ``close`` ends the thread beside it."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Piece]] = {}
        self._asked: queue.SimpleQueue[tuple[str, int, memoryview] | None] = queue.SimpleQueue()
        self._answered: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pending = False
        self._thread: threading.Thread | None = threading.Thread(target=self._loop, name="roundpipe-crc", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are no new threads any more: the interpreter is going down
            self._thread = None

    def begin(self, name: str, offset: int, data: memoryview) -> None:
        """``data``, which stays as it is until ``end``, is at this place of the file."""
        if self._thread is None or len(data) < _INLINE_BYTES:
            self._note(name, offset, data)
        else:
            self._asked.put((name, offset, data))
            self._pending = True

    def end(self) -> None:
        if self._pending:
            self._pending = False
            self._answered.get()

    def close(self) -> None:
        self.end()
        self._asked.put(None)

    def total(self, name: str) -> int:
        return of_pieces(self._pieces.get(name, []))

    def _note(self, name: str, offset: int, data: memoryview) -> None:
        if data:
            self._pieces.setdefault(name, []).append((offset, len(data), zlib.crc32(data)))

    def _loop(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._note(*asked)
            del asked
            self._answered.put(None)


def verify(expected: Sequence[tuple[Path, int]]) -> None:
    """Reads the files from beginning to end, several at a time, through small buffers.

    Raises:
        CheckpointError: naming the first file that has another checksum, or that cannot be read.
    """
    if not expected:
        return
    stop = threading.Event()
    with ThreadPoolExecutor(min(_READERS, len(expected)), thread_name_prefix="roundpipe-crc") as pool:
        try:
            running = [pool.submit(_of_file, path, stop) for path, _ in expected]
            for (path, wanted), one in zip(expected, running, strict=True):
                _compare(path, wanted, one.result())
        except BaseException:  # Ctrl-C too
            stop.set()
            raise


def _compare(path: Path, wanted: int, found: int | OSError) -> None:
    if isinstance(found, OSError):
        raise CheckpointError(f"{path} cannot be read: {found}") from found
    if found != wanted:
        raise CheckpointError(
            f"{path} is damaged: its bytes have the checksum {found:08x}, those that were written had {wanted:08x}. "
            "Load another checkpoint, or this one from another copy of it; nothing was changed."
        )


def _of_file(path: Path, stop: threading.Event) -> int | OSError:
    checksum = 0
    buffer = bytearray(_READ_BYTES)
    view: Any = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while not stop.is_set() and (count := file.readinto(view)):
                checksum = zlib.crc32(view[:count], checksum)
    except OSError as error:
        return error
    return checksum
