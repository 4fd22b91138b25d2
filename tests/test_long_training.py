"""Two hundred steps of compact optimizers on a tied decoder of bfloat16 weights: not a bit drifts, in either mode."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import RoundPipe, _ops, optim
from roundpipe import engine as engines

from . import by_hand

STEPS = 200


@functools.cache
def expected(is_async: bool) -> Any:
    return by_hand.train_by_hand("decoder", STEPS, is_async)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_two_hundred_steps_are_those_by_hand(devices: int, is_async: bool) -> None:
    """Masters take turns over the devices: both have the bits of the same float32 masters, so those of each other."""
    losses, masters, _ = expected(is_async)
    roundpipe.use_devices(f"host:{devices}")
    handle = engines.current().handle
    wrapped = RoundPipe(by_hand.make("decoder"))
    optimizer = optim.AdamW(wrapped, master="split" if (devices + is_async) % 2 else "float32")
    got = []
    for number in range(STEPS):
        _ops.engine_inject(handle, "delay", STEPS * devices + number, (0, 20, 100)[number % 3])
        got.append(by_hand.run_call(wrapped, "decoder", number, torch.bfloat16))
        wrapped.step(optimizer, is_async)
    wrapped.synchronize()
    _ops.engine_inject(handle, "delay", 0, 0)
    assert got == losses and losses[-1] < losses[0]
    found = dict(optimizer.named_masters())
    for name, parameter in wrapped.model.named_parameters():
        assert torch.equal(found[name], masters[name]), name
        assert torch.equal(parameter, by_hand.round_away(masters[name], torch.bfloat16)), name
