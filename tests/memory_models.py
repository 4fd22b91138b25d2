"""Models whose activations are known kinds of large, and plans for them: for tests of device memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, memory
from roundpipe import engine as engines


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Convolution(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))) + x


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: perceptron(128), (256, 128)),
    "attention": (lambda: Attention(64), (16, 64, 64)),
    "convolution": (lambda: Convolution(8), (16, 8, 32, 32)),
}
"""Name -> (one of eight equal layers, shape of a batch)."""


def make(kind: str, layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(MODELS[kind][0]() for _ in range(layers)))


def batch(kind: str) -> torch.Tensor:
    return torch.randn(MODELS[kind][1], generator=torch.Generator().manual_seed(1))


def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().sum()


def stages_of(size: int, layers: int = 8) -> ModelExecutePlan:
    """Stages of ``size`` layers, the last of them fused."""
    plan = ModelExecutePlan()
    stages = [range(begin, min(begin + size, layers)) for begin in range(0, layers, size)]
    plan.fwd_plan, plan.bwd_plan = stages[:-1], stages[::-1]
    return plan


def counted_peak(model: RoundPipe, x: torch.Tensor, config: RoundPipeRunConfig, **call: Any) -> int:
    """Bytes of the device that held most during one call; not the first, whose layers are looked at closely."""
    arguments: dict[str, Any] = {"label": x, "loss_fn": loss_fn, "run_config": config, **call}
    for _ in range(2):
        model.synchronize()
        memory.reset_device_peaks()
        model.forward_backward((x,), **arguments)
        model.synchronize()
    return max(device.peak_bytes or 0 for device in roundpipe.memory_report().devices)


def drop_regions() -> None:
    """Regions shrink only where memory is short: what an earlier test needed is no part of the next measurement."""
    engine = engines.current()
    engine.wait_idle()
    for worker in engine.workers:
        worker.set_region(0)
