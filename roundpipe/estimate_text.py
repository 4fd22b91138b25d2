"""An estimate as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .auto_plan import usable_bytes
from .host_advice import format_bytes

if TYPE_CHECKING:
    from .estimate import Configuration, Estimate, MemoryEstimate

__all__ = ["describe"]


def describe(estimate: MemoryEstimate) -> str:
    """Lines of text, memory in GiB: what was asked for, and beside it the fastest settings that fit, or the nearest."""
    asked, fastest, nearest = estimate.asked, estimate.fastest, estimate.nearest
    trained = estimate.trainable_parameters
    lines = [f"{estimate.parameters:,} parameters, {trained:,} of them trained"]
    other = fastest or nearest
    found = [asked] if other is None or other.configuration == asked.configuration else [asked, other]
    titles = ["as asked", "fastest that fits" if fastest else "nearest"][: len(found)]
    lines.append(_row("", titles))
    for name in _SETTINGS:
        lines.append(_row(name, [_setting(e.configuration, name) for e in found]))
    lines.append(f"each of {estimate.num_devices} device(s), GiB")
    lines += _table([e.device for e in found])
    lines.append(_row("  limit", [_gib(estimate.device_limit_bytes)] * len(found)))
    lines.append("host, GiB")
    lines += _table([e.host for e in found])
    lines.append(_row("  limit", [_gib(estimate.host_limit_bytes)] * len(found)))
    lines.append(_row("fits", [_verdict(e) for e in found]))
    if fastest is None:
        assert nearest is not None
        misses = " and ".join(_misses(estimate, nearest))
        lines.append(f"nothing that was tried fits; what comes nearest is above {misses}")
        lines.append("what helps: fewer rows a call, shorter sequences, more devices, or adapters (LoRA)")
    elif len(found) == 1 and asked.fits:
        lines.append("this is the fastest that fits, of what was tried")
    elif len(found) == 2 and asked.fits:
        lines.append(f"the fastest should take {fastest.relative_time / asked.relative_time:.2f} of the time as asked")
    if any(e.configuration.steps == "announced" for e in found):
        lines.append(
            "announced: forward_backward(..., step=optimizer), exact; without max_grad_norm and without a loss scale"
        )
    return "\n".join(lines)


_SETTINGS = ("num_microbatch", "recompute_grain", "stages", "fused stage", "pin_model", "optimizer", "steps")


def _setting(configuration: Configuration, name: str) -> str:
    if name == "stages":
        return f"{len(configuration.forward)} forward, {len(configuration.backward)} backward"
    if name == "fused stage":
        fused = configuration.backward[0]
        return f"layers {fused.start} to {fused.stop - 1}"
    return str(getattr(configuration, name))


def _table(parts: list[Any]) -> list[str]:
    names = [f.name for f in fields(parts[0])]
    rows = [
        _row("  " + _label(n), [_gib(getattr(p, n)) for p in parts]) for n in names if any(getattr(p, n) for p in parts)
    ]
    return [*rows, _row("  total", [_gib(part.total_bytes) for part in parts])]


def _label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _gib(size: int | None) -> str:
    return "none" if size is None else f"{size / 2**30:.2f}"


def _verdict(estimate: Estimate) -> str:
    if estimate.fits:
        return "yes"
    return "no: " + " and ".join(
        where for where, fits in (("device", estimate.fits_device), ("host", estimate.fits_host)) if not fits
    )


def _misses(estimate: MemoryEstimate, nearest: Estimate) -> Iterator[str]:
    usable, limit = usable_bytes([estimate.device_limit_bytes]), estimate.host_limit_bytes
    if usable is not None and not nearest.fits_device:
        over = format_bytes(nearest.device.total_bytes - usable)
        yield f"what can be used of a device ({format_bytes(usable)}) by {over}"
    if limit is not None and not nearest.fits_host:
        yield f"the host's limit by {format_bytes(nearest.host.total_bytes - limit)}"


def _row(name: str, values: list[str]) -> str:
    return f"{name:<20}" + "".join(f"{value:>26}" for value in values)
