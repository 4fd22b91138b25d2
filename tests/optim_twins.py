"""Pairs of optimizers that must agree, and parameters to try them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from roundpipe import optim

RTOL, ATOL = 1e-5, 1e-6
PAIRS = {"Adam": (optim.Adam, torch.optim.Adam), "AdamW": (optim.AdamW, torch.optim.AdamW),
         "SGD": (optim.SGD, torch.optim.SGD)}  # fmt: skip


class PlainLion(torch.optim.Optimizer):
    """The paper's three lines in torch operators."""

    def __init__(self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0, **rest: Any):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=rest.get("maximize")))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = average * beta1 + grad * (1 - beta1)
                if p.is_complex():
                    sign = torch.view_as_complex(torch.view_as_real(direction).sign())
                else:
                    sign = direction.sign()
                p.mul_(1 - lr * group["weight_decay"]).add_(sign, alpha=-lr)
                average.mul_(beta2).add_(grad, alpha=1 - beta2)


PAIRS["Lion"] = (optim.Lion, PlainLion)  # type: ignore[assignment]


def shapes_of_trouble(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Odd sizes, and memory in other orders than the elements'."""
    torch.manual_seed(1)
    tensors = [
        torch.randn((), dtype=dtype),
        torch.randn(0, 3, dtype=dtype),
        torch.randn(5, 7, dtype=dtype),
        torch.randn(33, 65, dtype=dtype).t(),
        torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.randn(6, 10, dtype=dtype)[:, ::2],
        torch.randn(1, 9, 1, dtype=dtype).transpose(0, 1),
        torch.randn(70_001, dtype=dtype)[1:],
    ]
    return [nn.Parameter(t) for t in tensors]


def twins(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Equal parameters in other memory of the same strides."""
    made = []
    for p in parameters:
        # Stretched storage for tensors with gaps.
        other = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype)
        other.copy_(p.detach())
        made.append(nn.Parameter(other))
    return made


def set_gradients(step: int, *lists: list[nn.Parameter], scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for row in zip(*lists, strict=True):
        shape = row[0].shape
        gradient = torch.randn(shape, dtype=row[0].dtype, generator=generator) * scale
        if len(shape) == 2 and step % 2:  # in an order that is not the parameter's
            gradient = gradient.t().contiguous().t()
        for p in row:
            p.grad = gradient.clone()


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, **tolerance: float) -> None:
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, **tolerance)
            a, b = ours.state[p], theirs.state[q]
            assert {k for k, v in a.items() if v is not None} == {k for k, v in b.items() if v is not None}
            for name, value in a.items():
                if value is None:
                    continue
                assert value.dtype == b[name].dtype and value.shape == b[name].shape
                torch.testing.assert_close(value, b[name], **tolerance)
