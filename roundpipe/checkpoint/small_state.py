"""The small things of a checkpoint, in one file: loss scale, schedulers, random numbers, the user's own data."""

from __future__ import annotations

import io
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from ..devices import devices
from ..engine import cpu_generator_lock
from ..errors import CheckpointError, ConfigError
from ..grad_scaler import GradScaler
from ..random_state import default_generator

logger = logging.getLogger(__name__)

STATE_NAME = "state.pt"
# What torch.load reads without running code from the file may raise any of these for a damaged one.
_DAMAGED = (OSError, RuntimeError, EOFError, ValueError, LookupError, AttributeError, TypeError, UnpicklingError)


def encoded(parts: Mapping[str, Any]) -> bytes:
    """The file's bytes.

    Raises ConfigError for an object that could not be loaded without running code from the file.
    """
    for name, part in parts.items():
        try:
            _load(_dump(part))
        except Exception as error:
            raise ConfigError(
                f"{name} holds something that is no number, string, tensor, list, tuple or dictionary of these, so it "
                f"could not be loaded safely: {error}"
            ) from error
    return _dump(dict(parts))


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def read(directory: Path) -> dict[str, Any]:
    path = directory / STATE_NAME
    try:
        found = _load(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, so the checkpoint is incomplete") from error
    except _DAMAGED as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not the file of a checkpoint: it holds a {type(found).__name__}")
    return found


# -- random numbers ----------------------------------------------------------------------------------------------------
def random_numbers() -> dict[str, Any]:
    """Of torch's CPU generator, from which calls draw their seeds, of those of the engine's GPUs, of Python's random,
    and of numpy's if it is used.
    """
    with cpu_generator_lock:  # layers compute under seeds of their own
        found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    found["devices"] = [generator.get_state() for generator in _device_generators()]
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = [str(name), torch.tensor(keys.tolist(), dtype=torch.int64), *(float(x) for x in rest)]
    return found


def set_random_numbers(found: Mapping[str, Any]) -> None:
    """Of another number of devices the first ones are set; a checkpoint of simulated devices has none."""
    with cpu_generator_lock:
        torch.set_rng_state(found["torch"])
        random.setstate(found["python"])
    _set_device_generators(found.get("devices", []))
    if "numpy" in found:
        try:
            import numpy
        except ImportError:
            return
        name, keys, position, has_gauss, gauss = found["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), int(position), int(has_gauss), gauss))


def _device_generators() -> list[torch.Generator]:
    """In the engine's order, of each GPU once. Simulated devices have none beside the CPU's."""
    return [
        default_generator(device) for device in dict.fromkeys(one.device for one in devices()) if device.type != "cpu"
    ]


def _set_device_generators(states: Sequence[torch.Tensor]) -> None:
    generators = _device_generators()
    if states and len(states) != len(generators):
        logger.warning(
            "the checkpoint has the random numbers of %d devices, this run has %d: of the first %d they go on, the "
            "others draw as they would have. What layers draw does not depend on it.",
            len(states),
            len(generators),
            min(len(states), len(generators)),
        )
    for generator, state in zip(generators, states, strict=False):
        try:
            generator.set_state(state)
        except (RuntimeError, TypeError) as error:
            logger.warning(
                "the random numbers of %s are not of its kind and were left out: %s", generator.device, error
            )


# -- objects with a state dict -----------------------------------------------------------------------------------------
def scaler_state(scaler: Any) -> dict[str, Any]:
    """Waits for updates under way."""
    state = dict(scaler.state_dict())
    if isinstance(scaler, GradScaler):
        state["views"] = scaler.views()
    return state


def load_scaler(scaler: Any, state: Mapping[str, Any]) -> None:
    given = dict(state)
    views = given.pop("views", None)
    scaler.load_state_dict(given)
    if views and isinstance(scaler, GradScaler):
        scaler.set_views(views)


def schedulers(given: Any) -> list[Any]:
    """``scheduler=`` as a list. Raises ConfigError for what has no state dict."""
    made = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for one in made:
        check_stateful("scheduler", one)
    return made


def check_stateful(what: str, value: Any) -> None:
    if not (callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))):
        raise ConfigError(f"{what}: got {type(value).__name__}, expected an object with state_dict and load_state_dict")
