"""Ctrl-C ends a wait within a second and costs one call; a layer that hangs becomes an error with the counters."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import StallError
from roundpipe.interrupts import uninterrupted
from roundpipe.optimizer_thread import thread as optimizer_thread

from . import oracle
from .faults import Trap, plan_of
from .test_failures import batch, config, make, mse, run, run_plain, trap_of


def interrupt_after(seconds: float, waits_for: threading.Event | None = None) -> threading.Thread:
    """Sends SIGINT to the main thread, as the terminal does, after ``waits_for`` and ``seconds``."""
    main = threading.main_thread().ident
    assert main is not None

    def send() -> None:
        if waits_for is not None:
            assert waits_for.wait(30)
        time.sleep(seconds)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def release_after(seconds: float, trap: Trap) -> None:
    threading.Timer(seconds, trap.release).start()


@contextlib.contextmanager
def short_waits() -> Iterator[None]:
    """Ctrl-C ends a wait within a second if the main thread never waits for longer at a time: how long it then takes is
    the machine's business."""
    optimizer_thread.submit(lambda: None)  # starts it: that is a wait of Python's own, without a limit
    limits_s: list[float | None] = [_ops._SLICE_MS / 1e3]
    wait = threading.Condition.wait

    def noting(self: threading.Condition, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            limits_s.append(timeout)
        return wait(self, timeout)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Condition, "wait", noting)
        try:
            yield
        finally:
            assert all(limit is not None and limit <= 1.0 for limit in limits_s), limits_s


LIMIT_S = 0.7


def slow_clock(patched: pytest.MonkeyPatch, runs: Callable[[], bool]) -> Iterator[float]:
    """Stands still for watchdogs with a limit of ``LIMIT_S`` until ``runs``; then each look at it takes 0.3 s."""
    clock = itertools.count(0.0, 0.3)
    patched.setenv("ROUNDPIPE_STALL_SECONDS", str(LIMIT_S))
    patched.setattr(engines, "time", SimpleNamespace(monotonic=lambda: next(clock) if runs() else 0.0))
    return clock


@pytest.mark.parametrize(("kind", "layer"), [("forward", 1), ("forward", 4), ("recompute", 0)])
def test_ctrl_c_ends_a_wait_and_the_model_goes_on(kind: str, layer: int) -> None:
    wrapped, plain = make(2)
    run(wrapped, 0)
    run_plain(plain, 0)
    trap = trap_of(wrapped, layer)
    trap.arm(kind, 1, hangs=True)
    sender = interrupt_after(0.2, trap.sprung)
    with pytest.raises(KeyboardInterrupt), short_waits():
        run(wrapped, 1)
    assert trap.hanging, "the wait ended with the layer, not by Ctrl-C"
    sender.join()
    release_after(0.2, trap)
    wrapped.synchronize()  # waits for the layer, and has nothing to raise
    assert not trap.hanging
    trap.disarm()
    run(wrapped, 2)
    run_plain(plain, 2)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


def test_ctrl_c_ends_every_wait_for_the_same_layer() -> None:
    wrapped, _ = make(1)
    trap = trap_of(wrapped, 2)
    trap.arm("forward", 0, hangs=True)
    sender = interrupt_after(0.3, trap.sprung)
    with pytest.raises(KeyboardInterrupt), short_waits():
        run(wrapped, 0)
    sender.join()
    for _ in range(2):
        waits = threading.Event()
        sender = interrupt_after(0.3, waits)
        with pytest.raises(KeyboardInterrupt), short_waits():
            waits.set()
            wrapped.synchronize()
        sender.join()
    assert trap.hanging
    trap.disarm()
    wrapped.synchronize()


def test_ctrl_c_during_a_synchronous_step() -> None:
    """The step goes on and its result counts; only the wait ended."""
    wrapped, plain = make(2)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    started, go_on = threading.Event(), threading.Event()
    in_time = []

    def step() -> None:
        started.set()
        in_time.append(go_on.wait(Trap.PATIENCE_S))
        optimizer.step()
        optimizer.zero_grad()

    run(wrapped, 0)
    sender = interrupt_after(0.1, started)
    with pytest.raises(KeyboardInterrupt), short_waits():
        wrapped.step(step, is_async=False)
    assert not in_time
    go_on.set()
    sender.join()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    run_plain(plain, 0)
    plain_optimizer.step()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain)


def test_ctrl_c_at_any_moment_leaks_nothing_and_loses_nothing() -> None:
    """Calls, steps and waits are struck at random; afterwards the model computes as one that never was."""
    wrapped, plain = make(3)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    run(wrapped, 0)
    wrapped.zero_grad()
    gc.collect()
    engines.current().wait_idle()
    before = _ops.engine_live(engines.current().handle)
    generator = random.Random(0)
    struck = 0
    deadline = time.monotonic() + 4.0
    while time.monotonic() < deadline:
        try:
            with uninterrupted():  # or it could strike in here, on a slow machine
                sender = interrupt_after(generator.random() * 0.12)
            began = time.monotonic()
            try:
                while time.monotonic() - began < 2.0:
                    run(wrapped, 1)
                    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=generator.random() < 0.5)
            finally:
                sender.join()
        except KeyboardInterrupt:
            struck += 1
    assert struck >= 5
    wrapped.synchronize()
    wrapped.zero_grad()
    with torch.no_grad():
        for buffer, other in zip(wrapped.model.buffers(), plain.buffers(), strict=True):
            buffer.copy_(other)
    run(wrapped, 2)
    run_plain(plain, 2)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)
    gc.collect()
    engines.current().wait_idle()
    after = _ops.engine_live(engines.current().handle)
    assert after[3] == 0
    assert after[0] == before[0] and after[4] == before[4], (before, after)


def test_uninterrupted_blocks_hold_ctrl_c_back() -> None:
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
        reached = True
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, old)
    result = []
    thread = threading.Thread(target=lambda: uninterrupted().__enter__() or result.append(True))
    thread.start()
    thread.join()
    assert result and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_watchdog_names_the_stuck_layer_and_the_counters(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, plain = make(2)
    run(wrapped, 0)
    run_plain(plain, 0)
    wrapped.synchronize()
    trap = trap_of(wrapped, 2)
    trap.arm(kind, 1, hangs=True)
    with monkeypatch.context() as patched, pytest.raises(StallError) as caught:
        clock = slow_clock(patched, lambda: trap.hanging)
        run(wrapped, 1)
        wrapped.synchronize()
    assert trap.hanging and next(clock) >= LIMIT_S
    stuck = "forward stage 1, layers 1-2" if kind == "forward" else "backward stage 1, layers 1-2"
    line = next(line for line in caught.value.counters.splitlines() if stuck in line)
    assert "on host:" in line and "microbatch 1" in line, caught.value.counters
    assert "completed" in caught.value.counters and "ROUNDPIPE_STALL_SECONDS" in str(caught.value)
    trap.disarm()
    wrapped.synchronize()
    run(wrapped, 2)
    run_plain(plain, 2)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)


def test_watchdog_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(torch.nn.Sequential(torch.nn.Linear(6, 6)))
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    x, label = batch(0)
    wrapped.forward_backward((x,), label=label, loss_fn=mse)
    wrapped.synchronize()
    started, go_on = threading.Event(), threading.Event()
    with monkeypatch.context() as patched, pytest.raises(StallError, match="optimizer thread"):
        slow_clock(patched, started.is_set)
        wrapped.step(lambda: (started.set(), go_on.wait(Trap.PATIENCE_S), optimizer.step()), is_async=False)
    go_on.set()
    wrapped.synchronize()


def test_caller_may_draw_beside_a_recompute() -> None:
    """The recompute of a layer that draws nothing leaves the caller's random numbers alone."""
    wrapped, _ = make(2)
    for layer in wrapped.model:
        layer.drop.p = 0.0
    x, label = batch(0)
    trap = trap_of(wrapped, 0)
    trap.arm("recompute", 0, hangs=True)
    torch.manual_seed(7)
    wrapped.forward_backward((x,), label=label, loss_fn=mse, run_config=config())
    assert trap.sprung.wait(Trap.PATIENCE_S)
    torch.manual_seed(3)
    got = torch.rand(4)
    trap.release()
    wrapped.synchronize()
    got = torch.cat([got, torch.rand(4)])
    torch.manual_seed(3)
    assert torch.equal(got, torch.cat([torch.rand(4), torch.rand(4)]))


def test_ctrl_c_in_a_backward_of_the_callers() -> None:
    """``loss.backward()`` waits for input gradients; struck there, the call is dropped."""
    wrapped, plain = make(2)
    x, label = batch(0)
    plan = plan_of([(0, 2), (2, 5)], [(3, 5), (0, 3)])
    both = RoundPipeRunConfig(num_microbatch=3, execute_plan=plan)
    x.requires_grad_()
    trap = trap_of(wrapped, 1)
    out = wrapped(x, roundpipe_run_config=both)
    trap.arm("backward", 1, hangs=True)
    sender = interrupt_after(0.2, trap.sprung)
    with pytest.raises(KeyboardInterrupt), short_waits():
        mse(out, label).backward()
    assert trap.hanging
    sender.join()
    trap.disarm()
    wrapped.synchronize()
    assert x.grad is None and all(p.grad is None for p in wrapped.model.parameters())
    run(wrapped, 2)
    run_plain(plain, 2)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
