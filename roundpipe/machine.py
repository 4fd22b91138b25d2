"""Facts of the host that decide how much memory can be had and how quick it is, read from /proc and /sys.

Nothing here changes anything or fails: what cannot be read is None, zero or empty.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "HostFacts",
    "Limits",
    "NumaNode",
    "PciLink",
    "link_bytes_per_s",
    "pci_link",
    "read_host_facts",
    "read_limits",
]


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """One node of memory and the cores beside it."""

    index: int
    cores: str
    """As the kernel writes them: ``"0-7,16-23"``."""
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds the memory of this process."""

    memory_bytes: int
    """Of the machine (MemTotal)."""
    available_bytes: int
    """Without swapping (MemAvailable)."""
    swap_bytes: int
    swap_used_bytes: int
    cgroup_version: int | None
    """2 or 1; None: no control group that limits memory was found."""
    cgroup_cores: float | None
    """Cores that the control group's quota is worth; None: no quota."""
    memlock_bytes: int | None
    """RLIMIT_MEMLOCK; None: unlimited. GPU drivers do not apply it to what they lock."""
    address_space_bytes: int | None
    """RLIMIT_AS (``ulimit -v``); None: unlimited."""
    overcommit: int | None
    """vm.overcommit_memory: 0 heuristic, 1 always, 2 never beyond the commit limit."""
    huge_pages: str | None
    """Transparent huge pages: "always", "madvise" or "never"; None: the kernel has none."""
    reserved_huge_pages_bytes: int
    """Set aside for hugetlbfs and unused (vm.nr_hugepages). Nothing else can have them."""
    wsl: bool
    """Under Windows (WSL2), which lets a process lock only part of its memory."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """The processor and the system. ``cores``: those that this process may use."""

    processor: str
    cores: int
    torch_threads: int
    kernel: str
    python: str
    numa_nodes: tuple[NumaNode, ...]


@dataclass(frozen=True, kw_only=True)
class PciLink:
    """A GPU's link: transfers a second and lane, and lanes, now and at most. An idle link may run slower."""

    address: str
    gigatransfers_per_s: float
    width: int
    most_gigatransfers_per_s: float
    most_width: int
    numa_node: int | None


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """``root``: the directory that holds proc and sys."""
    return HostFacts(
        processor=_processor(root),
        cores=len(os.sched_getaffinity(0)),
        torch_threads=torch.get_num_threads(),
        kernel=(_text(root / "proc/sys/kernel/osrelease") or platform.release()).strip(),
        python=platform.python_version(),
        numa_nodes=_numa_nodes(root),
    )


def read_limits(root: Path = Path("/")) -> Limits:
    """``root``: as for :func:`read_host_facts`. Limits of the process itself are those of this one."""
    info = _meminfo(root)
    version = _cgroup_version(root)
    return Limits(
        memory_bytes=info.get("MemTotal", 0),
        available_bytes=info.get("MemAvailable", 0),
        swap_bytes=info.get("SwapTotal", 0),
        swap_used_bytes=info.get("SwapTotal", 0) - info.get("SwapFree", 0),
        cgroup_version=version,
        cgroup_cores=_cgroup_cores(root),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        address_space_bytes=_limit(resource.RLIMIT_AS),
        overcommit=_number(root / "proc/sys/vm/overcommit_memory"),
        huge_pages=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        reserved_huge_pages_bytes=info.get("HugePages_Free", 0) * info.get("Hugepagesize", 0),
        wsl="microsoft" in (_text(root / "proc/sys/kernel/osrelease") or "").lower(),
    )


def pci_link(ordinal: int, root: Path = Path("/")) -> PciLink | None:
    """The link of a GPU by its CUDA ordinal; None where the system does not tell (containers, Windows)."""
    found = torch.cuda.get_device_properties(ordinal)
    parts = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if any(part is None for part in parts):
        return None
    domain, bus, device = (int(part or 0) for part in parts)
    return read_pci_link(f"{domain:04x}:{bus:02x}:{device:02x}.0", root)


def read_pci_link(address: str, root: Path = Path("/")) -> PciLink | None:
    """The link of a PCI device; ``address`` like ``"0000:1b:00.0"``."""
    place = root / "sys/bus/pci/devices" / address
    speeds = [re.match(r"[\d.]+", _text(place / f"{which}_link_speed") or "") for which in ("current", "max")]
    widths = [_number(place / f"{which}_link_width") for which in ("current", "max")]
    if not all(speeds) or not all(widths):
        return None
    node = _number(place / "numa_node")
    now, most = (float(speed[0]) for speed in speeds if speed is not None)
    return PciLink(
        address=address,
        gigatransfers_per_s=now,
        width=widths[0] or 0,
        most_gigatransfers_per_s=most,
        most_width=widths[1] or 0,
        numa_node=None if node is None or node < 0 else node,
    )


def link_bytes_per_s(gigatransfers_per_s: float, width: int) -> float:
    """Bytes a second and direction before protocol overhead: 8 of 10 bits carry data up to 5 GT/s (PCIe 1 and 2), 128
    of 130 from 8 GT/s on (PCI Express Base Specification)."""
    share = 0.8 if gigatransfers_per_s < 8 else 128 / 130
    return gigatransfers_per_s * 1e9 * width * share / 8


# -- reading -----------------------------------------------------------------------------------------------------------
def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int((_text(path) or "").split()[0])
    except (ValueError, IndexError):
        return None


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name; numbers of pages stay numbers."""
    found = {}
    for line in (_text(root / "proc/meminfo") or "").splitlines():
        match = re.fullmatch(r"(\w+)(?:\(\w+\))?:\s+(\d+)( kB)?", line.strip())
        if match:
            found[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return found


def _processor(root: Path) -> str:
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for place in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        total = re.search(r"MemTotal:\s+(\d+) kB", _text(place / "meminfo") or "")
        cores = (_text(place / "cpulist") or "").strip()
        nodes.append(NumaNode(index=int(place.name[4:]), cores=cores, memory_bytes=int(total[1]) << 10 if total else 0))
    return tuple(nodes)


def _chosen(text: str | None) -> str | None:
    """The word in brackets."""
    match = re.search(r"\[(\w+)\]", text or "")
    return match[1] if match else None


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _groups(root: Path) -> dict[str, str]:
    """This process's control groups: path by controller; the unified hierarchy's is ``""``."""
    found = {}
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _cgroup_version(root: Path) -> int | None:
    groups = _groups(root)
    if "memory" in groups:
        return 1
    return 2 if "" in groups and (root / "sys/fs/cgroup/cgroup.controllers").exists() else None


def _cgroup_cores(root: Path) -> float | None:
    """The least quota of the group and those around it."""
    groups, found = _groups(root), []
    base = root / "sys/fs/cgroup"
    for place in _upwards(base, groups.get("", "/")):
        quota, _, period = (_text(place / "cpu.max") or "max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
    for mount in ("cpu", "cpu,cpuacct"):
        for place in _upwards(base / mount, groups.get("cpu", "/")):
            allowed, every = _number(place / "cpu.cfs_quota_us"), _number(place / "cpu.cfs_period_us")
            if allowed is not None and allowed > 0 and every:
                found.append(allowed / every)
    return min(found, default=None)


def _upwards(base: Path, group: str) -> list[Path]:
    """The group's directory and those around it; in a container the mount itself may be the group."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
