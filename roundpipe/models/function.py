"""Linear projection and causal cross entropy in one step, a chunk of tokens at a time.

Shape legend: S sequence, T tokens of all sequences, H hidden size, V vocabulary.

The work is `linear_cross_entropy`'s; here labels are shifted as causal language models want it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roundpipe.models.linear_cross_entropy import (
    default_chunk_tokens,
    linear_cross_entropy,
    loss_sum_and_gradients,
    scaled,
)

__all__ = [
    "ChunkedCompileLinearForCausalLMLoss",
    "causal_lm_loss",
    "default_chunk_tokens",
    "linear_cross_entropy",
]


def _shift(labels: Tensor, ignore_index: int) -> Tensor:
    return torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


class ChunkedCompileLinearForCausalLMLoss(torch.autograd.Function):
    """`apply(hidden_states, weight, labels, bias=None, num_items_in_batch=None, ignore_index=-100,
    shift_labels=None, chunk_tokens=None, softcap=0.0)` -> scalar fp32 loss.

    hidden_states: [..., S, H] floating point, the input of the output projection. weight: [V, H]; bias: [V] or None.
    labels: [..., S] int64, the tokens themselves: position s is scored on labels[..., s + 1], the last position on
    nothing. shift_labels: the same shape, already shifted; then labels may be None. Positions whose label is
    `ignore_index` count nowhere. The loss is the mean over the counted positions, or their sum divided by
    `num_items_in_batch` (number or 0-dim tensor). chunk_tokens: tokens per chunk (default: from V).
    softcap: when not 0, logits become `softcap * tanh(logits / softcap)`.

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
        softcap=0.0,
    ):
        targets = _shift(labels, ignore_index) if shift_labels is None else shift_labels
        if targets.shape != hidden_states.shape[:-1]:
            raise ValueError(
                f"ChunkedCompileLinearForCausalLMLoss: labels have shape {tuple(targets.shape)}, expected "
                f"{tuple(hidden_states.shape[:-1])}, the shape of hidden_states without its last dimension"
            )
        targets_T = targets.reshape(-1).to(device=hidden_states.device, dtype=torch.int64)
        device_type = hidden_states.device.type
        dtype = hidden_states.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        # Traced by a compiler, the loop over the chunks stays one node of the graph.
        run = torch.ops.roundpipe.linear_cross_entropy if torch.compiler.is_compiling() else loss_sum_and_gradients
        total, *gradients = run(
            hidden_states.detach().reshape(-1, weight.shape[1]).to(dtype),
            weight.detach().to(dtype),
            targets_T,
            None if bias is None else bias.detach().to(dtype),
            ignore_index=ignore_index,
            softcap=softcap,
            chunk_tokens=chunk_tokens or 0,
            needs_hidden=ctx.needs_input_grad[0],
            needs_weight=ctx.needs_input_grad[1],
            needs_bias=bias is not None and ctx.needs_input_grad[3],
        )

        # The gradients stay those of the sum until backward knows its factor: in fp16 a mean over many tokens would
        # underflow before a gradient scaler could lift it.
        if num_items_in_batch is None:
            scale = (targets_T != ignore_index).sum().to(total.dtype).reciprocal()
        elif isinstance(num_items_in_batch, Tensor):
            scale = num_items_in_batch.detach().to(total).reciprocal()
        else:
            scale = torch.full_like(total, 1.0 / num_items_in_batch)
        ctx.save_for_backward(*gradients, scale)
        ctx.dtypes = (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.hidden_shape = hidden_states.shape
        return total * scale

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output):
        *gradients, scale = ctx.saved_tensors
        factor = grad_output * scale
        needed = (ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        hidden, weight, bias = (
            scaled(grad, factor, dtype) if need else None
            for grad, dtype, need in zip(gradients, ctx.dtypes, needed, strict=True)
        )
        if hidden is not None:
            hidden = hidden.view(ctx.hidden_shape)
        return hidden, weight, None, bias, None, None, None, None, None


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
    softcap: float = 0.0,
) -> Tensor:
    """`ChunkedCompileLinearForCausalLMLoss` with keyword arguments; see there for shapes and meaning."""
    return ChunkedCompileLinearForCausalLMLoss.apply(
        hidden_states, weight, labels, bias, num_items_in_batch, ignore_index, shift_labels, chunk_tokens, softcap
    )
