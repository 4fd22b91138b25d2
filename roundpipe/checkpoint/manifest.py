"""``checkpoint.json``: what a directory must hold to be a whole checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import checksum, disk
from .snapshot import KINDS
from .tensor_file import FileLayout, TensorFile, TensorFiles

MANIFEST_NAME = "checkpoint.json"
INDEX_NAME = "model.safetensors.index.json"  # as transformers names it
_FORMAT = 1


def manifest(
    layouts: Mapping[str, Sequence[FileLayout]],
    others: Mapping[str, bytes],
    trainable_only: bool,
    checksums: Mapping[str, int] | None = None,
) -> bytes:
    """checksums: of all files by name; None: zeros, for a text of the same length."""
    from .. import __version__

    sizes = {layout.name: layout.size_bytes for made in layouts.values() for layout in made}
    sizes |= {name: len(data) for name, data in others.items()}
    return _json(
        {
            "format": _FORMAT,
            "roundpipe": __version__,
            "trainable_only": trainable_only,
            "files": {kind: [layout.name for layout in made] for kind, made in layouts.items()},
            "bytes": sizes,
            "crc32": {name: f"{0 if checksums is None else checksums[name]:08x}" for name in sizes},
        }
    )


def index(layouts: Sequence[FileLayout]) -> bytes:
    """Which file holds which weight, for the loading of transformers."""
    size = sum(layout.size_bytes - len(layout.header) for layout in layouts)
    return _json(
        {
            "metadata": {"total_size": size},
            "weight_map": {name: layout.name for layout in layouts for name in layout.offsets},
        }
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


@dataclass
class Contents:
    """A checkpoint whose files are all there, with good headers, of the right sizes and checksums."""

    trainable_only: bool
    kinds: dict[str, TensorFiles]


def open_checkpoint(directory: Path, verify: bool = True) -> Contents:
    """Raises CheckpointError when the directory is no checkpoint, or something of it is missing or damaged.

    verify: also read all files, for their checksums; those of a checkpoint that was written without any are taken as
    they are.
    """
    path = directory / MANIFEST_NAME
    try:
        found = json.loads(path.read_bytes())
        files, sizes = {kind: list(found["files"][kind]) for kind in KINDS}, dict(found["bytes"])
        checksums = {name: int(text, 16) for name, text in found.get("crc32", {}).items()}
        version, trainable_only = found["format"], bool(found["trainable_only"])
    except FileNotFoundError as error:
        previous = disk.previous_of(directory)
        kept = f" The checkpoint from before an interrupted save is whole in {previous}." if previous.exists() else ""
        raise CheckpointError(
            f"{directory} is no checkpoint of roundpipe.save: it has no {MANIFEST_NAME}.{kept} Weights alone are "
            "loaded by model.load_state_dict, or by from_pretrained before wrapping."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} is of format {version}, this version of roundpipe reads {_FORMAT}; install a newer"
        )
    kinds = {kind: TensorFiles([TensorFile(directory / n) for n in made]) for kind, made in files.items()}
    for name, size in sizes.items():
        present = (directory / name).stat().st_size if (directory / name).exists() else None
        if present != size:
            state = "missing" if present is None else f"cut off or changed: {present} bytes, expected {size}"
            raise CheckpointError(f"{directory / name} is {state}, so the checkpoint is incomplete")
    if verify:
        checksum.verify([(directory / name, wanted) for name, wanted in checksums.items()])
    return Contents(trainable_only, kinds)
