"""Checks of single arguments: each says what came, what was expected, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .errors import ConfigError, ConfigTypeError

__all__ = ["check_bool", "check_compile", "check_name", "check_optim_dtype", "check_state_dict", "keyword_arguments"]


def check_bool(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigTypeError(f"{where}: got {value!r} of type {type(value).__name__}, expected True or False")
    return value


def check_name(value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ConfigTypeError(f"RoundPipe(name=...): got {type(value).__name__}, expected a string or None")


def check_compile(value: object) -> None:
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return
    elif isinstance(value, bool):
        return
    raise ConfigTypeError(
        f"compile={value!r}: expected True, False, or a dict of options of torch.compile such as "
        '{"mode": "max-autotune-no-cudagraphs"}'
    )


def check_optim_dtype(value: object) -> None:
    expected = "expected a floating-point torch.dtype or None"
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise ConfigTypeError(f"optim_dtype={value!r}: got {type(value).__name__}, {expected}")
    if not value.is_floating_point:
        raise ConfigError(f"optim_dtype={value!r}: {expected}")


def check_state_dict(value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigTypeError(f"load_state_dict(state_dict): got {type(value).__name__}, expected a mapping of tensors")


def keyword_arguments(where: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A dictionary of its own, empty for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigTypeError(
            f"{where}: got {type(value).__name__}, expected a mapping from names of keyword arguments to values"
        )
    for key in value:
        if not isinstance(key, str):
            raise ConfigTypeError(f"{where}: got the key {key!r} of type {type(key).__name__}, expected strings")
    return dict(value)
