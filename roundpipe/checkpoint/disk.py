"""The system calls of the writer. A checkpoint appears whole or not at all.

Note [Atomic checkpoints]
  Everything is written into a directory beside the target whose name begins with a dot, every file is synced to the
  disk, and then that directory is renamed to the target. A target that is to be replaced is exchanged with it in one
  system call, and removed afterwards under the other name. So at any moment the target is the old checkpoint or the
  new one. File systems that cannot exchange get two renames; between them the old checkpoint is whole under a name that
  ends in ``.previous``. The writer holds a lock on its directory, which ends with the process: the next save to the
  same target removes what a killed one has left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def make_directory(path: Path) -> None:
    os.mkdir(path)


def lock(path: Path) -> int:
    """A descriptor of the directory, with the lock that says that its writer lives, if the file system has locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def close(descriptor: int) -> None:
    os.close(descriptor)


def open_new(path: Path, size_bytes: int) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    os.ftruncate(descriptor, size_bytes)
    return descriptor


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    os.rename(source, target)


def exchange(one: Path, other: Path) -> bool:
    """Both exist afterwards under each other's name; False: this file system cannot do that."""
    if not hasattr(_libc, "renameat2"):
        return False
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV):
        return False
    raise OSError(code, os.strerror(code), str(other))


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def free_bytes(path: Path) -> int | None:
    """What this user may still write; None: the file system does not say."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def put_in_place(written: Path, target: Path, overwrite: bool) -> None:
    """``written`` becomes ``target``; what was there before, if it may be overwritten, is gone at the end."""
    if overwrite and target.exists():
        if exchange(written, target):
            try:
                sync_directory(target.parent)
            except OSError:
                exchange(written, target)
                raise
        else:
            previous = previous_of(target)
            remove(previous)
            rename(target, previous)
            try:
                rename(written, target)
            except OSError:
                rename(previous, target)
                raise
            written = previous
            sync_directory(target.parent)
        remove(written)
    else:
        rename(written, target)  # onto an empty directory too, but onto no other
        sync_directory(target.parent)


def previous_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def place_beside(target: Path, unique: str) -> Path:
    return target.with_name(f".{target.name}.saving-{unique}")


def remove_leftovers(target: Path) -> None:
    """What killed writers have left beside ``target``."""
    for path in _left_beside(target):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its writer lives
        else:
            remove(path)
        finally:
            os.close(descriptor)


def _left_beside(target: Path) -> Iterator[Path]:
    begin = place_beside(target, "").name
    yield from [path for path in target.parent.iterdir() if path.name.startswith(begin)]
    if target.exists() and previous_of(target).exists():
        yield previous_of(target)
