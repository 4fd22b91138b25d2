"""A GPU's choice of kernels for tensors that have no values, so that its memory can be estimated without one.

Note [Kernels of a GPU]
  What a layer keeps depends on the kernels behind it. A run on fake tensors of the CPU would take the CPU's. In here
  those few functions for which a GPU has kernels of its own stand in: they save and return what the GPU's do, and take
  what those take for a moment.
    attention: flash for 16-bit floats without a mask, the memory-efficient one with a mask or in float32, else the
      plain formula; torch's own order. Backward of both adds up the queries' gradients in float32, and makes keys'
      and values' gradients for every query head before it sums those of a group (FlashAttention-2, Dao 2023, and
      torch's mha_bwd).
    RMS norm: one kernel, which keeps one number a row; the CPU's formula keeps several copies of its input.
    cross entropy in chunks: compiled, a chunk's logits and their gradient and nothing else.
  Values are never computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .models import linear_cross_entropy

__all__ = ["kernels_of"]

_FLASH_HEAD_DIM = 256
_HALF = (torch.float16, torch.bfloat16)


class _Attention(torch.autograd.Function):
    """Shapes: q [B, N, S, D], k and v [B, K, T, D]; the result lies in memory as [B, S, N, D]."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:  # type: ignore[override]
        if mask is None and q.dtype in _HALF:
            out, log_sums = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[:2]
        else:
            out, log_sums = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True)[:2]
        ctx.save_for_backward(q, k, v, out, log_sums, *(() if mask is None else (mask,)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v = ctx.saved_tensors[:3]
        sums = q.new_empty(q.shape, dtype=torch.float32)
        rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        if k.shape[1] != q.shape[1]:
            each = [x.new_empty(x.shape[0], q.shape[1], *x.shape[2:]) for x in (k, v)]
            del each
        del sums, rows
        return (*grads, None)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, dims: int) -> torch.Tensor:  # type: ignore[override]
        scale = x.new_empty(x.shape[: x.dim() - dims], dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


class _GpuKernels(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stand_in = _STAND_INS.get(func)
        if stand_in is not None:
            result = stand_in(*args, **kwargs)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """None: the plain formula."""
    if query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return None
    flash = attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _FLASH_HEAD_DIM
    efficient = query.dtype in (*_HALF, torch.float32) and key.shape[1] == query.shape[1]
    if not (flash or efficient):
        return None
    return _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call, no-any-return]


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    if weight is not None and weight.dtype != input.dtype:
        return None
    return _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call, no-any-return]


_STAND_INS: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
}


@contextlib.contextmanager
def kernels_of(kind: str) -> Iterator[None]:
    """On this thread, in here: ``"cuda"``, or ``"host"`` (the CPU's own, which fake tensors take anyway)."""
    if kind != "cuda":
        yield
        return
    with linear_cross_entropy.chunks_of("cuda"), _GpuKernels():
        yield
