"""Every single copy of a small model fails once: a typed error or success, and the next call is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import RoundPipeError, StageError

from . import oracle
from .faults import plan_of
from .test_failures import batch, live_after_gc, make, mse


def small_config(grain: str) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain, execute_plan=plan_of([(0, 1)], [(1, 3), (0, 1)]))


def run(wrapped: RoundPipe, seed: int, grain: str) -> Any:
    x, label = batch(seed)
    torch.manual_seed(seed)
    return wrapped.forward_backward((x,), label=label, loss_fn=mse, run_config=small_config(grain))


def run_plain(plain: nn.Sequential, seed: int) -> Any:
    x, label = batch(seed)
    torch.manual_seed(seed)
    return oracle.forward_backward(list(plain), (x,), label=label, loss_fn=mse, num_microbatch=2)


def check_error(error: RoundPipeError) -> None:
    assert isinstance(error, StageError) and error.phase is not None, error
    assert error.__cause__ is not None and not isinstance(error.__cause__, _ops.Poisoned), error
    assert "copy" in str(error) and "host:" in str(error), error


@pytest.mark.parametrize(("devices", "grain"), [(2, "layer"), (3, "stage")])
def test_every_copy_fails_once(devices: int, grain: str) -> None:
    roundpipe.use_devices(f"host:{devices}")
    engines.current()
    before = live_after_gc()
    wrapped, plain = make(devices, layers=3)
    run(wrapped, 0, grain)
    run_plain(plain, 0)
    wrapped.synchronize()
    handle = engines.current().handle
    failures = 0
    streak = 0
    n = 0
    while streak < 3:  # three numbers in a row beyond the last copy of a call
        _ops.engine_inject(handle, "fail_copy", n, 0)
        try:
            run(wrapped, 1, grain)
            wrapped.synchronize()
            streak += 1
            run_plain(plain, 1)
        except RoundPipeError as error:
            check_error(error)
            failures += 1
            streak = 0
        finally:
            _ops.engine_inject(handle, "fail_copy", -1, 0)
        n += 1
    assert failures > 30, failures
    oracle.assert_same_state(wrapped.model, plain, 0.0)
    run(wrapped, 2, grain)
    run_plain(plain, 2)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)
    del wrapped
    assert live_after_gc() == before


@pytest.mark.parametrize("devices", [1, 2])
def test_copies_fail_while_steps_are_taken(devices: int) -> None:
    """Asynchronous training; an iteration that failed is run again, and all is as if it had never failed."""
    wrapped, plain = make(devices, layers=3)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    handle = engines.current().handle

    def iteration(seed: int) -> None:
        run(wrapped, seed, "stage")
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    for seed in range(14):
        _ops.engine_inject(handle, "fail_copy", 5 * seed + 2, 0)
        try:
            iteration(seed)
        except RoundPipeError:
            _ops.engine_inject(handle, "fail_copy", -1, 0)
            wrapped.zero_grad()
            iteration(seed)
        _ops.engine_inject(handle, "fail_copy", -1, 0)
        run_plain(plain, seed)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain, 1e-6)


def test_copies_of_inference_fail() -> None:
    wrapped, plain = make(2, layers=3)
    wrapped.eval()
    plain.eval()
    x, _ = batch(0)
    handle = engines.current().handle
    want = plain(x).detach()
    failures = 0
    for n in range(40):
        _ops.engine_inject(handle, "fail_copy", n, 0)
        with torch.no_grad():
            try:
                got = wrapped(x)
            except RoundPipeError as error:
                failures += 1
                check_error(error)
                _ops.engine_inject(handle, "fail_copy", -1, 0)
                got = wrapped(x)
        oracle.assert_close_to_scale(got, want, "output")
    _ops.engine_inject(handle, "fail_copy", -1, 0)
    assert failures > 10
    roundpipe.use_devices("host:1")
