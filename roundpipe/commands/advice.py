"""What of the doctor's facts is wrong or worth knowing, and what to change about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from roundpipe.device_checks import WORKS
from roundpipe.machine import link_bytes_per_s

__all__ = ["Finding", "advise"]

_GIB = float(1 << 30)


@dataclass(frozen=True)
class Finding:
    """``wrong``: something does not work. Otherwise it works, but may be slower or have less room than it could."""

    wrong: bool
    found: str
    change: str


def advise(facts: dict[str, Any]) -> list[Finding]:
    """From the facts of ``doctor``, what is wrong first."""
    found = [*_devices(facts), *_speeds(facts), *_software(facts["software"]), *_limits(facts), *_cores(facts)]
    return sorted(found, key=lambda finding: not finding.wrong)


def _devices(facts: dict[str, Any]) -> Iterator[Finding]:
    software, devices = facts["software"], facts["devices"]
    for name, outcome in facts["checks"].items():
        if not outcome.startswith(WORKS):
            yield Finding(True, f"{name}: {outcome}", "see the message; with GPUs compare with --devices host:1")
        elif outcome != WORKS:
            yield Finding(False, f"{name}: {outcome}", "install what torch.compile needs (Triton, a C compiler)")
    if not any(device["kind"] == "cuda" for device in devices):
        if software["torch_cuda"] is None:
            change = "to use a GPU install a torch that is built with CUDA (see pytorch.org)"
        elif software["cuda_driver"] != WORKS:
            change = (
                f"the CUDA driver cannot be used ({software['cuda_driver']}); install it, or give it to the container"
            )
        else:
            change = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or ask for --devices cuda"
        yield Finding(False, "no GPU is used: the devices are simulated, for tests", change)
    for device in devices:
        if device["link"] is None:
            yield Finding(
                True, f"{device['name']}: copies cannot be timed: {device['link_error']}", "free memory there"
            )
        if device["kind"] == "cuda" and device["free_bytes"] < 0.5 * device["total_bytes"]:
            free, total = device["free_bytes"] / _GIB, device["total_bytes"] / _GIB
            yield Finding(
                False,
                f"{device['name']}: {free:.1f} of {total:.1f} GiB are free",
                "end what else uses it (nvidia-smi lists the processes)",
            )


def _speeds(facts: dict[str, Any]) -> Iterator[Finding]:
    nodes = facts["host"]["numa_nodes"]
    for device in facts["devices"]:
        pci, link = device.get("pci"), device["link"]
        if not pci:
            continue
        name = device["name"]
        if pci["width"] < pci["most_width"]:
            yield Finding(
                False,
                f"{name}: its link has {pci['width']} of {pci['most_width']} lanes",
                "put the GPU in a slot with all lanes; look at the firmware's settings for bifurcation",
            )
        could = link_bytes_per_s(max(pci["gigatransfers_per_s"], 2.5), pci["width"])
        if link and max(link["up"], link["down"]) < 0.7 * could:
            yield Finding(
                False,
                f"{name}: copies reach {link['up'] / 1e9:.1f} GB/s up and {link['down'] / 1e9:.1f} down of "
                f"{could / 1e9:.0f} that the link has",
                "end other traffic; bind the process to the GPU's node (numactl); a virtual machine may need its "
                "memory backed by huge pages and the IOMMU's passthrough",
            )
        if pci["numa_node"] is not None and len(nodes) > 1:
            cores = next((node["cores"] for node in nodes if node["index"] == pci["numa_node"]), "?")
            yield Finding(
                False,
                f"{name} is on node {pci['numa_node']} of {len(nodes)}, beside cores {cores}",
                f"with this GPU alone start with numactl --cpunodebind={pci['numa_node']} "
                f"--preferred={pci['numa_node']}; with GPUs on several nodes numactl --interleave=all",
            )


def _software(software: dict[str, Any]) -> Iterator[Finding]:
    if software["torch_cuda"] is not None and software["cuda_driver"] == WORKS and not software["gradient_kernels"]:
        yield Finding(
            False,
            "the kernel for norms of gradients is not built; torch's operators do its work",
            "install nvcc and build again with ROUNDPIPE_CUDA=1",
        )
    if software["instruction_sets"] == ["portable"]:
        yield Finding(
            False, "the processor has neither AVX2 nor AVX-512: steps of the optimizer are slow", "use another machine"
        )
    skip = software["environment"].get("ROUNDPIPE_SKIP_MEMORY_CHECK", "0")
    if skip not in ("", "0"):
        yield Finding(
            False,
            "ROUNDPIPE_SKIP_MEMORY_CHECK is set: requests are not compared with the memory that is left",
            "unset it, unless this machine's memory grows as it is used",
        )


def _limits(facts: dict[str, Any]) -> Iterator[Finding]:
    limits = facts["limits"]
    group = limits["cgroup_limit_bytes"]
    if group is not None and group < 0.9 * limits["memory_bytes"]:
        yield Finding(
            False,
            f"the control group allows {group / _GIB:.1f} of the machine's {limits['memory_bytes'] / _GIB:.1f} GiB",
            "give the container or job more memory (docker --memory, systemd MemoryMax, the queue's request)",
        )
    if limits["swap_used_bytes"] > 0.02 * max(limits["memory_bytes"], 1):
        yield Finding(
            False,
            f"{limits['swap_used_bytes'] / _GIB:.1f} GiB are swapped out",
            "end what holds memory; locked pages are never swapped, so others' are",
        )
    if limits["huge_pages"] == "never":
        yield Finding(
            False,
            "transparent huge pages are off: locking and touching memory takes about twice as long",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if limits["reserved_huge_pages_bytes"]:
        yield Finding(
            False,
            f"{limits['reserved_huge_pages_bytes'] / _GIB:.1f} GiB are set aside for hugetlbfs, which is not used here",
            "sudo sysctl vm.nr_hugepages=0, unless another program needs them",
        )
    if limits["overcommit"] == 2:
        yield Finding(
            False,
            "vm.overcommit_memory is 2: reservations count before they are used, and mappings may be refused",
            "sudo sysctl vm.overcommit_memory=0",
        )
    if limits["address_space_bytes"] is not None:
        yield Finding(
            False,
            f"the address space is limited to {limits['address_space_bytes'] / _GIB:.1f} GiB",
            "ulimit -v unlimited",
        )
    if limits["wsl"]:
        yield Finding(
            False,
            "this is WSL2: Windows lets a process lock only part of the memory",
            'where locking fails use pin_model="off"; raise memory= in .wslconfig',
        )


def _cores(facts: dict[str, Any]) -> Iterator[Finding]:
    host, quota = facts["host"], facts["limits"]["cgroup_cores"]
    if quota is not None and quota < 0.9 * host["torch_threads"]:
        yield Finding(
            False,
            f"the control group allows {quota:g} cores, but torch starts {host['torch_threads']} threads",
            f"OMP_NUM_THREADS={max(1, int(quota))}, or give the container more cores",
        )
    elif host["torch_threads"] < 0.5 * host["cores"]:
        yield Finding(
            False,
            f"torch uses {host['torch_threads']} of {host['cores']} cores on the host",
            "OMP_NUM_THREADS, or torch.set_num_threads",
        )
