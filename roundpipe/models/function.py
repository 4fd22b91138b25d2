"""Linear projection and causal cross entropy in one step, a chunk of tokens at a time.

Shape legend: B batch, S sequence, T = B*S tokens, C tokens of one chunk, H hidden size, V vocabulary.

With a vocabulary of 150,000 the logits of one long sequence outweigh everything else a microbatch holds. Here only
[C, V] of them exist at any time: the forward pass walks over the tokens, and since the loss is the last thing that is
computed, it takes the gradients on the same walk; the backward pass only scales them.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["ChunkedCompileLinearForCausalLMLoss", "causal_lm_loss", "default_chunk_tokens"]

_CHUNK_ELEMENTS = 1 << 28
"""Logits of one chunk: 0.5 GiB in bf16 and 1 GiB in fp32, large enough to keep a GPU's matrix units busy."""

_CPU_CHUNK_ELEMENTS = 1 << 23
"""The same on a CPU, where a chunk that stays in the caches is quicker."""


def default_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens of a chunk for a vocabulary of this size: a multiple of 256 (64 on a CPU), at least one multiple."""
    elements, step = (_CPU_CHUNK_ELEMENTS, 64) if device.type == "cpu" else (_CHUNK_ELEMENTS, 256)
    return max(step, elements // max(vocabulary, 1) // step * step)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _loss_and_grad(logits_CV: Tensor, labels_C: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Sum of the chunk's token losses (fp32) and its gradient with respect to the logits (their dtype)."""
    valid_C1 = (labels_C != ignore_index).unsqueeze(1)
    index_C1 = labels_C.unsqueeze(1).masked_fill(~valid_C1, 0)
    logits = logits_CV.to(_wide(logits_CV.dtype))
    log_sum_C1 = torch.logsumexp(logits, dim=1, keepdim=True)
    loss_C1 = (log_sum_C1 - logits.gather(1, index_C1)) * valid_C1
    is_label = torch.arange(logits.shape[1], device=logits.device) == index_C1
    grad_CV = (torch.exp(logits - log_sum_C1) - is_label.to(logits.dtype)) * valid_C1
    return loss_C1.sum(), grad_CV.to(logits_CV.dtype)


def _loss_and_grad_in_place(logits_CV: Tensor, labels_C: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """`_loss_and_grad` for eager execution: one fp32 buffer, overwritten."""
    valid_C1 = (labels_C != ignore_index).unsqueeze(1)
    index_C1 = labels_C.unsqueeze(1).masked_fill(~valid_C1, 0)
    buffer = logits_CV.to(_wide(logits_CV.dtype), copy=True)
    label_logit_C1 = buffer.gather(1, index_C1)
    log_sum_C1 = torch.logsumexp(buffer, dim=1, keepdim=True)
    loss = ((log_sum_C1 - label_logit_C1) * valid_C1).sum()
    buffer.sub_(log_sum_C1).exp_()
    buffer.scatter_add_(1, index_C1, torch.full_like(label_logit_C1, -1.0))
    buffer.mul_(valid_C1)
    return loss, buffer.to(logits_CV.dtype)


class _ChunkKernel:
    """Chooses between the compiled and the eager form once, and falls back when no compiler works here."""

    def __init__(self) -> None:
        self._compiled: Callable | None = None
        self._unusable = False
        # Guards the two fields above: device workers reach their first chunk at about the same time.
        self._lock = threading.Lock()

    def __call__(self, logits: Tensor, labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        # On a CPU compiling takes longer than it saves in most runs.
        off = self._unusable or logits.device.type == "cpu" or os.environ.get("RPP_DISABLE_TORCH_COMPILE") == "1"
        if off or torch.compiler.is_compiling():
            return _loss_and_grad_in_place(logits, labels, ignore_index)
        with self._lock:
            if self._compiled is None:
                self._compiled = torch.compile(_loss_and_grad)
        try:
            return self._compiled(logits, labels, ignore_index)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any failure of a compiler stack: the eager form gives the same numbers
            self._unusable = True
            warnings.warn(
                f"roundpipe: the loss could not be compiled ({type(error).__name__}: {error}); it runs eagerly, a "
                "little slower. RPP_DISABLE_TORCH_COMPILE=1 silences this warning.",
                RuntimeWarning,
                stacklevel=2,
            )
            return _loss_and_grad_in_place(logits, labels, ignore_index)


_chunk_kernel = _ChunkKernel()


def _chunk_loss(logits_CV: Tensor, labels_C: Tensor, ignore_index: int) -> Tensor:
    logits = logits_CV.to(_wide(logits_CV.dtype))
    return torch.nn.functional.cross_entropy(logits, labels_C, ignore_index=ignore_index, reduction="sum")


@functools.cache
def _adds_into_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device multiplies matrices of `dtype` and adds the product to an fp32 matrix in one call."""
    if device.type == "cpu":
        return False
    small = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, small, small, torch.float32, out=total)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True


def _accumulate_weight_grad(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    """total += grad^T @ hidden, rounded to fp32 only, whatever the inputs' dtype."""
    if grad_CV.dtype == total_VH.dtype:
        total_VH.addmm_(grad_CV.t(), hidden_CH)
    elif _adds_into_fp32(grad_CV.dtype, grad_CV.device):
        torch.ops.aten.addmm.dtype_out(total_VH, grad_CV.t(), hidden_CH, torch.float32, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.t().float(), hidden_CH.float())


def _shift(labels: Tensor, ignore_index: int) -> Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class ChunkedCompileLinearForCausalLMLoss(torch.autograd.Function):
    """`apply(hidden_states, weight, labels, bias=None, num_items_in_batch=None, ignore_index=-100,
    shift_labels=None, chunk_tokens=None)` -> scalar fp32 loss.

    hidden_states: [..., S, H] floating point, the input of the output projection. weight: [V, H]; bias: [V] or None.
    labels: [..., S] int64, the tokens themselves: position s is scored on labels[..., s + 1], the last position on
    nothing. shift_labels: the same shape, already shifted; then labels may be None. Positions whose label is
    `ignore_index` count nowhere. The loss is the mean over the counted positions, or their sum divided by
    `num_items_in_batch` (number or 0-dim tensor). chunk_tokens: tokens per chunk (default: from V).

    Logits are computed in the dtype of the inputs (or of autocast) and reduced in fp32; the gradient of `weight` is
    summed over the chunks in fp32. On a GPU the chunk's arithmetic is compiled unless RPP_DISABLE_TORCH_COMPILE=1.
    Nothing waits for the device. Differentiable once.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states,
        weight,
        labels,
        bias=None,
        num_items_in_batch=None,
        ignore_index=-100,
        shift_labels=None,
        chunk_tokens=None,
    ):
        targets = _shift(labels, ignore_index) if shift_labels is None else shift_labels
        if targets.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"ChunkedCompileLinearForCausalLMLoss: labels have shape {tuple(targets.shape)}, expected "
                f"{tuple(hidden_states.shape[:-1])}, the shape of hidden_states without its last dimension"
            )
        vocabulary, width = weight.shape
        targets_T = targets.reshape(-1).to(device=hidden_states.device, dtype=torch.int64)
        device_type = hidden_states.device.type
        dtype = hidden_states.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        hidden_TH = hidden_states.reshape(-1, width).to(dtype)
        weight_VH = weight.to(dtype)
        bias_V = None if bias is None else bias.to(dtype)
        tokens = hidden_TH.shape[0]
        chunk = chunk_tokens or default_chunk_tokens(vocabulary, hidden_states.device)

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        needs_bias = bias is not None and ctx.needs_input_grad[3]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        grad_weight_VH = weight.new_zeros(weight.shape, dtype=_wide(dtype)) if needs_weight else None
        grad_bias_V = weight.new_zeros(vocabulary, dtype=_wide(dtype)) if needs_bias else None
        any_grad = needs_hidden or needs_weight or needs_bias

        total = torch.zeros((), dtype=_wide(dtype), device=hidden_states.device)
        with torch.autocast(device_type, enabled=False):
            for begin in range(0, tokens, chunk):
                part = slice(begin, min(begin + chunk, tokens))
                logits_CV = torch.nn.functional.linear(hidden_TH[part], weight_VH, bias_V)
                if not any_grad:
                    total += _chunk_loss(logits_CV, targets_T[part], ignore_index)
                    continue
                loss, grad_CV = _chunk_kernel(logits_CV, targets_T[part], ignore_index)
                del logits_CV
                total += loss
                if needs_hidden:
                    torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
                if needs_weight:
                    _accumulate_weight_grad(grad_weight_VH, grad_CV, hidden_TH[part])
                if needs_bias:
                    grad_bias_V += grad_CV.sum(0, dtype=grad_bias_V.dtype)

        # The gradients stay those of the sum until backward knows its factor: in fp16 a mean over many tokens would
        # underflow before a gradient scaler could lift it.
        if num_items_in_batch is None:
            scale = (targets_T != ignore_index).sum().to(total.dtype).reciprocal()
        elif isinstance(num_items_in_batch, Tensor):
            scale = num_items_in_batch.detach().to(total).reciprocal()
        else:
            scale = torch.full_like(total, 1.0 / num_items_in_batch)
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH, grad_bias_V, scale)
        ctx.dtypes = (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.hidden_shape = hidden_states.shape
        return total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        grad_hidden, grad_weight, grad_bias, scale = ctx.saved_tensors
        factor = grad_output * scale
        scaled = [
            None if grad is None else torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))
            for grad, dtype in zip((grad_hidden, grad_weight, grad_bias), ctx.dtypes, strict=True)
        ]
        if scaled[0] is not None:
            scaled[0] = scaled[0].view(ctx.hidden_shape)
        return scaled[0], scaled[1], None, scaled[2], None, None, None, None


def causal_lm_loss(
    hidden_states: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    *,
    bias: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """`ChunkedCompileLinearForCausalLMLoss` with keyword arguments; see there for shapes and meaning."""
    return ChunkedCompileLinearForCausalLMLoss.apply(
        hidden_states, weight, labels, bias, num_items_in_batch, ignore_index, shift_labels, chunk_tokens
    )
