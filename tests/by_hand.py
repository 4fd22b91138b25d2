"""The oracle of compact steps: gradients of a wrapper without an optimizer, masters of torch tensors, weights written
by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops

from .model_zoo import CASES
from .plans import one_layer_stages

Update = Callable[[list[torch.Tensor], list[torch.Tensor], float], None]  # (masters, float32 gradients, step)


def round_away(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As compact steps publish: bfloat16 with ties away from zero."""
    if dtype != torch.bfloat16:
        return master.to(dtype, copy=True)
    bits = master.contiguous().view(torch.int32)
    upper = ((bits.to(torch.int64) & 0xFFFFFFFF) + 0x8000 >> 16 << 16).to(torch.int32).view(torch.float32)
    return torch.where(master.isnan(), master, upper).to(torch.bfloat16)


def adamw_of_torch(masters: list[torch.Tensor], **options: Any) -> Callable[[list[torch.Tensor | None]], None]:
    optimizer = torch.optim.AdamW(masters, **options)

    def update(gradients: list[torch.Tensor | None]) -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.step()

    return update


def fused_adamw(masters: list[torch.Tensor], lr: float = 1e-3, weight_decay: float = 1e-2, **rest: Any) -> Any:
    """The operator of the drop-in optimizers, which has oracles of its own: the same bits as the compact path."""
    firsts, seconds = [torch.zeros_like(m) for m in masters], [torch.zeros_like(m) for m in masters]
    steps = [0.0] * len(masters)

    def update(gradients: list[torch.Tensor | None]) -> None:
        for i, gradient in enumerate(gradients):
            if gradient is None:
                continue
            steps[i] += 1
            _ops.adam_update(
                [masters[i]], [], [gradient], [firsts[i]], [seconds[i]], [], [steps[i]], lr=lr, beta1=0.9,
                beta2=0.999, eps=1e-8, weight_decay=weight_decay, decoupled=True, **rest,
            )  # fmt: skip

    return update


def batch_of(case: str, rows: int, number: int, dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(1000 + number)
    args, label = CASES[case].batch(rows)
    return tuple(a.to(dtype) if a.is_floating_point() else a for a in args), label


def loss_of(case: str) -> Callable[[Any, Any], torch.Tensor]:
    return lambda out, label: CASES[case].loss_fn(out.float(), label)


def make(case: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return CASES[case].make().to(dtype)


def run_call(wrapped: RoundPipe, case: str, number: int, dtype: torch.dtype, microbatches: int = 2) -> float:
    args, label = batch_of(case, 6, number, dtype)
    # One plan for every number of devices: with it the order in which a shared parameter's gradients are added.
    plan = one_layer_stages(wrapped.num_layers)
    config = RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=plan)
    loss = wrapped.forward_backward(args, label=label, loss_fn=loss_of(case), run_config=config)
    return float(loss)


def train_by_hand(
    case: str,
    steps: int,
    is_async: bool,
    dtype: torch.dtype = torch.bfloat16,
    make_update: Any = fused_adamw,
    calls: int = 1,
    max_grad_norm: float | None = None,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """(loss of every call, float32 masters by name, gradient norms), on one device."""
    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(make(case, dtype))
    named = {n: p for n, p in wrapped.model.named_parameters() if p.requires_grad}
    masters = [p.detach().float().clone() for p in named.values()]
    update = make_update(masters, **options)
    losses, norms, newest = [], [], [p.detach().clone() for p in named.values()]
    for number in range(steps):
        losses += [run_call(wrapped, case, number * calls + k, dtype) for k in range(calls)]
        wrapped.synchronize()
        gradients = [None if p.grad is None else p.grad.float() for p in named.values()]
        if max_grad_norm is not None:
            norm = torch.cat([g.double().flatten() for g in gradients if g is not None]).norm()
            norms.append(float(norm))
            scale = min(1.0, max_grad_norm / (float(norm) + 1e-6))
            gradients = [None if g is None else g * scale for g in gradients]
        wrapped.zero_grad()
        before = newest
        update(gradients)
        newest = [round_away(m, dtype) for m in masters]
        with torch.no_grad():
            for parameter, value in zip(named.values(), before if is_async else newest, strict=True):
                parameter.copy_(value)
    return losses, dict(zip(named, masters, strict=True)), norms
