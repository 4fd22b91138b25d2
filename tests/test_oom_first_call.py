"""What an out-of-memory error says fits does fit, from the first call of a process that knows nothing yet."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import DeviceOutOfMemory

from . import memory_models as zoo
from .at_rest import fresh_engine

CALLS = 3
"""The first with everything unknown, then with other plans and larger regions."""


class Passing(nn.Module):
    """Takes memory that no graph keeps, so that sizes of activations do not tell it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.linear(x)[:, None, :].expand(-1, 16, -1) * 2).mean(1)


def _many(make: Callable[[], nn.Module], count: int) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(*(make() for _ in range(count)))


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _by_hand(size: int) -> ModelExecutePlan:
    """For forward and backward apart."""
    plan = zoo.stages_of(size)
    plan.fwd_plan = plan.bwd_plan[::-1]
    return plan


PERCEPTRON, ATTENTION = _many(lambda: zoo.perceptron(128), 8), _many(lambda: zoo.Attention(64), 8)
CASES: dict[str, tuple[str, Callable[[], nn.Sequential], tuple[int, ...], str, dict[str, Any]]] = {
    "plans of our own": ("host:1@6MiB", PERCEPTRON, (1536, 128), "fused", {}),
    "two devices": ("host:2@6MiB", PERCEPTRON, (3072, 128), "fused", {"num_microbatch": 2}),
    "a given plan": ("host:1@6MiB", PERCEPTRON, (512, 128), "fused", {"execute_plan": zoo.stages_of(2)}),
    "long stages": ("host:1@6MiB", ATTENTION, (16, 32, 64), "fused", {"execute_plan": zoo.stages_of(8)}),
    "by layer": ("host:1@6MiB", ATTENTION, (64, 64, 64), "fused", {"recompute_grain": "layer"}),
    "passing": ("host:1@6MiB", _many(lambda: Passing(128), 24), (1024, 128), "fused", {}),
    "backward apart": ("host:1@6MiB", ATTENTION, (16, 48, 64), "train", {"execute_plan": _by_hand(4)}),
    "inference": ("host:1@6MiB", _many(lambda: zoo.perceptron(192), 8), (1100, 192), "infer", {}),
}


def _run(model: RoundPipe, x: torch.Tensor, run_type: str, config: RoundPipeRunConfig) -> None:
    if run_type == "fused":
        model.forward_backward((x,), label=x, loss_fn=zoo.loss_fn, run_config=config)
    elif run_type == "train":
        zoo.loss_fn(model(x, roundpipe_run_config=config), x).backward()
    else:
        with torch.no_grad():
            model(x, roundpipe_run_config=config)
    model.synchronize()


@pytest.mark.parametrize("name", CASES)
def test_what_an_error_says_fits_holds_where_nothing_is_known(name: str) -> None:
    devices, make, shape, run_type, settings = CASES[name]
    config = RoundPipeRunConfig(**{"num_microbatch": 1, **settings})
    x = _rows(*shape)

    def fresh() -> RoundPipe:
        gc.collect()
        fresh_engine(devices)
        torch.manual_seed(0)
        return RoundPipe(make())

    model = fresh()
    with pytest.raises(DeviceOutOfMemory) as caught:
        _run(model, x, run_type, config)
    fitting = [remedy for remedy in caught.value.remedies or () if remedy.fits]
    assert fitting
    del caught
    for remedy in fitting:
        for as_text in (False, True) if remedy.config.execute_plan else (False,):
            model = fresh()
            names = {"RoundPipeRunConfig": RoundPipeRunConfig, "ModelExecutePlan": ModelExecutePlan, "model": model}
            made = eval(remedy.text, names) if as_text else remedy.config
            for _ in range(CALLS):
                _run(model, x, run_type, config.overridden_by(made))
