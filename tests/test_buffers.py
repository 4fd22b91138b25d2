"""Buffers that the caller replaces after a call, while its backward has yet to recompute with those of before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import RoundPipeError

from . import oracle
from .faults import WIDTH, Trap, Trapped, five_layer_plan
from .test_model_calls import square


class Scales(Trapped):
    """By a buffer that is registered twice; with one that comes, and one that goes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 0.0)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("again", self.scale)
        self.register_buffer("none", None)
        self.register_buffer("extra", torch.rand(WIDTH))

    def __deepcopy__(self, memo: Any) -> Scales:
        twin = Scales()
        twin.load_state_dict(self.state_dict())
        twin.again = twin.scale
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x) * self.scale * self.again
        if self.none is not None:
            out = out * self.none
        extra = self._buffers.get("extra")
        return out if extra is None else out + extra * out


def replace(layer: Scales) -> None:
    layer.scale = layer.scale * 2.0
    layer.norm.running_mean = torch.ones(WIDTH)


def part(layer: Scales) -> None:
    layer.again = layer.again + 1.0


def come(layer: Scales) -> None:
    layer.none = torch.full((WIDTH,), 0.5)
    layer.register_buffer("new", torch.ones(WIDTH))


def go(layer: Scales) -> None:
    layer.extra = None


def vanish(layer: Scales) -> None:
    del layer.extra


def write(layer: Scales) -> None:
    layer.scale.mul_(2.0)


@pytest.mark.parametrize("edit", [replace, part, come, go, vanish, write])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_an_edit_after_the_call_is_for_the_next_one(grain: str, edit: Callable[[Scales], None]) -> None:
    roundpipe.use_devices("host:1")
    torch.manual_seed(0)
    model = nn.Sequential(*(Scales() for _ in range(5)))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=five_layer_plan(), recompute_grain=grain)
    x = torch.randn(12, WIDTH)
    trap: Trap = model[1 if grain == "stage" else 2].trap  # the first layer that is recomputed
    for _ in range(2):
        trap.arm("recompute", 0, hangs=True)
        wrapped.forward_backward((x,), loss_fn=square, run_config=config)
        oracle.forward_backward(list(plain), (x,), loss_fn=square, num_microbatch=3)
        assert trap.sprung.wait(Trap.PATIENCE_S)
        for layer in (*model, *plain):
            if "new" not in layer._buffers and "extra" in layer._buffers:
                edit(layer)
        trap.release()
        wrapped.synchronize()
        oracle.assert_same_gradients(wrapped.model, plain)
        oracle.assert_same_state(wrapped.model, plain)


def test_a_module_taken_out_while_backward_runs_is_told() -> None:
    roundpipe.use_devices("host:1")
    model = nn.Sequential(*(Scales() for _ in range(5)))
    wrapped = RoundPipe(model)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=five_layer_plan())
    model[1].trap.arm("recompute", 0, hangs=True)
    wrapped.forward_backward((torch.randn(12, WIDTH),), loss_fn=square, run_config=config)
    assert model[1].trap.sprung.wait(Trap.PATIENCE_S)
    model[0].norm = nn.BatchNorm1d(WIDTH)
    model[1].trap.release()
    with pytest.raises(RoundPipeError, match="taken out of its layer"):
        wrapped.synchronize()
