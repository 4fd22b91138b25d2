"""``python -m roundpipe doctor``: facts are the system's, copies are the engine's, and it says what is wrong."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import _ops
from roundpipe import engine as engines
from roundpipe.commands import doctor
from roundpipe.commands.advice import advise
from roundpipe.commands.parser import main
from roundpipe.device_checks import WORKS, check_devices
from roundpipe.errors import DeviceOutOfMemory
from roundpipe.link_speeds import measure_link
from roundpipe.machine import link_bytes_per_s, read_host_facts, read_limits, read_pci_link

from .at_rest import at_rest

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of a process of its own."""
    command = [sys.executable, "-m", "roundpipe", "doctor", "--json", "--devices", "host:2@64MiB", "--size-mib", "4"]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_facts_are_those_of_the_system(report: dict[str, Any]) -> None:
    assert report["software"]["torch"] == torch.__version__ and report["software"]["roundpipe"] == roundpipe.__version__
    assert report["host"]["cores"] == len(os.sched_getaffinity(0))
    limits = report["limits"]
    assert limits["memory_bytes"] == pytest.approx(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), rel=0.3)
    assert 0 < limits["available_bytes"] <= limits["memory_bytes"]
    assert limits["headroom_bytes"] > 0
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert limits["memlock_bytes"] == (None if soft == resource.RLIM_INFINITY else soft)


def test_every_device_is_measured_and_checked(report: dict[str, Any]) -> None:
    assert [device["name"] for device in report["devices"]] == ["host:0", "host:1"]
    for device in report["devices"]:
        assert device["memory_bytes"] == 64 * MIB
        assert device["link"].pop("size_bytes") == 4 * MIB
        assert set(device["link"]) == {"up", "down", "both", "up_pageable"}
        assert all(1e7 < speed < 1e12 for speed in device["link"].values())
    assert report["host_memory"]["one_thread"] > 1e8
    assert len(report["checks"]) == 6 and set(report["checks"].values()) == {WORKS}
    assert [finding["wrong"] for finding in report["findings"]] == [False] * len(report["findings"])
    assert any("simulated" in finding["found"] for finding in report["findings"])


def test_the_copies_are_those_of_the_engine() -> None:
    roundpipe.use_devices("host:2@96MiB")
    engine = engines.current()
    _ops.engine_reset_bytes(engine.handle)
    link = measure_link(engine, engine.workers[1], 2 * MIB, repeats=2)
    assert link.size_bytes == 2 * MIB and min(link.up, link.down, link.both, link.up_pageable) > 0
    engine.wait_idle()
    moved = _ops.engine_bytes(engine.handle, 1)
    # Three runs of each: up alone, pageable, trained and its gradients down, and those with one more on its way up.
    assert moved[0] == 3 * 5 * 2 * MIB and moved[5 + 1] == 3 * 2 * 2 * MIB
    assert _ops.engine_bounced_bytes(engine.handle, 1) == 3 * 2 * MIB
    assert sum(_ops.engine_bytes(engine.handle, 0)) == 0


def test_a_device_without_room_is_told_and_nothing_is_kept() -> None:
    roundpipe.use_devices("host:1@1MiB")
    engine = engines.current()
    at_rest()
    before = _ops.engine_live(engine.handle)
    with pytest.raises(DeviceOutOfMemory):
        measure_link(engine, engine.workers[0], 4 * MIB)
    assert measure_link(engine, engine.workers[0], 1 << 16, repeats=1).up > 0
    at_rest()
    assert _ops.engine_live(engine.handle)[3:] == [0, before[4]]


def test_failures_are_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:2")
    engine = engines.current()
    _ops.engine_inject(engine.handle, "fail_copy", 3)
    outcomes = check_devices(engine)
    assert sum(outcome != WORKS for outcome in outcomes.values()) == 1
    assert "StageError" in outcomes["training, float32"]

    def broken(_: object) -> dict[str, str]:
        return outcomes

    monkeypatch.setattr(doctor, "check_devices", broken)
    assert main(["doctor", "--devices", "host:1@64MiB", "--size-mib", "1"]) == 1
    printed = capsys.readouterr().out
    assert "wrong: training, float32: StageError" in printed and "device host:0 (simulated)" in printed


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (
        ["doctor", "--devices", "gpu7"],
        ["doctor", "--size-mib", "0"],
        ["doctor", "--size-mib", "much"],
        ["doctor", "--unknown"],
        ["cure"],
        [],
    ):
        try:
            code = main(argv)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        printed = capsys.readouterr()
        assert code == 2 and printed.out == "" and printed.err.count("\n") == 1, argv
        assert printed.err.startswith("python -m roundpipe")
        if "--help" in printed.err:  # what argparse says of the form of the line
            assert printed.err.rstrip().endswith("--help)")
    with pytest.raises(SystemExit):
        main([])
    assert "(see python -m roundpipe --help)" in capsys.readouterr().err


# -- reading the system ----------------------------------------------------------------------------------------------
def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = """MemTotal:       1000 kB
MemFree:         100 kB
MemAvailable:    600 kB
SwapTotal:       500 kB
SwapFree:        400 kB
HugePages_Total:       5
HugePages_Free:        3
Hugepagesize:       2048 kB
Active(anon):        7 kB
"""


def test_limits_of_version_2(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/user.slice/job\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/user.slice/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/user.slice/job/cpu.max": "max 100000\n",
            "proc/sys/vm/overcommit_memory": "2\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "proc/sys/kernel/osrelease": "5.15.90.1-Microsoft-standard-WSL2\n",
        },
    )
    limits = read_limits(root)
    assert limits.memory_bytes == 1000 << 10 and limits.available_bytes == 600 << 10
    assert limits.swap_bytes == 500 << 10 and limits.swap_used_bytes == 100 << 10
    assert limits.reserved_huge_pages_bytes == 3 * 2 * MIB
    assert limits.cgroup_version == 2 and limits.cgroup_cores == 3.5
    assert limits.overcommit == 2 and limits.huge_pages == "never" and limits.wsl


def test_limits_of_version_1_and_of_a_system_that_tells_nothing(tmp_path: Path) -> None:
    root = tree(
        tmp_path / "one",
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert (read_limits(root).cgroup_version, read_limits(root).cgroup_cores) == (1, 2.0)
    nothing = read_limits(tmp_path / "nothing")
    assert nothing.memory_bytes == 0 and nothing.huge_pages is None and nothing.cgroup_version is None
    assert read_host_facts(tmp_path / "nothing").numa_nodes == ()


def test_nodes_and_links(tmp_path: Path) -> None:
    gpu = "sys/bus/pci/devices/0000:1b:00.0/"
    root = tree(
        tmp_path,
        {
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  2048 kB\n",
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node10/meminfo": "Node 10 MemTotal:  1024 kB\n",
            "sys/devices/system/node/node2/cpulist": "4-7\n",
            gpu + "current_link_speed": "32.0 GT/s PCIe\n",
            gpu + "max_link_speed": "32.0 GT/s PCIe\n",
            gpu + "current_link_width": "8\n",
            gpu + "max_link_width": "16\n",
            gpu + "numa_node": "2\n",
        },
    )
    nodes = read_host_facts(root).numa_nodes
    assert [(n.index, n.cores, n.memory_bytes) for n in nodes] == [(0, "0-3", 2 * MIB), (2, "4-7", 0), (10, "", MIB)]
    link = read_pci_link("0000:1b:00.0", root)
    assert link is not None and (link.width, link.most_width, link.numa_node) == (8, 16, 2)
    assert read_pci_link("0000:99:00.0", root) is None
    assert link_bytes_per_s(32.0, 16) == pytest.approx(63.0e9, rel=0.01)  # PCI Express 5 x16
    assert link_bytes_per_s(5.0, 16) == pytest.approx(8.0e9)


# -- findings ----------------------------------------------------------------------------------------------------------
def sound_facts() -> dict[str, Any]:
    """Of a machine with a GPU on which nothing is to be said."""
    return {
        "software": {
            "torch_cuda": "13.0",
            "cuda_driver": WORKS,
            "gradient_kernels": True,
            "instruction_sets": ["avx512", "avx2", "portable"],
            "instruction_set": "avx512",
            "environment": {},
        },
        "host": {"cores": 16, "torch_threads": 16, "numa_nodes": [{"index": 0, "cores": "0-15", "memory_bytes": GIB}]},
        "limits": {
            "memory_bytes": 128 * GIB, "cgroup_limit_bytes": None, "swap_used_bytes": 0, "huge_pages": "madvise",
            "reserved_huge_pages_bytes": 0, "overcommit": 0, "address_space_bytes": None, "wsl": False,
            "cgroup_cores": None,
        },
        "devices": [
            {
                "name": "cuda:0", "kind": "cuda", "free_bytes": 79 * GIB, "total_bytes": 80 * GIB,
                "link": {"up": 55e9, "down": 54e9},
                "pci": {
                    "gigatransfers_per_s": 32.0, "width": 16, "most_gigatransfers_per_s": 32.0, "most_width": 16,
                    "numa_node": 0,
                },
            }
        ],
        "checks": {"training": WORKS},
    }  # fmt: skip


FINDINGS = [
    (("software", "gradient_kernels"), False, "ROUNDPIPE_CUDA=1"),
    (("software", "instruction_sets"), ["portable"], "AVX"),
    (("software", "environment"), {"ROUNDPIPE_SKIP_MEMORY_CHECK": "1"}, "unset it"),
    (("limits", "cgroup_limit_bytes"), 16 * GIB, "more memory"),
    (("limits", "swap_used_bytes"), 5 * GIB, "swapped"),
    (("limits", "huge_pages"), "never", "transparent_hugepage"),
    (("limits", "reserved_huge_pages_bytes"), GIB, "vm.nr_hugepages=0"),
    (("limits", "overcommit"), 2, "overcommit_memory=0"),
    (("limits", "address_space_bytes"), GIB, "ulimit -v"),
    (("limits", "wsl"), True, ".wslconfig"),
    (("limits", "cgroup_cores"), 4.0, "OMP_NUM_THREADS=4"),
    (("host", "torch_threads"), 1, "set_num_threads"),
    (("devices", 0, "free_bytes"), 10 * GIB, "nvidia-smi"),
    (("devices", 0, "pci", "width"), 8, "lanes"),
    (("devices", 0, "link"), {"up": 12e9, "down": 11e9}, "numactl"),
    (("checks", "training"), "works; cannot compile", "torch.compile"),
]  # fmt: skip


def test_nothing_is_said_of_a_sound_machine() -> None:
    assert advise(sound_facts()) == []


@pytest.mark.parametrize(("where", "value", "remedy"), FINDINGS, ids=lambda x: str(x)[:40])
def test_each_thing_is_noticed_and_has_a_remedy(where: tuple[Any, ...], value: Any, remedy: str) -> None:
    facts = sound_facts()
    place: Any = facts
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    found = advise(facts)
    assert len(found) == 1 and not found[0].wrong
    assert remedy in found[0].change + found[0].found


def test_what_does_not_work_comes_first() -> None:
    facts = sound_facts()
    facts["limits"]["huge_pages"] = "never"
    facts["checks"]["training"] = "StageError: no"
    facts["devices"][0].update(link=None, link_error="no room")
    assert [finding.wrong for finding in advise(facts)] == [True, True, False]


def test_two_nodes_and_no_gpu() -> None:
    facts = sound_facts()
    facts["host"]["numa_nodes"].append({"index": 1, "cores": "16-31", "memory_bytes": GIB})
    (found,) = advise(facts)
    assert "--cpunodebind=0" in found.change and "0-15" in found.found
    for change, remedy in (
        ({"torch_cuda": None}, "built with CUDA"),
        ({"cuda_driver": "no libcuda"}, "no libcuda"),
        ({}, "CUDA_VISIBLE_DEVICES"),
    ):
        facts = sound_facts()
        facts["software"].update(change)
        facts["devices"] = [{"name": "host:0", "kind": "host", "link": {"up": 1.0}}]
        (found,) = advise(facts)
        assert remedy in found.change


@pytest.mark.needs_cuda
def test_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--devices", "cuda:0", "--json", "--size-mib", "256"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (device,) = printed["devices"]
    assert device["model"] and device["total_bytes"] >= device["free_bytes"] > 0
    assert min(device["link"][key] for key in ("up", "down", "both", "up_pageable")) > 1e9
    assert all(outcome.startswith(WORKS) for outcome in printed["checks"].values())
