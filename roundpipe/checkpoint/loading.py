"""``roundpipe.load``."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..arguments import check_bool
from ..errors import CheckpointError, CheckpointMismatch, ConfigTypeError
from ..grad_scaler import GradScaler
from ..model import RoundPipe
from . import small_state
from .job import wait_for_saves_to
from .manifest import Contents, open_checkpoint
from .names import ModelNames, names_of
from .optimizer_load import OptimizerLoad
from .optimizer_state import check_optimizer
from .saving import path_of
from .snapshot import OPTIMIZER, PREVIOUS, WEIGHTS
from .tensor_file import Spec, TensorFiles


def load(
    model: RoundPipe,
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    directory: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    rng_state: bool | None = None,
    verify: bool = True,
) -> Any:
    """Loads a checkpoint of ``save``; training then goes on as it would have from there, bit for bit.

    Waits for everything under way first, a save to this directory too. Weights, the optimizer's copies of them and its
    state are overwritten in place; gradients that had accumulated are dropped. All headers, sizes and checksums are
    checked before anything is written. With an optimizer, what an asynchronous step had left unpublished is unpublished
    again: ``model.synchronize()`` brings the newest weights to the host, as in training. Without one, the newest
    weights are loaded.

    Args:
        model: wrapped, with the names, shapes and dtypes of the saved one.
        optimizer: with the same groups as the saved one; of the same kind (AdamW, ...), but it may keep its masters and
            moments in other formats, or be compact where the saved one was not. None: weights only.
        scaler: a GradScaler, or None.
        scheduler: as given to ``save``.
        rng_state: also set the random numbers; default: if there is an optimizer and they were saved. Those of GPUs go
            to the GPUs in their order, as far as there are as many now.
        verify: read every file to its end first and compare its checksum. False spares that reading.

    Returns:
        What was given to ``save`` as ``metadata``.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged.
        CheckpointMismatch: it belongs to another model, optimizer, scaler or scheduler. In both cases nothing has
            changed.
        ConfigError, ConfigTypeError: an argument cannot be used.
    """
    if not isinstance(model, RoundPipe):
        raise ConfigTypeError(f"load(model=...): got {type(model).__name__}, expected a wrapped model (RoundPipe)")
    if scaler is not None:
        small_state.check_stateful("scaler", scaler)
    path = path_of("load", directory)
    if rng_state is not None and not isinstance(rng_state, bool):
        raise ConfigTypeError(f"load(rng_state=...): got {rng_state!r}, expected True, False or None")
    check_bool("load(verify=...)", verify)
    stateful = small_state.schedulers(scheduler)
    wait_for_saves_to(path)
    contents = open_checkpoint(path, verify)
    small = small_state.read(path)
    # In inference mode a write counts no version, by which everything else notices it.
    with model._entered(), torch.inference_mode(False):
        model.synchronize()
        model._state.wait_saved()
        if optimizer is not None:
            check_optimizer(model, optimizer)
        names = names_of(model._naming_model())
        _check_weights(contents, names)
        plan = None
        if optimizer is not None:
            if small.get("optimizer") is None:
                raise CheckpointMismatch(
                    f"{path} holds no optimizer state; load it with optimizer=None, or save with one"
                )
            plan = OptimizerLoad(model, optimizer, names, small["optimizer"], contents.kinds[OPTIMIZER])
        _check_small(small, scaler, stateful, rng_state)

        for one, state in zip(stateful, small["scheduler"] if stateful else (), strict=True):
            one.load_state_dict(state)
        if scaler is not None:
            small_state.load_scaler(scaler, small["scaler"])
        try:
            _load_weights(model, names, contents.kinds[WEIGHTS], small["extra state of modules"])
            if plan is not None:
                plan.apply()
                model.zero_grad()
                plan.restore_pending(contents.kinds[PREVIOUS])
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be read to its end, so the model holds a part of it: {error}"
            ) from error
        if rng_state or (rng_state is None and optimizer is not None and small.get("random numbers")):
            small_state.set_random_numbers(small["random numbers"])
    return small["metadata"]


def _check_weights(contents: Contents, names: ModelNames) -> None:
    saved = contents.kinds[WEIGHTS].specs
    own = {**names.parameters, **names.buffers, **names.derived}
    needed = {
        name
        for name, tensor in own.items()
        if not contents.trainable_only or name not in names.parameters or tensor.requires_grad
    }
    problems = []
    if missing := sorted(needed - saved.keys()):
        problems.append(f"it lacks {_some(missing)}")
    if unknown := sorted(saved.keys() - own.keys()):
        problems.append(f"the model has no {_some(unknown)}")
    for name, tensor in own.items():
        spec = Spec(tensor.dtype, tuple(tensor.shape))
        if name in saved and saved[name] != spec:
            problems.append(f"{name!r} is {saved[name]}, in the model {spec}")
    if problems:
        more = f" (and {len(problems) - 5} more differences)" if len(problems) > 5 else ""
        raise CheckpointMismatch(
            "the checkpoint does not fit the model: "
            + "; ".join(problems[:5])
            + more
            + ". Nothing was loaded; build the "
            "model as it was when the checkpoint was saved, in the same dtype."
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _check_small(small: dict[str, Any], scaler: Any, stateful: list[Any], rng_state: bool | None) -> None:
    if scaler is not None:
        state = small.get("scaler")
        if state is None:
            raise CheckpointMismatch("the checkpoint holds no scaler; load it with scaler=None, or save with one")
        try:
            if isinstance(scaler, GradScaler):
                small_state.load_scaler(GradScaler(enabled=scaler.is_enabled()), state)
        except ValueError as error:
            raise CheckpointMismatch(f"the scaler of the checkpoint cannot be loaded: {error}") from error
    if stateful and len(stateful) != len(small["scheduler"]):
        raise CheckpointMismatch(
            f"the checkpoint holds {len(small['scheduler'])} schedulers, but {len(stateful)} were given to load"
        )
    if rng_state and not small.get("random numbers"):
        raise CheckpointMismatch("the checkpoint was saved with rng_state=False, so it has no random numbers to load")


def _load_weights(model: RoundPipe, names: ModelNames, files: TensorFiles, extra: dict[str, Any]) -> None:
    own = {**names.parameters, **names.buffers}
    derived: dict[str, Any] = dict(extra)
    with torch.no_grad():
        for file in files.files:  # file by file, so that not all are mapped at once
            for name in file.specs:
                if name in own:
                    own[name].copy_(file.tensor(name))
                else:
                    derived[name] = file.tensor(name).clone()
            file.release()
    if derived:
        model._naming_model().load_state_dict(derived, strict=False)
    model._state.adopt_edits()  # the optimizer's copies follow
