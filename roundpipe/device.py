"""The devices as a list, for scripts that ask for ``roundpipe.device.device_list``."""

from __future__ import annotations

from typing import Any

from .devices import Device, devices

__all__ = ["Device", "device_list"]

device_list: list[Device]


def __getattr__(name: str) -> Any:
    if name == "device_list":  # looked up at every access: importing must not decide on devices
        return devices()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
