"""``wrap_model_to_roundpipe``: from a model as its author wrote it to a model that is streamed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from .auto_model import AutoRoundPipe
from .call_site import caller_level
from .devices import devices
from .errors import ConfigError, ConfigTypeError
from .function_layer import FunctionLayer
from .model import RoundPipe
from .run_config import RoundPipeRunConfig
from .tree_rules import Rules, find_parts, total_elements
from .unsuitable import refuse_unsuitable

__all__ = ["wrap_model_to_roundpipe"]

logger = logging.getLogger(__name__)


def wrap_model_to_roundpipe(
    model: nn.Module | Callable[..., Any],
    use_sequential_preset: bool | None = None,
    lower_threshold: int = 16 * 1024,
    upper_threshold: int | None = None,
    skip_modules: Iterable[nn.Module] = (),
    override_config: Mapping[nn.Module, RoundPipeRunConfig] = {},  # noqa: B006  (never written)
    model_run_config: RoundPipeRunConfig | None = None,
    name: str | None = None,
    **roundpipe_kwargs: Any,
) -> RoundPipe:
    """Wraps a model for streamed training; its parameters stay the same objects under their own names.

    A decoder-only causal language model of transformers (the preset) becomes prefix, blocks and head, each a layer; it
    takes all arguments of its own forward, plus ``return_logits=False`` for the loss without materialised logits, and
    returns its own output type. An ``nn.Sequential`` has its children as layers. Gradient checkpointing of a model of
    transformers is switched off (logged): stages are recomputed anyway.

    Any other model runs its own forward on the host, and its parts are streamed when that calls them. Which modules are
    parts is decided from the root down by the rules of Note [Tree walk] in tree_rules.py, and logged. The result is an
    ``AutoRoundPipe``, or a ``RoundPipe`` of one layer where the whole model is one part. A function becomes a layer
    without weights. Both run with one microbatch if they have fewer than ``lower_threshold`` parameters.

    Args:
        model: on the CPU, not quantised, not compiled, without dispatch hooks; or a function, such as a loss.
        use_sequential_preset: True: a preset or an error; False: no preset; None: a preset if there is one (logged).
        lower_threshold: a module with so many parameter elements of its own is one part.
        upper_threshold: so is one that has no more than this in all. Default: all of the model's, divided by the number
            of devices + 1.
        skip_modules: modules that stay on the host.
        override_config: run configuration for single parts, by module.
        model_run_config: defaults for every call.
        name: for messages; default: where this was called.
        roundpipe_kwargs: passed on to ``RoundPipe`` (``optim_dtype``, ``pin_model``, ...).

    Raises:
        ConfigError, ConfigTypeError: the model cannot be streamed as it is; the message says what to do.
        NotImplementedError: ``use_sequential_preset=True`` and there is no preset for this model, or its trunk is not
            one chain of blocks.
    """
    if not isinstance(model, nn.Module) and callable(model):
        model = FunctionLayer(model)
    _check_model(model)
    _leave_out_checkpointing(model)
    _check_thresholds(lower_threshold, upper_threshold)
    skipped = _checked_modules("skip_modules", skip_modules)
    overrides = _checked_overrides(override_config)
    wrapper_arguments = dict(name=name, **roundpipe_kwargs)
    if use_sequential_preset and skipped:
        raise ConfigError("use_sequential_preset=True streams the whole model; leave skip_modules out or the preset")
    if use_sequential_preset is not False and not skipped:
        sequential = _preset(model, use_sequential_preset is True)
        if sequential is not None:
            _warn_of_unused(model, [""], override_config)
            config = _overridden(model_run_config, overrides.get(id(model)))
            wrapped = RoundPipe(sequential, model_run_config=config, **wrapper_arguments)
            wrapped.set_original_model(model)
            return wrapped
    upper = total_elements(model) // (len(devices()) + 1) if upper_threshold is None else upper_threshold
    parts = find_parts(model, Rules(lower_threshold, upper, frozenset(map(id, skipped)), overrides))
    _warn_of_unused(model, parts, override_config)
    if not parts:
        raise ConfigError(f"nothing of {type(model).__name__} is left to stream: skip_modules holds all that could be")
    if list(parts) == [""]:
        return RoundPipe(model, model_run_config=_overridden(model_run_config, parts[""]), **wrapper_arguments)
    return AutoRoundPipe(model, parts, model_run_config=model_run_config, **wrapper_arguments)


def _overridden(config: RoundPipeRunConfig | None, own: RoundPipeRunConfig | None) -> RoundPipeRunConfig:
    config = config if config is not None else RoundPipeRunConfig()
    if not isinstance(config, RoundPipeRunConfig):
        raise ConfigTypeError(f"model_run_config: got {type(config).__name__}, expected a RoundPipeRunConfig")
    return config if own is None else config.overridden_by(own)


def _checked_modules(what: str, modules: Iterable[nn.Module]) -> list[nn.Module]:
    if not isinstance(modules, Iterable):
        raise ConfigTypeError(f"{what}: got a single {type(modules).__name__}, expected several; write [module]")
    found = list(modules)
    for module in found:
        if not isinstance(module, nn.Module):
            raise ConfigTypeError(f"{what}: got {type(module).__name__}, expected modules (nn.Module) of the model")
    return found


def _checked_overrides(given: Mapping[nn.Module, RoundPipeRunConfig]) -> dict[int, RoundPipeRunConfig]:
    _checked_modules("override_config", given)
    for config in given.values():
        if not isinstance(config, RoundPipeRunConfig):
            raise ConfigTypeError(f"override_config: got {type(config).__name__}, expected a RoundPipeRunConfig")
    return {id(module): config for module, config in given.items()}


def _warn_of_unused(model: nn.Module, parts: Collection[str], given: Mapping[nn.Module, RoundPipeRunConfig]) -> None:
    streamed = {id(model.get_submodule(part)) for part in parts}
    names = {id(module): name for name, module in model.named_modules()}
    unused = [names.get(id(m), f"a {type(m).__name__} of another model") for m in given if id(m) not in streamed]
    if unused:
        warnings.warn(
            f"override_config has no effect on {', '.join(map(repr, unused))}: only modules that are streamed as a "
            f"whole have a configuration, which are {', '.join(map(repr, list(parts)[:20]))}",
            stacklevel=caller_level(),
        )


def _preset(model: nn.Module, forced: bool) -> nn.Sequential | None:
    """The layers of a model for which there is a preset, or None. Forced: an error says why there is none."""
    from .hf import causal_lm_to_sequential, is_causal_lm

    kind = type(model).__name__
    if not is_causal_lm(model):
        if forced:
            raise NotImplementedError(
                f"use_sequential_preset=True: there is no preset for {kind}, only for decoder-only causal language "
                "models of transformers; pass use_sequential_preset=None, or build an nn.Sequential of its layers"
            )
        return None
    try:
        sequential = causal_lm_to_sequential(model)
    except NotImplementedError:
        if forced:
            raise
        logger.warning("%s: no preset fits, it is wrapped without one", kind, exc_info=True)
        return None
    logger.info("%s: preset for causal language models, %d layers", kind, len(sequential))
    return sequential


def _check_model(model: object) -> None:
    """Refuses models that would fail later in a way that is harder to read."""
    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"wrap_model_to_roundpipe(model=...): got {type(model).__name__}, expected an nn.Module")
    kind = type(model).__name__
    if isinstance(model, RoundPipe):
        raise ConfigError(f"the model is already wrapped (as {model.name!r}); use that wrapper")
    if "_orig_mod" in model._modules:
        raise ConfigError(
            f"the model is the result of torch.compile ({kind}); wrap the model itself (its ._orig_mod) instead"
        )
    if model._compiled_call_impl is not None:
        raise ConfigError(f"{kind}.compile() was called; wrap a model that is not compiled")
    refuse_unsuitable(model)


def _leave_out_checkpointing(model: nn.Module) -> None:
    """Of transformers: its blocks would be recomputed twice, and the preset's stand-ins for them have none of it."""
    disable = getattr(model, "gradient_checkpointing_disable", None)
    if callable(disable) and any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules()):
        disable()
        logger.info(
            "gradient checkpointing of %s is switched off: RoundPipe recomputes every stage but the last anyway",
            type(model).__name__,
        )


def _check_thresholds(lower: object, upper: object) -> None:
    for name, value, optional in (("lower_threshold", lower, False), ("upper_threshold", upper, True)):
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigTypeError(f"{name}={value!r}: expected a number of parameter elements (int)")
        if value < 0:
            raise ConfigError(f"{name}={value}: expected a number of parameter elements >= 0")
