"""Files of tensors in the safetensors format, laid out before they are written and mapped when they are read.

Note [safetensors]
  A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, and where its
  bytes begin and end behind the header; "__metadata__" holds strings), and the bytes of all tensors, row-major, without
  gaps. The library's writer wants all tensors at once; we need to write them one by one, in any order, while training
  goes on. Its reader copies a tensor before that can be copied to where it belongs, and a plain training loop would
  need the library for this alone. So the few lines of the format stand here; that the library reads what we write, and
  we what it writes, is tested. Tensors of wide elements come first, which aligns all.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import CheckpointError, ConfigError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_LONGEST_HEADER_BYTES = 100_000_000  # the library reads no longer one


@dataclass(frozen=True)
class Spec:
    """What a tensor in a file is: dtype and sizes."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


@dataclass(frozen=True)
class FileLayout:
    """A file that is to be written: its first bytes, where each tensor begins (byte offsets), and its size in bytes."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size_bytes: int


def lay_out(name: str, tensors: Mapping[str, Spec], metadata: Mapping[str, str]) -> FileLayout:
    """Raises ConfigError for a dtype that the format does not have."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    begins, end = {}, 0
    for tensor, spec in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        if spec.dtype not in _CODES:
            raise ConfigError(f"{tensor!r} is {spec}, a dtype that the safetensors format does not have")
        begins[tensor] = end
        end += spec.nbytes
        described[tensor] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[tensor], end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return FileLayout(name, header, {n: len(header) + begin for n, begin in begins.items()}, len(header) + end)


def shards(stem: str, tensors: Mapping[str, Spec], most_bytes: int) -> list[FileLayout]:
    """Files named as those of transformers, in the order of the tensors; one larger than ``most_bytes`` has its own."""
    parts: list[dict[str, Spec]] = []
    size = 0
    for name, spec in tensors.items():
        if not parts or size + spec.nbytes > most_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = spec
        size += spec.nbytes
    return [
        lay_out(f"{stem}-{i + 1:05d}-of-{len(parts):05d}.safetensors", part, {"format": "pt"})
        for i, part in enumerate(parts)
    ]


class TensorFile:
    """A file that is read: header checked at once, tensors mapped when they are asked for.

    Raises CheckpointError for a file that is missing, cut off or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.specs: dict[str, Spec] = {}
        self._begins: dict[str, int] = {}
        self._mapping: mmap.mmap | None = None
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                self._read_header(file.read(8), file, size)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing, so the checkpoint is incomplete") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _read_header(self, prefix: bytes, file: object, size: int) -> None:
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 <= length <= min(size - 8, _LONGEST_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path} ({size} bytes) is cut off or no safetensors file: its header is not there"
            )
        try:
            described = json.loads(file.read(length))  # type: ignore[attr-defined]
            described.pop("__metadata__", None)
            end = 0
            for name, one in sorted(described.items(), key=lambda item: tuple(item[1]["data_offsets"])):
                spec = Spec(_DTYPES[one["dtype"]], tuple(one["shape"]))
                begin, stop = one["data_offsets"]
                if begin != end or stop - begin != spec.nbytes:
                    raise ValueError(f"the bytes of {name!r} are not where they should be")
                self.specs[name], self._begins[name], end = spec, 8 + length + begin, stop
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} has a header that is no valid one of the format: {error}") from error
        if size != 8 + length + end:
            raise CheckpointError(
                f"{self.path} has {size} bytes, but its header says {8 + length + end}: it was cut off or written over"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor over the mapped file: to be read, not kept. Pages come from the disk when they are read."""
        spec = self.specs[name]
        if not spec.nbytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        if self._mapping is None:
            with open(self.path, "rb") as file:
                # A private mapping, because torch warns of memory that it may not write.
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        count = spec.nbytes // spec.dtype.itemsize
        flat = torch.frombuffer(self._mapping, dtype=spec.dtype, count=count, offset=self._begins[name])
        return flat.view(spec.shape)

    def release(self) -> None:
        """Forgets the mapping; it goes with the last tensor over it."""
        self._mapping = None


class TensorFiles:
    """Several files as one collection of tensors by name."""

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.files = list(files)
        self._of = {name: file for file in files for name in file.specs}

    @property
    def specs(self) -> dict[str, Spec]:
        return {name: file.specs[name] for name, file in self._of.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def tensor(self, name: str) -> torch.Tensor:
        return self._of[name].tensor(name)
