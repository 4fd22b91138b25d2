"""Autograd of the data-plane copies: each direction is the other one's backward. Tickets carry no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from roundpipe import _library  # noqa: F401  the operators must be there

__all__: list[str] = []

_ops = torch.ops.roundpipe


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pass


def _remember_device(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.device = inputs[1].device


def _offload_start_backward(ctx: Any, grad: Tensor | None) -> None:
    return None


def _reload_start_backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
    return None, None


def _offload_wait_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
    return None, _ops.reload_wait(_ops.reload_start(grad, ctx.device), grad, ctx.device)


def _reload_wait_backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
    return None, _ops.offload_wait(_ops.offload_start(grad), grad), None


torch.library.register_autograd("roundpipe::offload_start", _offload_start_backward, setup_context=_no_context)
torch.library.register_autograd("roundpipe::reload_start", _reload_start_backward, setup_context=_no_context)
torch.library.register_autograd("roundpipe::offload_wait", _offload_wait_backward, setup_context=_remember_device)
torch.library.register_autograd("roundpipe::reload_wait", _reload_wait_backward, setup_context=_no_context)
