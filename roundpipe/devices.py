"""Which devices the engine works on: GPUs, or simulated devices of the host.

The choice is made once for the process, in this order: :func:`use_devices`, the environment variable
``ROUNDPIPE_DEVICES``, all GPUs that PyTorch sees, one simulated device (with a warning). Nothing is decided at import.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from roundpipe.call_site import caller_level
from roundpipe.errors import ConfigError, ConfigTypeError

__all__ = ["Device", "DeviceSpec", "active_spec", "devices", "on_change", "parse_devices", "use_devices"]

ENVIRONMENT_VARIABLE = "ROUNDPIPE_DEVICES"

_FORMS = (
    '"cuda" (all visible GPUs), "cuda:0,cuda:1", "cuda:0*2" (two logical devices on one GPU), "host:4" (simulated '
    'devices), "host:2@512MiB" (memory of each)'
)
_UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_HOST = re.compile(r"host(?::(?P<count>\d+))?(?:@(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]+))?", re.ASCII)
_MAX_HOST_DEVICES = 256  # each one has threads of its own: a larger number is a slip of the pen
_MAX_LOGICAL_DEVICES = 16  # on one GPU


@dataclass(frozen=True)
class DeviceSpec:
    """What a device string means.

    Attributes:
        kind: ``"cuda"`` or ``"host"``.
        ordinals: CUDA ordinals as PyTorch counts them (``CUDA_VISIBLE_DEVICES`` applied), or 0..n-1 of simulated
            devices. A GPU that stands for several logical devices is there several times. Empty: all visible GPUs, not
            yet looked up.
        memory_limit_bytes: memory of each simulated device; None: no limit of its own.
    """

    kind: str
    ordinals: tuple[int, ...]
    memory_limit_bytes: int | None = None


@dataclass(frozen=True)
class Device:
    """One device of the engine.

    Attributes:
        device: where tensors of this device live for PyTorch; the CPU for a simulated device.
        kind: ``"cuda"`` or ``"host"``.
        index: position among the engine's devices, 0..n-1.
        ordinal: CUDA ordinal, or ``index`` for a simulated device.
        memory_limit_bytes: memory of a simulated device; None: no limit of its own, or a GPU.
        sharers: logical devices on the same GPU, this one included.
    """

    device: torch.device
    kind: str
    index: int
    ordinal: int
    memory_limit_bytes: int | None = None
    sharers: int = 1

    @property
    def name(self) -> str:
        """``"cuda:<ordinal>"`` or ``"host:<index>"``."""
        return f"{self.kind}:{self.ordinal}"

    @property
    def memory_bytes(self) -> int | None:
        """Memory this process may use on the device: a GPU's size under the cap of
        ``torch.cuda.set_per_process_memory_fraction``, or a simulated device's limit (None: no limit). Logical devices
        on one GPU share it evenly.
        """
        if self.kind == "host":
            return self.memory_limit_bytes
        total: int = torch.cuda.get_device_properties(self.ordinal).total_memory
        return int(total * torch.cuda.get_per_process_memory_fraction(self.ordinal)) // self.sharers


on_change: list[Callable[[DeviceSpec | None], None]] = []
"""Called by :func:`use_devices` with the wanted spec (None: the default) before it takes effect. An exception from one
of them refuses the change: that is how the owner of a running engine keeps its devices while work is in flight."""

# Protects _wanted and _resolved against two threads asking for the devices first at the same time (which would warn
# twice); callbacks run outside, since they may wait for workers that ask for the devices.
_lock = threading.Lock()
_wanted: DeviceSpec | None = None
_resolved: DeviceSpec | None = None
_warned = False


def _refuse(spec: str, source: str, reason: str) -> ConfigError:
    return ConfigError(f"{source}: {spec!r}: {reason}. Accepted: {_FORMS}")


def parse_devices(spec: str, *, source: str = "devices") -> DeviceSpec:
    """Reads a device string; looks at no hardware.

    Units of memory are KiB, MiB, GiB (powers of 1024), KB, MB, GB (powers of 1000) and B, in any case.

    Args:
        spec: see the module's head for the forms.
        source: who gave the string, for messages.

    Raises:
        ConfigTypeError: ``spec`` is not a string.
        ConfigError: it is none of the accepted forms.
    """
    if not isinstance(spec, str):
        raise ConfigTypeError(f"{source}: got {type(spec).__name__}, expected a string. Accepted: {_FORMS}")
    text = spec.strip()
    if text.startswith("host"):
        return _parse_host(spec, text, source)
    if text == "cuda":
        return DeviceSpec("cuda", ())
    ordinals: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"cuda:(\d+)(?:\*(\d+))?", item, re.ASCII)
        if match is None:
            raise _refuse(spec, source, f"{item!r} is not a device")
        ordinal, logical = int(match[1]), int(match[2] or 1)
        if ordinal in ordinals:
            raise _refuse(spec, source, f"cuda:{ordinal} is named twice")
        if not 1 <= logical <= _MAX_LOGICAL_DEVICES:
            raise _refuse(spec, source, f"{logical} logical devices; a GPU can stand for 1 to {_MAX_LOGICAL_DEVICES}")
        ordinals += [ordinal] * logical
    return DeviceSpec("cuda", tuple(ordinals))


def _parse_host(spec: str, text: str, source: str) -> DeviceSpec:
    match = _HOST.fullmatch(text)
    if match is None:
        raise _refuse(spec, source, "this is not a number of simulated devices, with or without their memory")
    count = int(match["count"] or 1)
    if not 1 <= count <= _MAX_HOST_DEVICES:
        raise _refuse(spec, source, f"{count} simulated devices; between 1 and {_MAX_HOST_DEVICES} can be had")
    limit = None
    if match["number"] is not None:
        unit = _UNITS.get(match["unit"].upper())
        if unit is None:
            raise _refuse(
                spec, source, f"unknown unit of memory {match['unit']!r}, expected B, KiB, MiB, GiB, KB, MB or GB"
            )
        limit = int(float(match["number"]) * unit)
        if limit < 1:
            raise _refuse(spec, source, "a device without memory")
    return DeviceSpec("host", tuple(range(count)), limit)


def _resolve(spec: DeviceSpec, source: str) -> DeviceSpec:
    """Checks ``spec`` against the machine and puts in the ordinals of "all GPUs"."""
    if spec.kind == "host":
        return spec
    visible = torch.cuda.device_count()
    if visible == 0:
        if torch.version.cuda is None:
            remedy = f"this PyTorch ({torch.__version__}) is built without CUDA; install one that is built with it"
        else:
            remedy = (
                f"this PyTorch ({torch.__version__}, CUDA {torch.version.cuda}) sees no GPU; check that nvidia-smi "
                "lists one, that the driver is new enough, and that CUDA_VISIBLE_DEVICES does not hide it"
            )
        raise ConfigError(f'{source}: CUDA devices are asked for, but {remedy}, or ask for simulated ones ("host:1")')
    missing = [ordinal for ordinal in spec.ordinals if ordinal >= visible]
    if missing:
        raise ConfigError(
            f"{source}: cuda:{missing[0]} does not exist; {visible} GPU(s) are visible, cuda:0 is the first"
        )
    return spec if spec.ordinals else replace(spec, ordinals=tuple(range(visible)))


def _default_spec() -> DeviceSpec:
    global _warned
    named = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if named:
        return _resolve(parse_devices(named, source=ENVIRONMENT_VARIABLE), ENVIRONMENT_VARIABLE)
    visible = torch.cuda.device_count()
    if visible:
        return DeviceSpec("cuda", tuple(range(visible)))
    if not _warned:
        _warned = True
        warnings.warn(
            'RoundPipe found no GPU and works on one simulated device of the host ("host:1"). Ask for it by '
            f'roundpipe.use_devices("host:1") or {ENVIRONMENT_VARIABLE}=host:1 to silence this warning.',
            stacklevel=caller_level(),
        )
    return DeviceSpec("host", (0,))


def active_spec() -> DeviceSpec:
    """The spec in force, its ordinals filled in. The first call decides; later calls return the same.

    Raises:
        ConfigError: ``ROUNDPIPE_DEVICES`` cannot be read, or names GPUs that are not there.
    """
    global _resolved
    with _lock:
        if _resolved is None:
            _resolved = _wanted if _wanted is not None else _default_spec()
        return _resolved


def devices() -> list[Device]:
    """The engine's devices, in the order in which stages go round."""
    spec = active_spec()
    return [
        Device(
            torch.device("cuda", ordinal) if spec.kind == "cuda" else torch.device("cpu"),
            spec.kind,
            index,
            ordinal,
            spec.memory_limit_bytes,
            spec.ordinals.count(ordinal),
        )
        for index, ordinal in enumerate(spec.ordinals)
    ]


def use_devices(spec: str | None) -> None:
    """Chooses the devices for everything that starts after this call; nothing is waited for.

    Args:
        spec: ``"cuda"``, ``"cuda:0,cuda:1"``, ``"cuda:0*2"``, ``"host:4"``, ``"host:2@512MiB"``; None goes back to the
            default (``ROUNDPIPE_DEVICES``, all GPUs, or one simulated device). Logical devices let one GPU run what
            is written for several; each has a share of its memory.

    Raises:
        ConfigError, ConfigTypeError: the string cannot be read, or names GPUs that are not there; nothing has changed.
        RoundPipeError: from a running engine that still has work in flight; nothing has changed.
    """
    global _wanted, _resolved
    wanted = None if spec is None else _resolve(parse_devices(spec, source="use_devices"), "use_devices")
    with _lock:
        unchanged = wanted is not None and wanted == _resolved
    if not unchanged:
        for callback in tuple(on_change):
            callback(wanted)
    with _lock:
        _wanted = wanted
        _resolved = wanted
