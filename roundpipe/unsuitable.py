"""Models that another library has placed, split or packed in its own way: what they are, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .errors import ConfigError

__all__ = ["refuse_unsuitable"]

# By the name of a class among a module's bases: (what it is, what to do). Names, so that nothing is imported.
_CONTAINERS = {
    "DataParallel": ("torch.nn.DataParallel", "wrap the model inside it (.module): RoundPipe drives all GPUs itself"),
    "DistributedDataParallel": (
        "DistributedDataParallel",
        "wrap the model inside it (.module), in one process: RoundPipe drives all GPUs itself",
    ),
    "FullyShardedDataParallel": (
        "FSDP (FullyShardedDataParallel)",
        "wrap the model before FSDP did: RoundPipe streams whole layers itself",
    ),
    "FSDPModule": (
        "FSDP (fully_shard)",
        "wrap a model to which fully_shard was not applied: RoundPipe streams whole layers itself",
    ),
    "DeepSpeedEngine": ("DeepSpeed", "wrap the model that was given to deepspeed.initialize, not the engine"),
}

_PACKED_WEIGHTS = ("Int8Params", "Params4bit")
_LOADED_FLAGS = ("is_loaded_in_8bit", "is_loaded_in_4bit")


def refuse_unsuitable(model: nn.Module) -> None:
    """Raises ConfigError, with the remedy, for a model whose weights do not all lie in host memory as plain tensors."""
    kind = type(model).__name__
    _refuse_containers(model)
    _refuse_packed(model, kind)
    _refuse_dispatched(model, kind)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            continue  # of a lazy module, which is refused with its own remedy
        if any(c.__name__ == "DTensor" for c in type(tensor).__mro__):
            raise ConfigError(
                f"{name} is a DTensor, spread over the processes of a device mesh (tensor parallelism, FSDP); load the "
                "model whole, without tp_plan or a mesh: RoundPipe needs one process"
            )
        if tensor.device.type == "meta":
            raise ConfigError(
                f"{name} is on the meta device and has no values; load the weights first (from_pretrained, or "
                "model.to_empty(device='cpu') and an initialisation)"
            )
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"{name} is on {tensor.device}; weights live in host memory and visit the devices only while they "
                "compute. Wrap the model before moving it, or call model.cpu() first"
            )


def _refuse_containers(model: nn.Module) -> None:
    for name, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _CONTAINERS and base.__module__.split(".")[0] in ("torch", "deepspeed"):
                what, remedy = _CONTAINERS[base.__name__]
                where = f"its module {name!r}" if name else "it"
                raise ConfigError(f"{type(model).__name__} cannot be streamed: {where} is under {what}; {remedy}")


def _refuse_packed(model: nn.Module, kind: str) -> None:
    """Weights of fewer bits than their values are streamed only where all that belongs to them is plain tensors."""
    marked = [module for module in model.modules() if _is_marked_quantized(module)]
    method = next((m for m in map(_method, marked) if m), None)
    reason = None
    if any(getattr(module, flag, False) is True for module in marked for flag in _LOADED_FLAGS):
        reason = "bitsandbytes keeps what belongs to a weight beside it, outside the model's tensors"
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in _PACKED_WEIGHTS:
            reason = f"{name} is of bitsandbytes' class {type(parameter).__name__}, which packs itself when it is moved"
        elif marked and type(parameter) is not nn.Parameter and type(parameter.data) is not torch.Tensor:
            reason = f"{name} is of the class {type(parameter.data).__name__}, no plain tensor"
    if reason is None and marked:
        beside = next(_tensors_beside(model), None)
        if beside is not None:
            reason = f"{beside} is a tensor but neither a parameter nor a buffer, so it would stay behind"
    if reason is not None:
        raise ConfigError(
            f"{kind} is quantised{f' ({method})' if method else ''} in a way that cannot be streamed: {reason}. Load "
            "it without quantization_config (load_in_8bit, load_in_4bit), for example with dtype=torch.bfloat16: its "
            "weights are in host memory anyway. Frozen quantised weights that are plain parameters or buffers can be "
            "streamed."
        )


def _is_marked_quantized(module: nn.Module) -> bool:
    """As transformers marks a model (its quantizer, its flags) and bitsandbytes' loaders do."""
    own = vars(module)
    cls = type(module)
    if any(own.get(flag, getattr(cls, flag, False)) is True for flag in ("is_quantized", *_LOADED_FLAGS)):
        return True
    return any(own.get(name) is not None for name in ("hf_quantizer", "quantization_method"))


def _method(module: nn.Module) -> str | None:
    method = vars(module).get("quantization_method")
    if method is None:
        config: Any = getattr(vars(module).get("hf_quantizer"), "quantization_config", None)
        method = getattr(config, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def _tensors_beside(model: nn.Module) -> Iterator[str]:
    """Names of tensors that modules hold as plain attributes, alone or one level deep in a container."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
            if isinstance(value, torch.Tensor) or any(isinstance(item, torch.Tensor) for item in inside):
                yield f"{name}.{attribute}".lstrip(".")


def _refuse_dispatched(model: nn.Module, kind: str) -> None:
    for module in model.modules():
        placed = vars(module).get("hf_device_map")
        if isinstance(placed, Mapping):
            elsewhere = {str(where) for where in placed.values()} - {"cpu"}
            if elsewhere:
                raise ConfigError(
                    f"{kind} was loaded with device_map, which put parts of it on {', '.join(sorted(elsewhere))}; load "
                    "it without device_map (or with device_map='cpu'), so that it lies in host memory as a whole. To "
                    "train from files larger than memory use pin_model='off'"
                )
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ConfigError(
            f"{kind} was dispatched over devices (device_map); load it without device_map, so that it lies in host "
            "memory as a whole, or call accelerate.hooks.remove_hook_from_submodules(model) first"
        )
