"""``memory_report()`` agrees with what was asked for and with the operating system."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe

WIDE = 1024
ONE = WIDE * WIDE * 4  # bytes of one layer


def wrapped(pin_model: str = "alloc") -> RoundPipe:
    return RoundPipe(nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)]), pin_model=pin_model)


def call(model: RoundPipe, rows: int = 4) -> None:
    model.forward_backward((torch.randn(rows, WIDE),), loss_fn=lambda out, _: out.square().mean())


def test_every_byte_has_its_place() -> None:
    gc.collect()
    roundpipe.use_devices("host:2@64MiB")
    before = roundpipe.memory_report().host
    model = wrapped()
    host = roundpipe.memory_report().host
    assert host.weights_bytes - before.weights_bytes == 4 * ONE
    assert host.gradients_bytes == before.gradients_bytes
    call(model)
    model.synchronize()
    host = roundpipe.memory_report().host
    assert host.gradients_bytes - before.gradients_bytes == 4 * ONE
    call(model)
    model.synchronize()
    assert roundpipe.memory_report().host.gradients_bytes - before.gradients_bytes == 8 * ONE  # two images
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    model.step(optimizer)
    model.synchronize()
    report = roundpipe.memory_report()
    assert (
        report.host.optimizer_bytes - before.optimizer_bytes == 12 * ONE
    )  # two moments, a shadow: masters are weights
    assert report.host.locked_bytes >= report.host.weights_bytes
    assert report.host.other_bytes < 4 << 20
    for device in report.devices:
        assert device.total_bytes == 64 << 20 and 2 * ONE <= device.region_bytes <= 64 << 20
    text = str(report)
    assert "gradients" in text and "device host:1" in text and "peak" in text
    del model, optimizer
    gc.collect()
    after = roundpipe.memory_report().host
    assert (after.weights_bytes, after.gradients_bytes) == (before.weights_bytes, before.gradients_bytes)


def test_weights_in_place_are_told_apart() -> None:
    roundpipe.use_devices("host:2")
    before = roundpipe.memory_report().host
    model = wrapped("register")
    host = roundpipe.memory_report().host
    assert host.weights_bytes == before.weights_bytes
    assert host.weights_in_place_bytes - before.weights_in_place_bytes == 4 * ONE
    assert host.locked_bytes - before.locked_bytes == pytest.approx(4 * ONE, rel=0.05)
    del model


def test_it_agrees_with_the_system() -> None:
    """What the engine takes is what the process grows by."""
    roundpipe.use_devices("host:1")
    model = RoundPipe(nn.Sequential(nn.Linear(WIDE, 16 * WIDE, bias=False)))
    for _ in range(2):  # both ends of the region, both gradient images
        call(model)
    model.synchronize()
    before = roundpipe.memory_report().host
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    model.step(optimizer)
    model.synchronize()
    after = roundpipe.memory_report().host
    taken = after.allocated_bytes - before.allocated_bytes
    assert taken >= 2 * 16 * ONE
    assert after.process_bytes - before.process_bytes == pytest.approx(taken, rel=0.05, abs=4 << 20)
    del model, optimizer
