"""A control group with a limit of memory, for a process that shall not have more (Linux, versions 1 and 2).

The group is made inside the one of this process, so it needs the right to do so: root, or a delegated group.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path


class NoGroups(RuntimeError):
    """No group with a limit can be made here; the message says why."""


def _own_group() -> tuple[Path, bool]:
    """Directory of this process's group in the hierarchy that limits memory, and whether it is of version 2."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, group = line.split(":", 2)
        if "memory" in controllers.split(","):
            own["1"] = group
        elif number == "0":
            own["2"] = group
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        root, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        version = "2" if kind == "cgroup2" else "1" if kind == "cgroup" and "memory" in options.split(",") else ""
        if version not in own or (version == "2" and "1" in own):
            continue
        inside = own[version]
        inside = inside[len(root) :] if root != "/" and inside.startswith(root) else inside
        return Path(point + inside.rstrip("/")), version == "2"
    raise NoGroups("no mounted hierarchy limits memory")


class MemoryGroup:
    """A child group with ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        parent, self._version2 = _own_group()
        self.path = parent / f"roundpipe-{os.getpid()}-{time.monotonic_ns()}"
        try:
            if self._version2 and "memory" not in (parent / "cgroup.subtree_control").read_text().split():
                (parent / "cgroup.subtree_control").write_text("+memory")
            self.path.mkdir()
            (self.path / ("memory.max" if self._version2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))
        except OSError as error:
            self.remove()
            raise NoGroups(f"no group can be made in {parent}: {error}") from error

    @property
    def peak_bytes(self) -> int:
        """Most memory that was ever charged to it, page cache included."""
        return int((self.path / ("memory.peak" if self._version2 else "memory.max_usage_in_bytes")).read_text())

    def remove(self) -> None:
        for _ in range(100):  # the kernel lets go of a group a moment after its last process has ended
            with contextlib.suppress(FileNotFoundError):
                try:
                    self.path.rmdir()
                except OSError:
                    time.sleep(0.05)
                    continue
            return


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """Raises NoGroups where none can be made."""
    group = MemoryGroup(limit_bytes)
    try:
        yield group
    finally:
        group.remove()


def join(path: str) -> None:
    """Moves this process into a group. What it has allocated before stays charged to where it was."""
    (Path(path) / "cgroup.procs").write_text(str(os.getpid()))
