"""Models of transformers by their configuration alone, without weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .assumed_values import assumed_values
from .causal_lm import causal_lm_to_sequential

__all__ = ["add_lora", "load_config", "meta_layers", "meta_model"]


def load_config(source: str) -> Any:
    """The configuration in a folder, in a JSON file, or of a model on the hub (which needs a connection).

    Raises ConfigError for what cannot be read.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ConfigError('a configuration needs transformers: pip install "roundpipe[hf]"') from None
    path = Path(source)
    if not path.exists() and (path.is_absolute() or source.startswith((".", "~")) or path.suffix == ".json"):
        raise ConfigError(f"{source}: there is no such folder or file")
    chatter = logging.getLogger("huggingface_hub")
    level = chatter.level
    chatter.setLevel(logging.ERROR)  # it warns of every try to connect
    try:
        if path.suffix == ".json" or path.is_file():
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict) or "model_type" not in values:
                raise ConfigError(f"{source}: has no model_type, so it is no configuration of transformers")
            return AutoConfig.for_model(**values)
        return AutoConfig.from_pretrained(source)
    except ConfigError:
        raise
    except Exception as error:  # many kinds: no such file, no connection, no such model, bad JSON, unknown type
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{source}: the configuration cannot be read: {first}") from error
    finally:
        chatter.setLevel(level)


def meta_model(config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """A causal language model of this configuration on the meta device.

    ``dtype``: of the weights; None: the configuration's own, or bfloat16.
    """
    from transformers import AutoModelForCausalLM

    named = getattr(config, "dtype", None)
    wanted = dtype or (named if isinstance(named, torch.dtype) else None) or torch.bfloat16
    try:
        with torch.device("meta"), assumed_values():
            return AutoModelForCausalLM.from_config(config, dtype=wanted)  # type: ignore[no-any-return]
    except ValueError as error:
        first = next(iter(str(error).strip().splitlines()), "")
        raise ConfigError(f"{type(config).__name__}: no causal language model can be made of it: {first}") from error


def add_lora(model: nn.Module, rank: int) -> nn.Module:
    """Low-rank adapters of PEFT on every linear layer but the head; the rest is frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("adapters need PEFT: pip install peft") from None
    with torch.device("meta"):
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))  # type: ignore[no-any-return]


def meta_layers(model: nn.Module) -> nn.Sequential:
    """The layers as ``wrap_model_to_roundpipe`` makes them, of a causal language model without values.

    Raises ConfigError for a model that is not one chain of blocks.
    """
    try:
        with torch.device("meta"), assumed_values():
            return causal_lm_to_sequential(model)
    except NotImplementedError as error:
        raise ConfigError(str(error)) from error
