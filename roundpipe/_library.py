"""Loads the C++ libraries and turns their failures into typed exceptions."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from roundpipe import errors

__all__ = ["Poisoned", "core_path", "has_kernels", "take_failure"]

_HERE = Path(__file__).parent


class Poisoned(errors.RoundPipeError):
    """Something that this operation depends on has failed; that failure carries the reason."""


def _load(name: str, required: bool) -> Path | None:
    path = _HERE / name
    reason: BaseException | str
    try:
        if path.exists():
            torch.ops.load_library(str(path))
            return path
        if not required:
            return None
        reason = "the file is not there"
    except (OSError, RuntimeError) as error:
        reason = error
    raise ImportError(
        f"roundpipe cannot load its C++ library {path}: {reason}\n"
        f"torch {torch.__version__} at {Path(torch.__file__).parent}, Python {platform.python_version()} "
        f"({sys.implementation.name}), {platform.platform()}\n"
        "It needs torch 2.11 or newer, on Linux. Rebuild it with: pip install --no-build-isolation --force-reinstall "
        "--no-deps <path of the roundpipe sources> (a C++20 compiler and ninja are all it takes)."
    ) from (reason if isinstance(reason, BaseException) else None)


core_path = _load("_C.so", required=True)
_kernels_path = _load("_C_cuda.so", required=False)


def has_kernels() -> bool:
    """Whether the CUDA kernels were built (nvcc was there); without them torch operators do their work."""
    return _kernels_path is not None


def take_failure(error: RuntimeError) -> errors.RoundPipeError | None:
    """The typed exception for what this thread's last operator raised; None when ``error`` is not one of ours."""
    record = torch.ops.roundpipe.error_take()
    kind, _, rest = record.partition("\x1f")
    number, _, message = rest.partition("\x1f")
    # torch rejects arguments of wrong types before our code runs: such an error must not pick up an older record.
    if not kind or message not in str(error):
        return None
    if kind == "InvalidArgument":
        return errors.ConfigError(message)
    if kind == "Poisoned":
        return Poisoned(message)
    if kind == "DeviceOutOfMemory":
        return errors.DeviceOutOfMemory(message, asked_bytes=int(number))
    if kind == "HostOutOfMemory":
        from .host_advice import explain  # not at the top: it asks operators

        return explain(errors.HostOutOfMemory(message, asked_bytes=int(number)))
    failure = errors.RoundPipeError(message)
    if kind == "DriverError":
        failure.code = int(number)  # type: ignore[attr-defined]
    return failure
