"""Linear projection and cross entropy in one operator, a chunk of tokens at a time.

Shape legend: T tokens, C tokens of one chunk, H hidden size, V vocabulary (classes).

With a vocabulary of 150,000 the logits of one long sequence outweigh everything else a microbatch holds. Here only
[C, V] of them exist at any time: the forward pass walks over the tokens, and since the loss is the last thing that is
computed, it takes the gradients on the same walk; the backward pass only scales them. The schema stands in
csrc/ops/schemas.h; the implementation is here because a compiler of torch's, where there is one, fuses a chunk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from roundpipe import _library  # noqa: F401  the operator must be there
from roundpipe.compiled import DeviceCodes
from roundpipe.errors import ConfigError

__all__ = ["default_chunk_tokens", "linear_cross_entropy", "loss_sum_and_gradients", "scaled"]

_CHUNK_ELEMENTS = 1 << 28
"""Logits of one chunk: 0.5 GiB in bf16 and 1 GiB in fp32, large enough to keep a GPU's matrix units busy."""

_CPU_CHUNK_ELEMENTS = 1 << 23
"""The same on a CPU, where a chunk that stays in the caches is quicker."""


_estimated = threading.local()


@contextlib.contextmanager
def chunks_of(device_type: str) -> Iterator[None]:
    """On this thread, in here, tensors without values are taken to be on a device of this type: chunks have its size,
    and a chunk's arithmetic takes the memory that it takes there."""
    before = getattr(_estimated, "device_type", None)
    _estimated.device_type = device_type
    try:
        yield
    finally:
        _estimated.device_type = before


def _kind(device: torch.device) -> str:
    return getattr(_estimated, "device_type", None) or device.type


def _is_fake(tensor: Tensor) -> bool:
    """Whether only the tensor's size matters: a run that counts memory, outside of any compiler."""
    return type(tensor).__name__ == "FakeTensor" and not torch.compiler.is_compiling()


def default_chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens of a chunk for a vocabulary of this size: a multiple of 256 (64 on a CPU), at least one multiple."""
    elements, step = (_CPU_CHUNK_ELEMENTS, 64) if _kind(device) == "cpu" else (_CHUNK_ELEMENTS, 256)
    return max(step, elements // max(vocabulary, 1) // step * step)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cap(logits: Tensor, softcap: float) -> Tensor:
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def _loss_and_grad(logits_CV: Tensor, labels_C: Tensor, ignore_index: int, softcap: float) -> tuple[Tensor, Tensor]:
    """Sum of the chunk's token losses (fp32) and its gradient with respect to the logits (their dtype)."""
    valid_C1 = (labels_C != ignore_index).unsqueeze(1)
    index_C1 = labels_C.unsqueeze(1).masked_fill(~valid_C1, 0)
    logits = _cap(logits_CV.to(_wide(logits_CV.dtype)), softcap)
    log_sum_C1 = torch.logsumexp(logits, dim=1, keepdim=True)
    # A selection, not a product: an ignored token whose logits overflow counts nowhere.
    loss_C1 = torch.where(valid_C1, log_sum_C1 - logits.gather(1, index_C1), 0.0)
    is_label = torch.arange(logits.shape[1], device=logits.device) == index_C1
    grad_CV = torch.exp(logits - log_sum_C1) - is_label.to(logits.dtype)
    if softcap:
        grad_CV = grad_CV * (1.0 - (logits / softcap).square())
    return loss_C1.sum(), torch.where(valid_C1, grad_CV, 0.0).to(logits_CV.dtype)


def _loss_and_grad_in_place(
    logits_CV: Tensor, labels_C: Tensor, ignore_index: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """`_loss_and_grad` for eager execution: one fp32 buffer, overwritten (two with a cap)."""
    valid_C1 = (labels_C != ignore_index).unsqueeze(1)
    index_C1 = labels_C.unsqueeze(1).masked_fill(~valid_C1, 0)
    buffer = logits_CV.to(_wide(logits_CV.dtype), copy=True)
    slope = None
    if softcap:
        buffer.div_(softcap).tanh_()
        slope = buffer.square().neg_().add_(1.0)
        buffer.mul_(softcap)
    label_logit_C1 = buffer.gather(1, index_C1)
    log_sum_C1 = torch.logsumexp(buffer, dim=1, keepdim=True)
    loss = torch.where(valid_C1, log_sum_C1 - label_logit_C1, 0.0).sum()
    buffer.sub_(log_sum_C1).exp_()
    buffer.scatter_add_(1, index_C1, torch.full_like(label_logit_C1, -1.0))
    if slope is not None:
        buffer.mul_(slope)
    buffer.masked_fill_(~valid_C1, 0.0)
    return loss, buffer.to(logits_CV.dtype)


class _ChunkKernel:
    """Chooses between the compiled and the eager form once, and falls back when no compiler works here.

    Each device has a compiled form of its own, see Note [Code of one's own] in compiled.py.
    """

    def __init__(self) -> None:
        self._compiled: dict[torch.device, Callable] = {}
        self._unusable = False
        # Guards the two fields above: device workers reach their first chunk at about the same time.
        self._lock = threading.Lock()

    def __call__(self, logits: Tensor, labels: Tensor, ignore_index: int, softcap: float) -> tuple[Tensor, Tensor]:
        # On a CPU compiling takes longer than it saves in most runs.
        off = self._unusable or _kind(logits.device) == "cpu" or os.environ.get("RPP_DISABLE_TORCH_COMPILE") == "1"
        if off:
            return _loss_and_grad_in_place(logits, labels, ignore_index, softcap)
        if _is_fake(logits):  # what the compiled form returns; it keeps no more
            return logits.new_empty((), dtype=_wide(logits.dtype)), torch.empty_like(logits)
        with self._lock:
            compiled = self._compiled.get(logits.device)
            if compiled is None:
                compiled = self._compiled[logits.device] = torch.compile(DeviceCodes().own(_loss_and_grad))
        try:
            return compiled(logits, labels, ignore_index, softcap)
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
            return _loss_and_grad_in_place(logits, labels, ignore_index, softcap)


_chunk_kernel = _ChunkKernel()


def _chunk_loss(logits_CV: Tensor, labels_C: Tensor, ignore_index: int, softcap: float) -> Tensor:
    logits = _cap(logits_CV.to(_wide(logits_CV.dtype)), softcap)
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
    elif _kind(grad_CV.device) != "cpu" and _is_fake(grad_CV):
        pass  # the product is added in place
    elif _adds_into_fp32(grad_CV.dtype, grad_CV.device):
        torch.ops.aten.addmm.dtype_out(total_VH, grad_CV.t(), hidden_CH, torch.float32, out=total_VH)
    else:
        total_VH.addmm_(grad_CV.t().float(), hidden_CH.float())


def loss_sum_and_gradients(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    needs_hidden: bool = False,
    needs_weight: bool = False,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operator's implementation: the sum of the counted tokens' losses and its gradients, all at once.

    hidden_TH, weight_VH and bias_V have one floating-point dtype, in which logits are computed; they are reduced in
    fp32 (fp64 for fp64 inputs). The gradient of hidden_TH has its dtype, those of weight_VH and bias_V are fp32, summed
    over the chunks there. A gradient that is not needed is an empty tensor. chunk_tokens 0: chosen from V.
    """
    _check(hidden_TH, weight_VH, targets_T, bias_V, chunk_tokens)
    tokens, vocabulary = hidden_TH.shape[0], weight_VH.shape[0]
    wide = _wide(hidden_TH.dtype)
    total, grad_hidden_TH, grad_weight_VH, grad_bias_V = _results(
        hidden_TH, weight_VH, needs_hidden, needs_weight, needs_bias and bias_V is not None
    )
    any_grad = needs_hidden or needs_weight or grad_bias_V.numel() > 0
    chunk = chunk_tokens or default_chunk_tokens(vocabulary, hidden_TH.device)
    hidden_TH, weight_VH = hidden_TH.detach(), weight_VH.detach()
    bias_V = None if bias_V is None else bias_V.detach()
    with torch.autocast(hidden_TH.device.type, enabled=False):
        for begin in range(0, tokens, chunk):
            part = slice(begin, min(begin + chunk, tokens))
            logits_CV = torch.nn.functional.linear(hidden_TH[part], weight_VH, bias_V)
            if not any_grad:
                total += _chunk_loss(logits_CV, targets_T[part], ignore_index, softcap)
                continue
            loss, grad_CV = _chunk_kernel(logits_CV, targets_T[part], ignore_index, softcap)
            del logits_CV
            total += loss
            if needs_hidden:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[part])
            if needs_weight:
                _accumulate_weight_grad(grad_weight_VH, grad_CV, hidden_TH[part])
            if grad_bias_V.numel():
                grad_bias_V += grad_CV.sum(0, dtype=wide)
            del grad_CV  # before the next chunk's logits, or a third chunk would exist
    return total, grad_hidden_TH, grad_weight_VH, grad_bias_V


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad * factor``, rounded to ``dtype`` once. In a product of 16 bits the factor would be rounded too."""
    if grad.dtype == factor.dtype:
        return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))
    return grad.to(factor.dtype).mul_(factor).to(dtype)


def _results(
    hidden_TH: Tensor, weight_VH: Tensor, needs_hidden: bool, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = _wide(hidden_TH.dtype)
    return (
        hidden_TH.new_zeros((), dtype=wide),
        hidden_TH.new_empty(hidden_TH.shape if needs_hidden else (0,)),
        weight_VH.new_zeros(weight_VH.shape if needs_weight else (0,), dtype=wide),
        weight_VH.new_zeros(weight_VH.shape[:1] if needs_bias else (0,), dtype=wide),
    )


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, chunk_tokens: int) -> None:
    def refuse(argument: str, expected: str, came: Tensor | int) -> None:
        got = f"{came.dtype} {list(came.shape)}" if isinstance(came, Tensor) else str(came)
        raise ConfigError(f"linear_cross_entropy: argument '{argument}': expected {expected}, got {got}")

    if hidden.ndim != 2 or not hidden.is_floating_point():
        refuse("hidden", "a floating-point matrix [tokens, hidden size]", hidden)
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[1] or weight.dtype != hidden.dtype:
        refuse("weight", f"{hidden.dtype} [classes, {hidden.shape[1]}], as 'hidden'", weight)
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        refuse("targets", f"torch.int64 [{hidden.shape[0]}], one for each row of 'hidden'", targets)
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != hidden.dtype):
        refuse("bias", f"{hidden.dtype} [{weight.shape[0]}], one for each row of 'weight'", bias)
    if chunk_tokens < 0:
        refuse("chunk_tokens", "0 (chosen from the number of classes) or more", chunk_tokens)


@torch.library.register_fake("roundpipe::linear_cross_entropy")
def _fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    chunk_tokens: int = 0,
    needs_hidden: bool = False,
    needs_weight: bool = False,
    needs_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(hidden, weight, targets, bias, chunk_tokens)
    return _results(hidden, weight, needs_hidden, needs_weight, needs_bias and bias is not None)


def _setup(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    hidden, weight, _, bias = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    for tensor, flag in ((hidden, "needs_hidden"), (weight, "needs_weight"), (bias, "needs_bias")):
        if tensor is not None and tensor.requires_grad and not keyword_only_inputs[flag]:
            raise ConfigError(f"linear_cross_entropy: the tensor of '{flag}' requires grad, but {flag} is False")
    ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)


@torch.autograd.function.once_differentiable
def _backward(ctx: Any, grad_sum: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needed = (*ctx.needs_input_grad[:2], any(ctx.needs_input_grad[3:]))  # a bias that is None may not be there at all
    hidden, weight, bias = (
        scaled(grad, grad_sum, dtype) if need else None
        for grad, dtype, need in zip(ctx.saved_tensors, ctx.dtypes, needed, strict=True)
    )
    return hidden, weight, None, bias


torch.library.impl("roundpipe::linear_cross_entropy", ("cpu", "cuda"))(loss_sum_and_gradients)
torch.library.register_autograd("roundpipe::linear_cross_entropy", _backward, setup_context=_setup)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float = 0.0,
    reduction: str = "mean",
    num_items_in_batch: Tensor | float | None = None,
    chunk_tokens: int = 0,
) -> Tensor:
    """``cross_entropy(cap(linear(hidden, weight, bias)), targets)`` without the whole logits; a scalar of fp32.

    Works inside ``torch.compile(fullgraph=True)``. Nothing waits for the device. Differentiable once.

    Args:
        hidden: [..., H], floating point.
        weight: [V, H]. Its gradient is summed over the chunks in fp32.
        targets: int64 of the leading shape of ``hidden``: the class of each token.
        bias: [V] or None.
        ignore_index: tokens of this class count nowhere.
        softcap: when not 0, logits become ``softcap * tanh(logits / softcap)``.
        reduction: ``"mean"`` over the counted tokens, or ``"sum"``.
        num_items_in_batch: divide the sum by this number instead (then ``reduction`` says nothing).
        chunk_tokens: tokens whose logits exist at a time; 0: chosen from V.

    Logits are computed in the dtype of the inputs (or of autocast) and reduced in fp32 (fp64 for fp64).

    Raises:
        ConfigError: shapes or dtypes that do not fit, or an unknown reduction.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"linear_cross_entropy: argument 'reduction': expected 'mean' or 'sum', got {reduction!r}")
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    grad = torch.is_grad_enabled()
    targets_T = targets.reshape(-1)
    total = torch.ops.roundpipe.linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]).to(dtype),
        weight.to(dtype),
        targets_T,
        None if bias is None else bias.to(dtype),
        ignore_index=ignore_index,
        softcap=softcap,
        chunk_tokens=chunk_tokens,
        needs_hidden=grad and hidden.requires_grad,
        needs_weight=grad and weight.requires_grad,
        needs_bias=grad and bias is not None and bias.requires_grad,
    )[0]
    if num_items_in_batch is not None:
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(total)
        return total / num_items_in_batch
    if reduction == "sum":
        return total
    return total / (targets_T != ignore_index).sum().to(total.dtype)
