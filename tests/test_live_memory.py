"""Counted memory against sums by hand, and against what is alive."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import DeviceOutOfMemory
from roundpipe.live_memory import Kind, LiveMemory
from roundpipe.models.function import linear_cross_entropy

from . import oracle

KIB = 1 << 10


def test_storages_count_once_and_go_with_their_last_tensor() -> None:
    memory = LiveMemory()
    outside = torch.zeros(256)
    with memory:
        a = torch.empty(256)
        view = a[3:]
        b = outside.view(16, 16)  # nobody made it here
        c, d = (outside + 1).split(128)
    assert memory.live_bytes == 2 * KIB
    del a
    assert memory.live_bytes == 2 * KIB
    del view, c
    assert memory.live_bytes == KIB
    del d, b
    assert (memory.live_bytes, memory.peak_bytes) == (0, 2 * KIB)
    memory.reset_peak()
    assert memory.peak_bytes == 0


def test_backward_counts_too_and_frees_as_it_goes() -> None:
    memory = LiveMemory()
    x = torch.zeros(256, requires_grad=True)
    with memory:
        y = x
        for _ in range(8):
            y = y.sin()  # keeps its input: the first one's is outside
        assert memory.live_bytes == 8 * KIB
        y.backward(torch.ones_like(y))
        # While it lives here: y, its gradient given from outside autograd is gone, and the gradient of x.
        assert memory.live_bytes == 2 * KIB
    assert 8 * KIB < memory.peak_bytes <= 12 * KIB


def test_a_tensor_that_another_thread_drops_is_subtracted() -> None:
    memory = LiveMemory()
    with memory:
        held = [torch.empty(KIB, dtype=torch.uint8) for _ in range(100)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    with memory:  # meanwhile, under new addresses or old ones
        more = [torch.empty(KIB, dtype=torch.uint8) for _ in range(100)]
    thread.join()
    assert memory.live_bytes == 100 * KIB
    del more
    assert memory.live_bytes == 0


def test_kinds_and_resized_storages() -> None:
    memory = LiveMemory()
    with memory:
        a, b = torch.empty(256), torch.empty(256)
        memory.note(a, Kind.RING)
        memory.note(torch.empty(3), Kind.RING)
        assert memory.by_kind() == (0, KIB, KIB, 0)
        b.resize_(512)
        b = b + 0
    assert memory.by_kind() == (0, 2 * KIB, KIB, 0)


def test_beyond_the_limit_an_allocation_is_refused_and_what_was_there_stays() -> None:
    memory = LiveMemory("host:7", 4 * KIB)
    with memory:
        a = torch.empty(768)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            torch.empty(257)
        text = str(caught.value)
        assert "out of memory on a simulated device" in text and "host:7: tried to allocate 1028 bytes" in text
        b = torch.empty(256)
    assert memory.live_bytes == 4 * KIB
    del a, b, caught


def test_chunks_of_the_linear_cross_entropy_are_seen() -> None:
    hidden = torch.randn(256, 16, requires_grad=True)
    weight = torch.randn(128, 16, requires_grad=True)
    targets = torch.randint(128, (256,))
    peaks = []
    for chunk in (64, 256):
        memory = LiveMemory()
        with memory:
            linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk)
        peaks.append(memory.peak_bytes)
    assert peaks[1] - peaks[0] >= 192 * 128 * 4  # the logits of the tokens that a chunk has more


def test_a_limited_device_counts_what_layers_make_and_refuses_what_is_too_much() -> None:
    """As a GPU would: the layer's own activations are 16 times its boundary."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.repeat(1, 16) * self.gain).sin().unflatten(1, (16, -1)).mean(1)

    roundpipe.use_devices("host:1@2MiB")
    model = RoundPipe(Wide())
    x = torch.randn(128, 32)  # 256 KiB a tensor inside
    config = RoundPipeRunConfig(num_microbatch=1)
    with pytest.raises(DeviceOutOfMemory, match="CUDA out of memory"):
        model.forward_backward((x.repeat(4, 1),), loss_fn=lambda out, _: out.sum(), run_config=config)
    model.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=config)
    model.synchronize()
    device = roundpipe.memory_report().devices[0]
    assert device.peak_bytes is not None and 512 * KIB <= device.peak_bytes <= 2 << 20
    assert device.tensors_bytes is not None and device.tensors_bytes <= KIB  # all of it has gone again


def test_without_a_limit_nothing_is_counted() -> None:
    roundpipe.use_devices("host:1")
    seen = []

    class Looks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

            seen.append(list(_get_current_dispatch_mode_stack()))
            return x

    with torch.no_grad():
        RoundPipe(Looks())(torch.ones(4, 4))
    assert seen and not any(seen)
    assert roundpipe.memory_report().devices[0].peak_bytes is None


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_layers_run_compiled_on_a_limited_device(fullgraph: bool) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    roundpipe.use_devices("host:1@16MiB")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    twin = oracle.twin(plain)
    layers = [torch.compile(layer, backend=backend, fullgraph=fullgraph) for layer in plain]
    model = RoundPipe(nn.Sequential(*layers))
    x = torch.randn(8, 16)
    loss = model.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
    model.synchronize()
    assert compiled
    want = oracle.forward_backward(list(twin), (x,), loss_fn=lambda out, _: out.square().sum(), num_microbatch=2)
    oracle.assert_close_to_scale(loss, want, "loss")
    oracle.assert_same_gradients(plain, twin)
