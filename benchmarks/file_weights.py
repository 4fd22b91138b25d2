"""Models whose weights lie in one file, mapped, and what the system says about their pages.

A layer's weight is an equal share of the file. What it computes costs little, so that a call takes as long as its
weights need to come.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

_libc = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED = 4


class Looked(nn.Module):
    """Adds the first numbers of a frozen weight, scaled by a trained one: an adapter in its smallest form."""

    def __init__(self, weight: Tensor, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.scale * self.weight[: x.shape[-1]].to(x.dtype))


def make_file(path: Path, size_bytes: int) -> None:
    """Writes numbers of bfloat16 between -1 and 1, all the way to the disk."""
    piece = 1 << 24
    generator = torch.Generator().manual_seed(0)
    with open(path, "wb", buffering=0) as file:
        left = size_bytes
        while left > 0:
            block = torch.rand(min(piece, left) // 2, generator=generator).mul_(2).sub_(1).bfloat16()
            file.write(block.view(torch.uint8).numpy())
            left -= block.nbytes
        os.fsync(file.fileno())


def mapped_weights(path: Path, layers: int) -> list[Tensor]:
    """Equal parts of a private mapping of the file, bfloat16."""
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size // 2, dtype=torch.bfloat16)
    return list(whole.chunk(layers))


def drop_pages(path: Path, weights: list[Tensor]) -> None:
    """Nothing of the file stays in memory: its pages leave the process, then the page cache."""
    for weight in weights:
        begin = weight.data_ptr() // 4096 * 4096
        _libc.madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(weight.data_ptr() + weight.nbytes - begin), _MADV_DONTNEED
        )
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_bytes(weights: list[Tensor]) -> int:
    """How many bytes of the mapped weights are in memory, as mincore() says."""
    total = 0
    for weight in weights:
        begin = weight.data_ptr() // 4096 * 4096
        length = weight.data_ptr() + weight.nbytes - begin
        pages = torch.empty(-(-length // 4096), dtype=torch.uint8)
        if _libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_void_p(pages.data_ptr())) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        total += 4096 * int(pages.bitwise_and_(1).sum())
    return total


def read_rate(path: Path) -> float:
    """Bytes a second of reading the file from its beginning to its end, 16 MiB at a time, out of an empty cache."""
    buffer = bytearray(1 << 24)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        begin = time.perf_counter()
        total = 0
        while count := file.readinto(buffer):
            total += count
        return total / (time.perf_counter() - begin)
