"""The bytes of a tensor as a file wants them, piece by piece, without a copy of the tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

CHUNK_BYTES = 8 << 20  # of the buffer that conversions and reorderings go through, and of one write


def chunks(tensor: torch.Tensor, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> Iterator[torch.Tensor]:
    """Contiguous tensors of at most about ``chunk_bytes`` whose bytes, one after the other, are ``tensor`` as ``dtype``
    in row-major order. Views of its memory where it is stored so; otherwise copies, one at a time.
    """
    if not tensor.numel():
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        step = max(1, chunk_bytes // max(dtype.itemsize, tensor.element_size()))
        for begin in range(0, flat.numel(), step):
            yield flat[begin : begin + step].to(dtype).resolve_conj().resolve_neg()
        return
    row_bytes = tensor[0].numel() * max(dtype.itemsize, tensor.element_size())
    rows = chunk_bytes // row_bytes
    if rows:
        for begin in range(0, tensor.shape[0], rows):
            yield tensor[begin : begin + rows].to(dtype).contiguous().resolve_conj().resolve_neg()
    else:
        for row in tensor:
            yield from chunks(row, dtype, chunk_bytes)


def bytes_of(contiguous: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor, which the caller keeps alive."""
    size = contiguous.numel() * contiguous.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(contiguous.data_ptr())).cast("B")
