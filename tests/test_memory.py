"""``memory_report()`` agrees with what was asked for and with the operating system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, _ops
from roundpipe import engine as engines
from roundpipe.errors import HostOutOfMemory

from .at_rest import at_rest

WIDE = 1024
ONE = WIDE * WIDE * 4  # bytes of one layer


class Named(nn.Sequential):
    """A class that no other test has models of."""


def wrapped(pin_model: str = "alloc") -> RoundPipe:
    return RoundPipe(nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(4)]), pin_model=pin_model)


def call(model: RoundPipe, rows: int = 4) -> None:
    model.forward_backward((torch.randn(rows, WIDE),), loss_fn=lambda out, _: out.square().mean())


def test_every_byte_has_its_place() -> None:
    at_rest()
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
    # Two moments and a shadow: masters are the weights.
    assert report.host.optimizer_bytes - before.optimizer_bytes == 12 * ONE
    assert report.host.locked_bytes >= report.host.weights_bytes
    assert report.host.other_bytes - before.other_bytes < 4 << 20  # other tests may have left some
    for device in report.devices:
        assert device.total_bytes == 64 << 20 and 2 * ONE <= device.region_bytes <= 64 << 20
    text = str(report)
    assert "gradients" in text and "device host:1" in text and "peak" in text
    del model, optimizer
    at_rest()
    after = roundpipe.memory_report().host
    assert (after.weights_bytes, after.gradients_bytes) == (before.weights_bytes, before.gradients_bytes)


def test_weights_in_place_are_told_apart() -> None:
    at_rest()
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
    roundpipe.optim.AdamW(RoundPipe(nn.Linear(2, 2)), lr=1e-3)  # imports what optimizers need
    model = RoundPipe(nn.Sequential(nn.Linear(WIDE, 16 * WIDE, bias=False)))
    for _ in range(2):  # both ends of the region, both gradient images
        call(model)
    model.synchronize()
    at_rest()
    before = roundpipe.memory_report().host
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    model.step(optimizer)
    model.synchronize()
    after = roundpipe.memory_report().host
    taken = after.allocated_bytes - before.allocated_bytes
    assert taken >= 2 * 16 * ONE
    assert after.process_bytes - before.process_bytes == pytest.approx(taken, rel=0.05, abs=4 << 20)
    del model, optimizer


CHILD = """
import ctypes, gc, json, sys
import torch
from torch import nn
import roundpipe
from roundpipe import RoundPipe, engine as engines

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024

def known():
    report = roundpipe.memory_report()
    (device,) = report.devices
    # A simulated device's memory is the host's. Weights in place are the process's own.
    return report.host.allocated_bytes + report.host.weights_in_place_bytes + device.region_bytes + device.tensors_bytes

def train(width, layers, pin_model, calls):
    model = RoundPipe(
        nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]), pin_model=pin_model
    )
    optimizer = roundpipe.optim.AdamW(model, lr=1e-6)
    for _ in range(2):
        for _ in range(calls):
            model.forward_backward((torch.ones(4, width),), loss_fn=lambda out, _: out.square().mean())
        model.step(optimizer)
    for _ in range(calls):  # the window stays open: its gradients, and what the last step left to be published
        model.forward_backward((torch.ones(4, width),), loss_fn=lambda out, _: out.square().mean())
    engines.current().wait_idle()
    return model, optimizer

roundpipe.use_devices("host:1@500MiB")
engine = engines.current()
engine.reserve_regions([240 << 20], [240 << 20])
engine.reserve_regions = lambda *_: None  # nor does a first call give any of it back
engine.workers[0].region.zero_()
warm = train(16, 2, sys.argv[1], 2)
before = resident() - known()
model = train(1024, 12, sys.argv[1], int(sys.argv[2]))
print(json.dumps(dict(system=resident() - before, report=known())))
"""


def test_a_region_that_was_too_small_is_not_kept() -> None:
    """Not by the models that used it, either."""
    roundpipe.use_devices("host:1@96MiB")
    small = wrapped()
    call(small)
    small.synchronize()
    worker = engines.current().workers[0]
    storage = worker.region.untyped_storage()
    size, pointer = storage.nbytes(), weakref.ref(storage)
    del storage
    large = RoundPipe(nn.Sequential(nn.Linear(WIDE, 4 * WIDE, bias=False)))
    call(large)
    large.synchronize()
    assert worker.region.numel() > size
    at_rest()
    kept = pointer() is not None
    assert not kept
    call(small)  # goes on in the new one
    small.synchronize()
    del small, large


@pytest.mark.parametrize(("pin_model", "calls"), [("alloc", 1), ("alloc", 2), ("register", 1), ("off", 1)])
def test_all_of_it_agrees_with_the_system(pin_model: str, calls: int) -> None:
    """Weights, gradients in one or two images, moments, a second copy of the weights: all of it is known."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "ROUNDPIPE_CHECK": "0"}
    command = [sys.executable, "-c", CHILD, pin_model, str(calls)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=100).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["report"] > 250 << 20
    assert found["report"] == pytest.approx(found["system"], rel=0.05)


@pytest.mark.needs_cuda
def test_devices_agree_with_the_allocator_and_the_driver() -> None:
    roundpipe.use_devices("cuda:0")
    model = wrapped()
    kept = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
    call(model, rows=1024)
    model.synchronize()
    torch.cuda.synchronize(0)
    (device,) = roundpipe.memory_report().devices
    assert device.tensors_bytes is not None and device.cached_bytes is not None and device.elsewhere_bytes is not None
    assert device.region_bytes >= 2 * ONE and device.tensors_bytes >= kept.nbytes
    allocated, reserved = torch.cuda.memory_allocated(0), torch.cuda.memory_reserved(0)
    assert device.region_bytes + device.tensors_bytes == pytest.approx(allocated, rel=0.05)
    assert device.region_bytes + device.tensors_bytes + device.cached_bytes == pytest.approx(reserved, rel=0.05)
    free, total = torch.cuda.mem_get_info(0)
    everything = device.region_bytes + device.tensors_bytes + device.cached_bytes + device.elsewhere_bytes
    assert everything == pytest.approx(total - free, rel=0.05)
    assert device.peak_bytes is not None and device.peak_bytes >= allocated
    assert device.total_bytes == total
    del model, kept


@pytest.mark.usefixtures("memory_is_checked")
def test_models_are_told_apart() -> None:
    """Also those that one function makes, as a cell of a notebook that is run again: the leftover is named."""
    at_rest()
    roundpipe.use_devices("host:1")
    before = roundpipe.memory_report().models
    first, second = (RoundPipe(Named(nn.Linear(WIDE, WIDE, bias=False)), name="made") for _ in range(2))
    other = RoundPipe(nn.Linear(WIDE, 2 * WIDE, bias=False), name="other")
    other.forward_backward((torch.randn(4, WIDE),), loss_fn=lambda out, _: out.square().mean())
    other.synchronize()
    models = roundpipe.memory_report().models
    mine = {name: size for name, size in models.items() if name not in before}
    linear = next(name for name in mine if name.startswith("Linear") and name.endswith("(other)"))
    assert mine == {"Named (made)": ONE, "Named#2 (made)": ONE, linear: 4 * ONE}  # of the last also a gradient
    assert "model Named#2 (made): 4.0 MiB" in str(roundpipe.memory_report())
    with pytest.raises(
        HostOutOfMemory, match=r"Models that live: .*Named \(made\) 4.00 MiB, Named#2 \(made\) 4.00 MiB"
    ):
        _ops.host_empty([1 << 45], torch.uint8)
    del first, second
