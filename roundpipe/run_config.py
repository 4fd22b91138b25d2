"""How a call runs: defaults of the model, overridden by each call, resolved into one complete configuration."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields
from typing import Any

import torch

from roundpipe.chunk_spec import check_spec, is_replicate
from roundpipe.errors import ConfigError, ConfigTypeError
from roundpipe.plan import ModelExecutePlan

__all__ = ["ResolvedConfig", "RoundPipeRunConfig", "resolve"]

_GRAINS = ("stage", "layer")


@dataclass(frozen=True)
class RoundPipeRunConfig:
    """Settings of a model or of one call; None means "not set here". The order of the fields is fixed.

    Raises:
        ConfigTypeError: a field is of the wrong type (a TypeError).
        ConfigError: a field has a value out of range (a ValueError).
    """

    requires_grad: bool | None = None
    """Keep what backward needs. Default: the grad mode of the caller. True under ``torch.no_grad()`` is an error."""

    output_device: torch.device | str | int | None = None
    """Where merged outputs live. Default ``"cpu"``, where they arrive anyway; a GPU costs one copy more."""

    preserve_rng_state: bool | None = None
    """Recompute sees the random numbers of the forward. Default True; False saves nothing noticeable, and is right only
    for layers that draw no random numbers or do not mind different ones."""

    recompute_grain: str | None = None
    """``"stage"`` (default): recompute a whole backward stage, then run its backward, which is fastest.
    ``"layer"``: one layer at a time, which has the lowest peak of device memory and moves every layer's input."""

    num_microbatch: int | None = None
    """Pieces a batch is cut into. Default: number of devices + 1. More of them need less device memory each and keep
    devices busier; smaller pieces use a GPU less well."""

    split_input: Any = None
    """``(args_spec or None, kwargs_spec or None)`` of ``TensorChunkSpec(dim)`` and ``_Replicate``, or
    ``f(args, kwargs, n) -> (list of args, list of kwargs)``. Default: automatic."""

    split_label: Any = None
    """A spec like the label, or ``f(label, n) -> list``. Default: automatic."""

    merge_output: Any = None
    """True: automatic (the default). A spec like the output, which may hold ``_CustomReducer``; ``f(outputs) -> Any``;
    or False: outputs stay packed by microbatch, to be handed to another RoundPipe without a wait."""

    execute_plan: ModelExecutePlan | None = None
    """The stages. Default: planned from measured times and sizes."""

    on_oom: str | None = None
    """What follows when a device runs out of memory. ``"raise"`` (default): DeviceOutOfMemory, which says what to
    change. ``"adapt"``: the call is undone and made again with the first setting that is predicted to fit (more
    microbatches, recompute by layer, smaller stages), which is logged once and kept for later calls; when nothing is
    left it raises. The result is that of a call that asked for these settings at once. The price: ``forward_backward``
    returns only when its backward has ended. Losses are summed over however many microbatches there are in the end, so
    ``loss_fn`` must not divide by their number. Not with ``step=``."""

    def __post_init__(self) -> None:
        _check_bool("requires_grad", self.requires_grad)
        _check_bool("preserve_rng_state", self.preserve_rng_state)
        if self.output_device is not None:
            _as_device(self.output_device)
        _check_name("recompute_grain", self.recompute_grain, _GRAINS)
        if self.num_microbatch is not None:
            object.__setattr__(self, "num_microbatch", _as_count(self.num_microbatch))
        _check_split_input(self.split_input)
        if not _is_function(self.split_label):
            check_spec(self.split_label, "split_label", reducers=False)
        if not isinstance(self.merge_output, bool) and not _is_function(self.merge_output):
            check_spec(self.merge_output, "merge_output", reducers=True)
        if self.execute_plan is not None and not isinstance(self.execute_plan, ModelExecutePlan):
            raise _wrong_type("execute_plan", self.execute_plan, "a ModelExecutePlan")
        _check_name("on_oom", self.on_oom, ("raise", "adapt"))

    def overridden_by(self, other: RoundPipeRunConfig) -> RoundPipeRunConfig:
        """These settings, with those of ``other`` wherever ``other`` sets them."""
        chosen = {
            field.name: getattr(self if getattr(other, field.name) is None else other, field.name)
            for field in fields(RoundPipeRunConfig)
        }
        return RoundPipeRunConfig(**chosen)


@dataclass(frozen=True)
class ResolvedConfig:
    """Every setting of one call, decided. ``split_input`` and ``split_label`` None: automatic; ``merge_output`` True:
    automatic; ``execute_plan`` None: to be planned.
    """

    requires_grad: bool
    output_device: torch.device
    preserve_rng_state: bool
    recompute_grain: str
    num_microbatch: int
    split_input: Any
    split_label: Any
    merge_output: Any
    execute_plan: ModelExecutePlan | None
    on_oom: str
    merges_unbatched: bool = False  # automatic merging looks for outputs that do not depend on the batch


def resolve(
    model_config: RoundPipeRunConfig,
    call_config: RoundPipeRunConfig | None = None,
    *,
    devices: int,
    grad_enabled: bool,
) -> ResolvedConfig:
    """Puts the settings of a call together: the call's own, else the model's, else the defaults.

    Args:
        devices: number of devices of the engine.
        grad_enabled: grad mode of the caller (``torch.is_grad_enabled()`` on the caller's thread).

    Raises:
        ConfigTypeError: one of the two is not a RoundPipeRunConfig.
        ConfigError: ``requires_grad=True`` with grad mode off (also a RuntimeError), or ``output_device`` names a GPU
            that is not there.
    """
    if not isinstance(model_config, RoundPipeRunConfig):
        raise _wrong_type("the model's config", model_config, "a RoundPipeRunConfig")
    if call_config is not None and not isinstance(call_config, RoundPipeRunConfig):
        raise _wrong_type("the call's config", call_config, "a RoundPipeRunConfig or None")
    chosen = model_config if call_config is None else model_config.overridden_by(call_config)
    if chosen.requires_grad and not grad_enabled:
        raise ConfigError(
            "requires_grad=True in the RoundPipeRunConfig, but grad mode is off (torch.no_grad or inference mode): "
            "call with grad mode on, or set requires_grad=False for this call"
        )
    device = _as_device("cpu" if chosen.output_device is None else chosen.output_device)
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ConfigError(f"output_device={str(device)!r}: PyTorch sees {torch.cuda.device_count()} GPU(s)")
    return ResolvedConfig(
        requires_grad=grad_enabled if chosen.requires_grad is None else chosen.requires_grad,
        output_device=device,
        preserve_rng_state=chosen.preserve_rng_state is not False,
        recompute_grain=chosen.recompute_grain or "stage",
        num_microbatch=devices + 1 if chosen.num_microbatch is None else chosen.num_microbatch,
        split_input=chosen.split_input,
        split_label=chosen.split_label,
        merge_output=True if chosen.merge_output is None else chosen.merge_output,
        execute_plan=chosen.execute_plan,
        on_oom=chosen.on_oom or "raise",
    )


def _wrong_type(name: str, value: object, expected: str) -> ConfigTypeError:
    return ConfigTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected {expected}")


def _check_bool(name: str, value: object) -> None:
    if value is not None and not isinstance(value, bool):
        raise _wrong_type(name, value, "True, False or None")


def _check_name(name: str, value: object, names: tuple[str, ...]) -> None:
    if value is None:
        return
    expected = " or ".join(repr(known) for known in names)
    if not isinstance(value, str):
        raise _wrong_type(name, value, expected)
    if value not in names:
        raise ConfigError(f"{name}: got {value!r}, expected {expected}")


def _as_count(value: object) -> int:
    if isinstance(value, bool):
        raise _wrong_type("num_microbatch", value, "an integer")
    try:
        count = operator.index(value)  # type: ignore[arg-type]  # that is what is found out here
    except TypeError:
        raise _wrong_type("num_microbatch", value, "an integer") from None
    if count < 1:
        raise ConfigError(f"num_microbatch: got {count}, expected at least 1")
    return count


def _as_device(value: object) -> torch.device:
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
        raise _wrong_type("output_device", value, "a torch.device or a string such as 'cpu' or 'cuda:0'")
    try:
        # A bare number means a GPU to PyTorch, but only where one is built in.
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
    except RuntimeError as error:
        raise ConfigError(f"output_device: got {value!r}, expected 'cpu' or 'cuda:<n>' ({error})") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"output_device: got {str(device)!r}, expected 'cpu' or 'cuda:<n>'")
    return device


def _is_function(value: object) -> bool:
    return callable(value) and not is_replicate(value)


def _check_split_input(value: object) -> None:
    if value is None or _is_function(value):
        return
    expected = "None, (args_spec or None, kwargs_spec or None), or f(args, kwargs, n) -> (list, list)"
    if not isinstance(value, (tuple, list)):
        raise _wrong_type("split_input", value, expected)
    if len(value) != 2:
        raise ConfigError(f"split_input: got {len(value)} entries, expected {expected}")
    check_spec(value[0], "split_input[0] (args_spec)", reducers=False)
    check_spec(value[1], "split_input[1] (kwargs_spec)", reducers=False)
