"""The exceptions RoundPipe raises, all of them under :class:`RoundPipeError`.

Every kind survives ``pickle`` and ``copy`` with its attributes, so that it can cross a process boundary (a launcher, a
test runner). The chained original exception does not cross it: its type and text stand in the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "ConfigError",
    "ConfigTypeError",
    "DeviceOutOfMemory",
    "HostOutOfMemory",
    "PartialStepError",
    "PlanError",
    "RoundPipeError",
    "SplitError",
    "StageError",
    "StallError",
    "locate",
]


def _rebuild(kind: type[RoundPipeError], args: tuple[Any, ...], state: dict[str, Any]) -> RoundPipeError:
    # The message in `args` is already complete, so the constructor, which would build it anew, is passed over.
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RoundPipeError(RuntimeError):
    """Anything RoundPipe reports. ``args`` is always one string."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))

    def __copy__(self) -> RoundPipeError:
        twin = _rebuild(type(self), self.args, self.__dict__)
        twin.__cause__ = self.__cause__
        return twin


def _describe(reason: str | BaseException) -> str:
    if not isinstance(reason, BaseException):
        return reason
    text = str(reason)
    return f"{type(reason).__name__}: {text}" if text else type(reason).__name__


class StageError(RoundPipeError):
    """A job failed on a device. Raise it ``from`` the original exception.

    Args:
        reason: the original exception, or a sentence. Its type and text become part of the message.
        device: name of the device, such as ``"cuda:1"`` or ``"host:0"``.
        phase: what was running: ``"forward"``, ``"recompute"``, ``"backward"``, ``"fused"``, ``"upload"``, ...
        stage: position of the stage in its plan.
        layer: index of the layer in the model.
        microbatch: index of the microbatch.

    Whatever is unknown is None and left out of the message.
    """

    def __init__(
        self,
        reason: str | BaseException,
        *,
        device: str | None = None,
        phase: str | None = None,
        stage: int | None = None,
        layer: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        where = _where(device, phase, stage, layer, microbatch)
        super().__init__(f"{where or 'a stage'} failed: {_describe(reason)}")
        self.device = device
        self.phase = phase
        self.stage = stage
        self.layer = layer
        self.microbatch = microbatch


def _where(device: str | None, phase: str | None, stage: int | None, layer: int | None, microbatch: int | None) -> str:
    named = {"device": device, "stage": stage, "layer": layer, "microbatch": microbatch}
    parts = [] if phase is None else [phase]
    parts += [f"{name} {value}" for name, value in named.items() if value is not None]
    return ", ".join(parts)


class PartialStepError(RoundPipeError):
    """A step, or the call that it was announced with, failed after layers had been updated: weights are not those of
    before, and may be a mixture of two steps, so nothing is retried.

    Load the last checkpoint before training goes on. ``layers`` holds the indices of the layers already updated, as
    far as known.
    """

    def __init__(self, message: str, *, layers: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.layers = layers


class StallError(RoundPipeError):
    """Nothing moved for longer than the watchdog allows. ``counters`` is the dump of the counters at that moment."""

    def __init__(self, message: str, *, counters: str = "") -> None:
        super().__init__(f"{message}\n{counters}" if counters else message)
        self.counters = counters


class ConfigError(RoundPipeError, ValueError):
    """An argument or a configuration has a value that cannot be used."""


class ConfigTypeError(ConfigError, TypeError):
    """An argument or a configuration is of the wrong type."""


class PlanError(ConfigError):
    """An execution plan does not fit the model or the kind of run."""


class SplitError(RoundPipeError, ValueError):
    """A batch could not be split into microbatches, or outputs could not be merged."""


class CheckpointError(RoundPipeError):
    """A checkpoint could not be written or read; what the system said is chained."""


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint does not belong to the model, optimizer, scaler or scheduler it is to be loaded into."""


SIMULATED_OUT_OF_MEMORY = 'out of memory on a simulated device (a GPU would say "CUDA out of memory.")'
"""With the words by which helpers that retry with a smaller batch recognise the condition."""


class DeviceOutOfMemory(RoundPipeError, torch.OutOfMemoryError):
    """A device has not enough memory. Also a ``torch.OutOfMemoryError``.

    ``args`` is one string that contains ``"CUDA out of memory."``, by which helpers that retry with a smaller batch
    recognise the condition; it is put in front where ``message`` lacks it (for a simulated device, in other words that
    hold it). ``asked_bytes`` is the size of the request
    that failed, or None. The place is told by the same attributes as in :class:`StageError`.

    As far as known: ``use`` is what the device held (a ``roundpipe.live_memory.MemoryUse``, bytes by category),
    ``capacity_bytes`` what the model can use of it, ``microbatch_shapes`` the tensors that the microbatch came in with,
    ``remedies`` what to change, in the order to try (each a ``roundpipe.oom_advice.Remedy`` with a ``config`` for the
    next call and the predicted peaks before and after; None where nobody could look for any). All of it stands in the
    message too.
    """

    _PHRASE = "CUDA out of memory."

    def __init__(
        self,
        message: str,
        *,
        asked_bytes: int | None = None,
        device: str | None = None,
        phase: str | None = None,
        stage: int | None = None,
        layer: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        if self._PHRASE not in message:
            simulated = message.startswith("host:")
            message = f"{SIMULATED_OUT_OF_MEMORY}. {message}" if simulated else f"{self._PHRASE} {message}"
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.device = device
        self.phase = phase
        self.stage = stage
        self.layer = layer
        self.microbatch = microbatch
        self.use: Any = None
        self.capacity_bytes: int | None = None
        self.microbatch_shapes: tuple[str, ...] = ()
        self.remedies: tuple[Any, ...] | None = None


class HostOutOfMemory(RoundPipeError, MemoryError):
    """The host has not enough memory. Also a ``MemoryError`` and a ``RuntimeError``.

    ``args`` is one string that contains the words of PyTorch's CPU allocator, by which retry helpers recognise the
    condition; they are put in front where ``message`` lacks them. Attributes: as in :class:`DeviceOutOfMemory`, and as
    far as known ``available_bytes`` (left when it failed), ``limit_bytes`` (of the control group, or all memory),
    ``holders`` (bytes by what they are for, as in ``memory_report()``) and ``remedies`` (what would need less, and how
    many bytes each saves, the simplest first).
    """

    _PHRASE = "DefaultCPUAllocator: can't allocate memory"

    def __init__(
        self,
        message: str,
        *,
        asked_bytes: int | None = None,
        device: str | None = None,
        phase: str | None = None,
        stage: int | None = None,
        layer: int | None = None,
        microbatch: int | None = None,
        available_bytes: int | None = None,
        limit_bytes: int | None = None,
        holders: Mapping[str, int] | None = None,
        remedies: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message if self._PHRASE in message else f"{self._PHRASE}: {message}")
        self.asked_bytes = asked_bytes
        self.device = device
        self.phase = phase
        self.stage = stage
        self.layer = layer
        self.microbatch = microbatch
        self.available_bytes = available_bytes
        self.limit_bytes = limit_bytes
        self.holders = dict(holders or {})
        self.remedies = tuple(remedies)


def locate(
    original: BaseException,
    *,
    device: str | None = None,
    phase: str | None = None,
    stage: int | None = None,
    layer: int | None = None,
    microbatch: int | None = None,
) -> RoundPipeError:
    """The typed exception for ``original``, which happened at the given place.

    A device that is out of memory gives :class:`DeviceOutOfMemory`, a host :class:`HostOutOfMemory`, anything else a
    :class:`StageError`. Already typed failures (a :class:`StageError`, an out-of-memory error, a
    :class:`PartialStepError`, a :class:`StallError`) are returned as they are: they know more than this call.
    Otherwise ``original`` is set as ``__cause__``.
    """
    if isinstance(original, (StageError, PartialStepError, StallError, DeviceOutOfMemory, HostOutOfMemory)):
        return original
    place = _where(device, phase, stage, layer, microbatch)
    message = f"{place} failed: {_describe(original)}" if place else _describe(original)
    error: RoundPipeError
    if isinstance(original, torch.OutOfMemoryError):
        error = DeviceOutOfMemory(message, device=device, phase=phase, stage=stage, layer=layer, microbatch=microbatch)
    elif isinstance(original, MemoryError) or HostOutOfMemory._PHRASE in str(original):
        from .host_advice import explain  # not at the top: it needs what raises these errors

        error = explain(
            HostOutOfMemory(message, device=device, phase=phase, stage=stage, layer=layer, microbatch=microbatch)
        )
    else:
        error = StageError(original, device=device, phase=phase, stage=stage, layer=layer, microbatch=microbatch)
    error.__cause__ = original
    return error
