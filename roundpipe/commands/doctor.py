"""``doctor``: what this machine is, how quick its memory and links are, what bounds it, and what to change."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any

import torch

import roundpipe
from roundpipe import _ops
from roundpipe import engine as engines
from roundpipe.commands.advice import advise
from roundpipe.device_checks import WORKS, check_devices
from roundpipe.devices import ENVIRONMENT_VARIABLE, devices, use_devices
from roundpipe.errors import RoundPipeError
from roundpipe.link_speeds import host_copy_bytes_per_s, measure_link
from roundpipe.machine import pci_link, read_host_facts, read_limits

__all__ = ["add", "run"]

_MIB = 1 << 20


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="the machine, its speeds and limits, and what to change")
    parser.add_argument("--devices", metavar="SPEC", help='as in roundpipe.use_devices; default: all GPUs, or "host:1"')
    parser.add_argument("--size-mib", type=_size, default=256, help="of the copies that are timed (default 256)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 1 <= value <= 16384:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of MiB between 1 and 16384")
    return value


def run(arguments: argparse.Namespace) -> int:
    if arguments.devices is not None:
        use_devices(arguments.devices)
    elif not os.environ.get(ENVIRONMENT_VARIABLE) and torch.cuda.device_count() == 0:
        use_devices("host:1")  # without the warning: the report says so
    report = examine(arguments.size_mib * _MIB)
    print(json.dumps(report, indent=2) if arguments.json else _text(report))
    return 1 if any(finding["wrong"] for finding in report["findings"]) else 0


def examine(size_bytes: int) -> dict[str, Any]:
    """Everything that ``--json`` prints. Sizes in bytes, speeds in bytes a second."""
    facts: dict[str, Any] = {"software": _software()}
    facts["host"] = dataclasses.asdict(read_host_facts())
    _, _, group_limit, group_used, headroom = _ops.host_limits()[:5]
    facts["limits"] = dataclasses.asdict(read_limits()) | {
        "cgroup_limit_bytes": group_limit or None,
        "cgroup_used_bytes": group_used if group_limit else None,
        "headroom_bytes": headroom,
    }
    size = min(size_bytes, max(headroom // 16, _MIB))
    threads = torch.get_num_threads()
    facts["host_memory"] = {
        "one_thread": host_copy_bytes_per_s(1, size),
        "all_threads": host_copy_bytes_per_s(threads, size),
        "threads": threads,
    }
    facts["devices"], facts["checks"] = _examine_devices(size)
    facts["findings"] = [dataclasses.asdict(finding) for finding in advise(facts)]
    return facts


def _software() -> dict[str, Any]:
    built = dict(line.split(": ", 1) for line in _ops.build_facts().splitlines())
    return {
        "roundpipe": roundpipe.__version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cuda_driver": _ops.cuda_driver() or WORKS,
        "gradient_kernels": _ops.has_kernels(),
        "instruction_sets": _ops.isa_names(),
        "instruction_set": _ops.isa_active(),
        "built": built,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("ROUNDPIPE_", "RPP_", "CUDA_"))},
    }


def _examine_devices(size_bytes: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Facts and speeds of each device, and the outcome of the checks."""
    try:
        engine = engines.current()
    except RoundPipeError as error:
        return [], {"opening the devices": str(error)}
    found = []
    for worker, device in zip(engine.workers, devices(), strict=True):
        entry: dict[str, Any] = {"name": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes}
        if device.kind == "cuda":
            entry |= _gpu_facts(device.ordinal)
        room = entry.get("free_bytes", device.memory_bytes) or 16 * size_bytes
        try:
            link = measure_link(engine, worker, max(min(size_bytes, room // 8), 4096))
            entry["link"] = dataclasses.asdict(link)
        except RoundPipeError as error:
            entry["link"] = None
            entry["link_error"] = str(error)
        if device.kind == "cuda":  # after the copies: an idle link saves power
            pci = pci_link(device.ordinal)
            entry["pci"] = None if pci is None else dataclasses.asdict(pci)
        found.append(entry)
    return found, check_devices(engine)


def _gpu_facts(ordinal: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(ordinal)
    free, total = torch.cuda.mem_get_info(ordinal)
    return {
        "model": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "total_bytes": total,
        "free_bytes": free,
    }


# -- text --------------------------------------------------------------------------------------------------------------
def _text(report: dict[str, Any]) -> str:
    lines: list[str] = []
    for title in ("software", "host", "limits"):
        lines.append(title)
        lines += [_line(name, value) for name, value in report[title].items()]
    memory = report["host_memory"]
    lines.append("host memory, read and written by copies")
    lines.append(_line("one thread", _speed(memory["one_thread"])))
    lines.append(_line(f"{memory['threads']} threads", _speed(memory["all_threads"])))
    for device in report["devices"]:
        lines.append(f"device {device['name']}" + (" (simulated)" if device["kind"] == "host" else ""))
        lines += [_line(k, v) for k, v in device.items() if k not in ("name", "kind", "link", "pci")]
        if device.get("pci"):
            lines += [_line(f"pci {name}", value) for name, value in device["pci"].items()]
        if device["link"]:
            lines += [_line(name, _speed(value)) for name, value in device["link"].items() if name != "size_bytes"]
    lines.append("checks")
    lines += [_line(name, outcome) for name, outcome in report["checks"].items()]
    lines.append("findings" if report["findings"] else "findings: none")
    for finding in report["findings"]:
        mark = "wrong" if finding["wrong"] else "note"
        lines.append(f"  {mark}: {finding['found']}\n    change: {finding['change']}")
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        name, value = name.removesuffix("_bytes"), "no limit" if value is None else f"{value / 2**30:.2f} GiB"
    elif isinstance(value, dict):
        value = "; ".join(f"{k} {v}" for k, v in value.items()) or "nothing"
    elif name == "numa_nodes":
        value = ", ".join(f"{n['index']}: cores {n['cores']}, {n['memory_bytes'] / 2**30:.0f} GiB" for n in value)
    elif isinstance(value, (list, tuple)):
        value = ", ".join(str(item) for item in value)
    return f"  {name.replace('_', ' '):<26} {'none' if value is None else value}"


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.1f} GB/s"
