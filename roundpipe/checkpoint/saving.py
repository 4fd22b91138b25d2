"""``roundpipe.save``."""

from __future__ import annotations

import functools
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..arguments import check_bool
from ..errors import CheckpointError, ConfigError, ConfigTypeError
from ..interrupts import uninterrupted
from ..model import RoundPipe
from . import disk, small_state
from .job import SaveHandle, SaveJob
from .manifest import INDEX_NAME, MANIFEST_NAME, index, manifest
from .names import names_of
from .optimizer_state import add_optimizer, check_optimizer
from .snapshot import KINDS, WEIGHTS, Snapshot, add_weights, settle
from .tensor_file import shards


def save(
    model: RoundPipe,
    optimizer: torch.optim.Optimizer | None,
    scaler: Any,
    directory: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    metadata: Any = None,
    rng_state: bool = True,
    trainable_only: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> SaveHandle:
    """Writes a checkpoint in the background.

    Waits for the calls and steps under way, and returns before the files are written. They hold the values as of this
    call, although training may go on at once: a step waits for what of its weights or state is still to be written,
    layer by layer (a step function: for all of its optimizer's state). Saving does not change training; what an
    asynchronous step left unpublished is saved as such. Gradients are not saved: call it after ``step``, and after
    ``scaler.update``.

    The directory appears when all is on the disk. It holds the weights under the names of the model's ``state_dict``,
    as safetensors with the index of transformers, and the model's configuration if it is one of transformers.

    Args:
        model: a wrapped model.
        optimizer: a compact optimizer of the model, or any torch optimizer built inside ``OptimizerCtx``; None: weights
            only.
        scaler: a GradScaler, or None.
        directory: where the checkpoint will be. It must not exist, or be empty, unless ``overwrite``.
        scheduler: one or a list of learning rate schedulers, or other objects with ``state_dict``.
        metadata: anything made of numbers, strings, tensors, lists, tuples and dictionaries; ``load`` returns it.
        rng_state: also save the states of torch's generators, of the CPU and of the model's GPUs, of Python's
            ``random`` and of numpy's.
        trainable_only: leave out weights that do not require grad, such as the base model of adapters.
        overwrite: replace a checkpoint that is there, once the new one is complete.
        max_shard_bytes: files are at most this large, but for a tensor that is larger by itself.

    Returns:
        A handle with ``wait()`` and ``done()``. One save of a model is written at a time: the next waits for it. What
        fails while writing is raised by ``wait()``, or by the next use of the model, as a CheckpointError.

    Raises:
        ConfigError, ConfigTypeError: an argument cannot be used.
        CheckpointError: the directory cannot be written, or there is not enough room on the disk.
        StageError, ...: something failed before, as from ``synchronize``.
    """
    target = _check_arguments(model, scaler, directory, max_shard_bytes)
    for name, value in (("rng_state", rng_state), ("trainable_only", trainable_only), ("overwrite", overwrite)):
        check_bool(f"save({name}=...)", value)
    stateful = small_state.schedulers(scheduler)
    with model._entered():
        state = model._state
        settle(state)
        if optimizer is not None:
            check_optimizer(model, optimizer)
        _check_target(target, overwrite)
        names = names_of(model._naming_model())
        snapshot = Snapshot()
        add_weights(snapshot, state, names, trainable_only)
        parts = {
            "optimizer": None if optimizer is None else add_optimizer(snapshot, model, optimizer, names),
            "scaler": None if scaler is None else small_state.scaler_state(scaler),
            "scheduler": [one.state_dict() for one in stateful],
            "random numbers": small_state.random_numbers() if rng_state else None,
            "metadata": metadata,
            "extra state of modules": names.extra,
        }
        layouts = {
            kind: shards(kind, {entry.name: entry.spec for entry in snapshot.entries(kind)}, max_shard_bytes)
            for kind in KINDS
        }
        others = {small_state.STATE_NAME: small_state.encoded(parts), INDEX_NAME: index(layouts[WEIGHTS])}
        others |= _configuration(model._naming_model())
        describe = functools.partial(manifest, layouts, others, trainable_only)
        size = sum(layout.size_bytes for made in layouts.values() for layout in made)
        size += sum(map(len, others.values())) + len(describe())
        beside, lock = _make_beside(target, size)
        engine = state.engine

        def progress() -> None:
            if engine is not None:
                engine.progress += 1  # a step that waits for the disk is no stall

        handle = SaveHandle(target)
        handle.covers = frozenset(map(id, names.parameters.values()))
        with uninterrupted():
            snapshot.hold_back(state)
            state.saving = handle
            last = MANIFEST_NAME, describe
            SaveJob(handle, beside, overwrite, snapshot.ordered(), layouts, others, last, progress, lock).start()
    return handle


def _check_arguments(model: object, scaler: object, directory: Any, max_shard_bytes: object) -> Path:
    if not isinstance(model, RoundPipe):
        raise ConfigTypeError(f"save(model=...): got {type(model).__name__}, expected a wrapped model (RoundPipe)")
    if scaler is not None:
        small_state.check_stateful("scaler", scaler)
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes={max_shard_bytes!r}: expected a whole number of bytes above 0")
    return path_of("save", directory)


def path_of(function: str, directory: Any) -> Path:
    if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
        raise ConfigTypeError(f"{function}(directory=...): got {directory!r}, expected the path of a directory")
    path = Path(os.path.realpath(directory))  # a link to a checkpoint stays, and what it leads to is replaced
    if not path.name:
        raise ConfigError(f"{function}(directory=...): {path} has no directory beside which a checkpoint is written")
    return path


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        try:
            filled = any(target.iterdir())
        except OSError as error:
            raise CheckpointError(f"{target} cannot be looked into: {error}") from error
        if filled and not overwrite:
            raise CheckpointError(f"{target} exists and is not empty; choose another directory, or pass overwrite=True")
        if filled and not (target / MANIFEST_NAME).exists():
            raise CheckpointError(f"{target} holds something else than a checkpoint, which save does not overwrite")
    elif os.path.lexists(target):
        raise CheckpointError(f"{target} exists and is no directory; choose another path")


def _make_beside(target: Path, size_bytes: int) -> tuple[Path, int]:
    """The directory that is written first, and the lock on it; see Note [Atomic checkpoints]."""
    beside = disk.place_beside(target, f"{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        os.makedirs(target.parent, exist_ok=True)
        disk.remove_leftovers(target)
        free = disk.free_bytes(target.parent)
        if free is not None and free < size_bytes:
            raise CheckpointError(
                f"the checkpoint needs {size_bytes:,} bytes, but {target.parent} has {free:,} bytes free; nothing was "
                "written. A checkpoint that is overwritten is removed only after the new one is complete."
            )
        disk.make_directory(beside)
        return beside, disk.lock(beside)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error


def _configuration(model: nn.Module) -> dict[str, bytes]:
    """Files by which from_pretrained of transformers knows the model."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return {}
    config: Any = model.config
    described = json.loads(config.to_json_string()) | {"architectures": [type(model).__name__]}
    found = {"config.json": (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()}
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        found["generation_config.json"] = generation.to_json_string().encode()
    return found
