"""What the constructors of wrappers check, and how a wrapper becomes the owner of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from . import steps_by_hand
from .arguments import check_compile, check_name, check_optim_dtype
from .call_site import call_site
from .errors import ConfigError, ConfigTypeError
from .host_placement import MODES as PIN_MODES
from .ownership import owners
from .processes import refuse_several_processes
from .run_config import RoundPipeRunConfig
from .unsuitable import refuse_unsuitable

if TYPE_CHECKING:
    from .model import RoundPipe


def check_arguments(
    model: object, optim_dtype: object, name: object, model_run_config: object, pin_model: object, compile: object
) -> RoundPipeRunConfig:
    """Raises for what cannot be wrapped; gives the configuration."""
    from .model import RoundPipe

    if not isinstance(model, nn.Module):
        raise ConfigTypeError(f"RoundPipe(model=...): got {type(model).__name__}, expected an nn.Module")
    if isinstance(model, RoundPipe):
        raise ConfigError(f"the model is already wrapped (as {model.name!r}); use that wrapper")
    for module in model.modules():
        if isinstance(module, RoundPipe):
            raise ConfigError(f"the model contains a wrapped model ({module.name!r}); unwrap it (use its .model) first")
    refuse_unsuitable(model)
    if pin_model not in PIN_MODES:
        raise ConfigError(f"pin_model={pin_model!r}: expected one of {', '.join(map(repr, PIN_MODES))}")
    check_optim_dtype(optim_dtype)
    check_compile(compile)
    check_name(name)
    config = RoundPipeRunConfig() if model_run_config is None else model_run_config
    if not isinstance(config, RoundPipeRunConfig):
        raise ConfigTypeError(f"model_run_config: got {type(config).__name__}, expected a RoundPipeRunConfig")
    return config


def claim_weights(wrapper: RoundPipe, name: str | None, parameters: list[tuple[str, nn.Parameter]]) -> None:
    """Makes ``wrapper`` the owner of the parameters and gives it its name."""
    refuse_several_processes()
    steps_by_hand.watch()
    wrapper.__dict__["name"] = name if name is not None else call_site()
    owners.claim(parameters, wrapper)
