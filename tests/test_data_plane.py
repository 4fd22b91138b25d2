"""Copies that autograd and the compiler see: registration, values, lifetimes, misuse."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roundpipe import _ops, errors
from roundpipe.data_plane import offload_start, offload_wait, reload_start, reload_wait

from .at_rest import at_rest

ops = torch.ops.roundpipe
MISUSED = {"offload_start", "offload_wait", "reload_start", "reload_wait", "data_plane_inject", "data_plane_close"}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(2, 5, 7).transpose(0, 2),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(6, 8)[1::2, 2:5],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "bfloat16": lambda: torch.randn(9).to(torch.bfloat16),
    "float64": lambda: torch.randn(9, dtype=torch.float64),
    "complex": lambda: torch.randn(4, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "int64": lambda: torch.arange(7),
    "bool": lambda: torch.arange(7) % 2 == 0,
}


def offload(x: Tensor) -> Tensor:
    return offload_wait(offload_start(x), x)


def reload(host: Tensor, device: torch.device | str) -> Tensor:
    return reload_wait(reload_start(host, device), host, device)


DIFFERENTIABLE = [(name, True) for name, make in LAYOUTS.items() if make().is_floating_point() or make().is_complex()]


def sample(layout: str, device: str) -> Tensor:
    # The layout is made on the device: .to() would make expanded tensors dense.
    with torch.device(device):
        return LAYOUTS[layout]()


def opcheck(op: torch._ops.OpOverload, *args: object) -> None:
    # No two tickets have the same number: its 7 upper bits are the kind, the 56 below are free. Copies are equal.
    # Tolerances of zero would stand for torch's own.
    rtol = 0.125 if op in (ops.offload_start.default, ops.reload_start.default) else 1e-300
    torch.library.opcheck(op, args, rtol=rtol, atol=1e-300)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_values_and_strides(layout: str, device: str) -> None:
    x = sample(layout, device)
    host = offload(x)
    back = reload(host, device)
    like = torch.empty_like(x)
    for copy, where in ((host, "cpu"), (back, device)):
        assert copy.device.type == where
        assert copy.dtype == x.dtype and copy.stride() == like.stride()
        assert torch.equal(copy.cpu(), x.cpu().resolve_conj())
        assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()
    # The host side may be any tensor.
    ordinary = x.cpu()
    again = reload(ordinary, device)
    assert torch.equal(again.cpu(), ordinary) and again.stride() == torch.empty_like(ordinary).stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "requires_grad"), [(layout, False) for layout in LAYOUTS] + DIFFERENTIABLE)
def test_opcheck(layout: str, requires_grad: bool, device: str) -> None:
    x = sample(layout, device)
    if requires_grad:
        x = x.detach().requires_grad_()
    opcheck(ops.offload_start.default, x)
    opcheck(ops.offload_wait.default, ops.offload_start(x.detach()), x)
    host = x.detach().cpu().requires_grad_(x.requires_grad)
    place = torch.device(device)
    opcheck(ops.reload_start.default, host, place)
    opcheck(ops.reload_wait.default, ops.reload_start(host.detach(), place), host, place)


@pytest.mark.parametrize("size", [[], [0], [3, 4]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_opcheck_of_host_empty(size: list[int], dtype: torch.dtype) -> None:
    opcheck(ops.host_empty.default, size, dtype)
    compiled = torch.compile(lambda n: ops.host_empty([n, 2], torch.float32) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(3), torch.ones(3, 2))


def through_the_host(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).relu()
    ticket = offload_start(hidden)
    other = weight.square().sum()
    host = offload_wait(ticket, hidden)
    ticket = reload_start(host, x.device)
    other = other + weight.sum().sin()
    return (reload_wait(ticket, host, x.device).sin() * x.sum(1, keepdim=True)).sum() + other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_whole_graph_compiles_with_right_gradients(backend: str, device: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 5, device=device, requires_grad=True)
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    plain = ((x @ weight).relu().sin() * x.sum(1, keepdim=True)).sum() + weight.square().sum() + weight.sum().sin()
    wanted = torch.autograd.grad(plain, (x, weight))
    for run in (through_the_host, torch.compile(through_the_host, fullgraph=True, backend=backend)):
        for _ in range(2):
            loss = run(x, weight)
            torch.testing.assert_close(loss, plain)
            torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_second_wait_is_a_second_tensor(device: str) -> None:
    x = torch.arange(8.0, device=device)
    ticket = offload_start(x)
    first = offload_wait(ticket, x)
    first.fill_(-1)  # whoever has a result may write it
    second = offload_wait(ticket, x)
    assert torch.equal(second, torch.arange(8.0))
    second.fill_(-2)
    assert torch.equal(x.cpu(), torch.arange(8.0)) and torch.equal(first, torch.full((8,), -1.0))
    ticket = reload_start(first, device)
    up = reload_wait(ticket, first, device)
    up.zero_()
    assert torch.equal(reload_wait(ticket, first, device).cpu(), first)
    # A ticket that was copied stands for the copy as well, also once the original has died.
    ticket = offload_start(x).clone()
    assert torch.equal(offload_wait(ticket, x), x.cpu())


def test_copies_from_several_threads_under_delays() -> None:
    ops.data_plane_inject("delay", 7, 300)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            x = torch.full((1000,), float(seed))
            for _ in range(10):
                ticket = offload_start(x)
                y = x + 1
                host = offload_wait(ticket, x)
                x = y
                assert host.eq(float(seed)).all()
                back = reload(host, "cpu")
                del host
                seed += 1
                assert torch.equal(back + 1, x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ops.data_plane_inject("delay", 0, 0)
    assert failures == []


def used_bytes() -> int:
    return _ops.host_stats()[2]


def test_results_and_unwaited_tickets_give_their_memory_back() -> None:
    at_rest()
    offload(torch.ones(1))  # what earlier tests left is over
    before = used_bytes()
    x = torch.randn(1 << 16)
    host = offload(x)
    assert used_bytes() >= before + x.nbytes
    view = host[5:9]
    del host
    assert torch.equal(view, x[5:9])
    del view
    assert used_bytes() == before
    tickets = [offload_start(x) for _ in range(3)]
    assert used_bytes() >= before + 3 * x.nbytes
    tickets.clear()
    gc.collect()
    offload(x)  # the copies before it are over
    assert used_bytes() == before


def test_a_failed_copy_is_an_error_and_the_next_one_works() -> None:
    x = torch.randn(100)
    ops.data_plane_inject("fail_copy", 0, 0)
    ticket = offload_start(x)
    with pytest.raises(errors.RoundPipeError, match="injected failure"):
        offload_wait(ticket, x)
    assert torch.equal(offload_wait(ticket, x), x)
    ops.data_plane_inject("fail_copy", 0, 0)
    ticket = reload_start(x, "cpu")
    with pytest.raises(errors.RoundPipeError, match="injected failure"):
        reload_wait(ticket, x, "cpu")
    assert torch.equal(reload_wait(ticket, x, "cpu"), x)


def test_misuse_is_explained() -> None:
    x = torch.randn(4)
    down, up = offload_start(x), reload_start(x, "cpu")
    cases = [
        (
            offload_wait,
            (down, torch.randn(5)),
            r"'x': expected what the start of this ticket was given, got Float\[5\]",
        ),
        (offload_wait, (down, x.double()), r"'x'.*got Double\[4\]"),
        (offload_wait, (up, x), "'x': expected what the start"),
        (reload_wait, (down, x, "cpu"), "'host': expected what the start"),
        (offload_wait, (torch.tensor(5), x), "'ticket'.*the number 5, which no operator has returned"),
        (offload_wait, (torch.tensor(0), x), "'ticket'.*0, which is no handle"),
        (offload_wait, (torch.zeros(2, dtype=torch.int64), x), "'ticket': expected the int64 tensor of one element"),
        (offload_wait, (torch.zeros(()), x), "'ticket': expected the int64 tensor of one element"),
        (reload_start, (x, "meta"), "'device': expected the CPU or a CUDA device"),
        (offload_start, (torch.eye(2).to_sparse(),), "SparseCPU"),
        (ops.data_plane_inject, ("fire", 0, 0), "'delay' or 'fail_copy', got 'fire'"),
        (ops.data_plane_inject, ("delay", 0, -1), "microseconds, got -1"),
        (ops.data_plane_close, (-1,), "'timeout_ms'"),
    ]
    assert {fn.__name__.rpartition(".")[2] for fn, _, _ in cases} == MISUSED
    for fn, args, message in cases:
        with pytest.raises((errors.ConfigError, RuntimeError), match=message):
            fn(*args)
    assert torch.equal(offload_wait(down, x), x) and torch.equal(reload_wait(up, x, "cpu"), x)


def test_the_process_ends_with_copies_under_way_and_a_fork_copies_itself() -> None:
    script = """
import os, torch
from roundpipe.data_plane import offload_start, offload_wait
torch.ops.roundpipe.data_plane_inject("delay", 1, 20000)
x = torch.randn(1000)
tickets = [offload_start(x) for _ in range(20)]
child = os.fork()
if child == 0:
    ok = torch.equal(offload_wait(tickets[0], x), x)
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.needs_cuda
def test_gpu_copies_follow_the_current_stream() -> None:
    size = 1 << 22
    side = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        with torch.cuda.stream(stream):
            for step in range(4):
                x = torch.zeros(size, device="cuda")
                torch.cuda._sleep(20_000_000)  # the copy must wait for what comes after it
                x += step
                ticket = offload_start(x)
                host = offload_wait(ticket, x)
                assert host.is_pinned() and host.eq(step).all()
                torch.cuda._sleep(20_000_000)
                ticket = reload_start(host, "cuda")
                y = reload_wait(ticket, host, "cuda")
                host.fill_(-1)
                assert y.add(1).eq(step + 1).all()
    assert torch.cuda.current_device() == 0
