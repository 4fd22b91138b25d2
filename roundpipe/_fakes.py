"""Shapes, dtypes and devices of the data-plane operators' results, for meta and fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundpipe import _library  # noqa: F401  the operators must be there

__all__: list[str] = []


@torch.library.register_fake("roundpipe::host_empty")
def _host_empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _ticket() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.register_fake("roundpipe::offload_start")
def _offload_start(x: Tensor) -> Tensor:
    return _ticket()


@torch.library.register_fake("roundpipe::offload_wait")
def _offload_wait(ticket: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu")


@torch.library.register_fake("roundpipe::reload_start")
def _reload_start(host: Tensor, device: torch.device) -> Tensor:
    return _ticket()


@torch.library.register_fake("roundpipe::reload_wait")
def _reload_wait(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)
