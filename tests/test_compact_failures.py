"""Failures around compact steps: what fails leaves weights and state as they were, and training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops, errors, optim
from roundpipe import engine as engines
from roundpipe.errors import RoundPipeError

from .at_rest import at_rest
from .faults import five_layer_plan, plan_of, trapped_model
from .test_failures import batch, mse

PLAN = plan_of([(0, 1), (1, 2)], [(2, 3), (1, 2), (0, 1)])


def make(devices: int, layers: int = 3, **options: Any) -> tuple[RoundPipe, Any]:
    roundpipe.use_devices(f"host:{devices}")
    wrapped = RoundPipe(trapped_model(layers).bfloat16())
    return wrapped, optim.AdamW(wrapped, lr=1e-2, **options)


def run(wrapped: RoundPipe, seed: int) -> float:
    x, label = batch(seed)
    torch.manual_seed(seed)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=PLAN if wrapped.num_layers == 3 else five_layer_plan())
    loss = wrapped.forward_backward(
        (x.bfloat16(),), label=label, loss_fn=lambda out, want: mse(out.float(), want), run_config=config
    )
    return float(loss)


def everything(wrapped: RoundPipe, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in wrapped.state_dict().items()}
    found |= {f"master {name}": value for name, value in optimizer.named_masters()}
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"{name} {key}": value.clone() for name, value in state.items()}
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == []


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("devices", [1, 2])
def test_copies_fail_while_steps_are_taken(devices: int, is_async: bool) -> None:
    """An iteration that failed is run again, and all is as if it had never failed."""
    wrapped, optimizer = make(devices, max_grad_norm=1.0)
    handle = engines.current().handle

    def iterate(seed: int) -> None:
        run(wrapped, seed)
        wrapped.step(optimizer, is_async)
        wrapped.synchronize()  # raises what failed after the call returned

    failures = 0
    for seed in range(16):
        buffers = [buffer.clone() for buffer in wrapped.model.buffers()]
        _ops.engine_inject(handle, "fail_copy", 5 * seed + 2, 0)
        try:
            iterate(seed)
        except RoundPipeError:
            failures += 1
            _ops.engine_inject(handle, "fail_copy", -1, 0)
            wrapped.zero_grad()
            for buffer, before in zip(wrapped.model.buffers(), buffers, strict=True):
                buffer.copy_(before)  # a forward that returned before the failure has written its statistics
            iterate(seed)
        _ops.engine_inject(handle, "fail_copy", -1, 0)
    assert failures > 5
    got = everything(wrapped, optimizer)
    twin, other = make(devices, max_grad_norm=1.0)
    for seed in range(16):
        run(twin, seed)
        twin.step(other, is_async)
        twin.synchronize()
    assert_equal(got, everything(twin, other))


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_backward_that_fails_after_the_step_was_dispatched(devices: int, is_async: bool) -> None:
    """The step that waits for it does not happen; that of the iteration before is published all the same."""
    results = []
    for fails in (False, True):
        wrapped, optimizer = make(devices, layers=5)
        run(wrapped, 0)
        wrapped.step(optimizer, is_async)
        if fails:
            trap = wrapped.model[0].trap
            trap.arm("backward", 1, RuntimeError("no backward"))
            with pytest.raises(RoundPipeError, match="no backward"):
                run(wrapped, 7)
                wrapped.step(optimizer, is_async)
                wrapped.synchronize()
            trap.disarm()
        wrapped.synchronize()
        run(wrapped, 1)
        wrapped.step(optimizer, is_async)
        wrapped.synchronize()
        found = everything(wrapped, optimizer)
        results.append({name: value for name, value in found.items() if "running" not in name and "num_b" not in name})
    assert_equal(*results)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_a_norm_that_is_not_finite_is_an_error_on_request(is_async: bool) -> None:
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = optim.AdamW(wrapped, lr=0.1, max_grad_norm=1.0, error_if_nonfinite=True)

    def call(scale: float) -> None:
        wrapped.forward_backward((torch.ones(4, 4),), loss_fn=lambda out, _: (out * scale).sum())

    call(1.0)
    wrapped.step(optimizer, is_async)
    before = everything(wrapped, optimizer)
    call(float("inf"))
    wrapped.step(optimizer, is_async)
    with pytest.raises(RoundPipeError, match=r"norm of all gradients is (inf|nan).*error_if_nonfinite"):
        wrapped.synchronize()
    assert_equal(everything(wrapped, optimizer), before)
    call(1.0)
    wrapped.step(optimizer, is_async)
    after = everything(wrapped, optimizer)
    assert after["step 0"] == 2 and after["0.weight"].isfinite().all()
    optimizer.error_if_nonfinite = False  # as torch: the weights show it
    call(float("nan"))
    wrapped.step(optimizer, is_async)
    assert everything(wrapped, optimizer)["0.weight"].isnan().all()
    assert optimizer.grad_norm != optimizer.grad_norm


def test_an_engine_that_closes_ends_steps_whole() -> None:
    """use_devices while a step runs: it ends well on the old devices, and training goes on on the new ones."""
    results = []
    for changes in (False, True):
        wrapped, optimizer = make(2)
        for number in range(4):
            run(wrapped, number)
            wrapped.step(optimizer, is_async=number != 2)
            if changes:
                roundpipe.use_devices(f"host:{1 + number % 3}")
        results.append(everything(wrapped, optimizer))
    assert_equal(*results)


def test_no_memory_for_the_state_leaves_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, optimizer = make(1)
    run(wrapped, 0)

    def refuse(size: Any, dtype: Any) -> Any:
        raise errors.HostOutOfMemory("none left")

    with monkeypatch.context() as patched:
        patched.setattr(_ops, "host_empty", refuse)
        with pytest.raises(errors.HostOutOfMemory):
            wrapped.step(optimizer, False)
    wrapped.step(optimizer, False)
    got = everything(wrapped, optimizer)
    twin, other = make(1)
    run(twin, 0)
    twin.step(other, False)
    assert_equal(got, everything(twin, other))


def test_an_optimizer_that_is_gone_frees_its_memory() -> None:
    wrapped, optimizer = make(1, layers=3)
    run(wrapped, 0)
    wrapped.step(optimizer, True)
    wrapped.synchronize()
    at_rest()
    used = _ops.host_stats()[2]
    del optimizer
    at_rest()
    assert _ops.host_stats()[2] < used
    wrapped.synchronize()
