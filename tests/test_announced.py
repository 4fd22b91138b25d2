"""Steps announced with their call: the results of exact steps, earlier; and what a failure leaves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops, errors, optim
from roundpipe import engine as engines
from roundpipe.errors import PartialStepError, RoundPipeError

from . import by_hand
from .faults import five_layer_plan, trapped_model
from .plans import one_layer_stages
from .test_failures import batch, mse

STEPS = 6


@functools.cache
def expected(case: str) -> Any:
    return by_hand.train_by_hand(case, STEPS, False)


def announce(wrapped: RoundPipe, optimizer: Any, case: str, number: int, dtype: torch.dtype, calls: int = 1) -> float:
    for call in range(calls - 1):
        by_hand.run_call(wrapped, case, number * calls + call, dtype)
    args, label = by_hand.batch_of(case, 6, number * calls + calls - 1, dtype)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(wrapped.num_layers))
    loss = wrapped.forward_backward(args, label=label, loss_fn=by_hand.loss_of(case), run_config=config, step=optimizer)
    return float(loss)


@pytest.mark.parametrize("case", ["decoder", "unused", "frozen", "shared_module"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_results_are_those_of_exact_steps(devices: int, case: str) -> None:
    losses, masters, _ = expected(case)
    roundpipe.use_devices(f"host:{devices}")
    _ops.engine_inject(engines.current().handle, "delay", devices, 300)
    wrapped = RoundPipe(by_hand.make(case))
    optimizer = optim.AdamW(wrapped)
    got = [announce(wrapped, optimizer, case, number, torch.bfloat16) for number in range(STEPS)]
    assert got == losses
    found = dict(optimizer.named_masters())
    assert [name for name in masters if not torch.equal(found[name], masters[name])] == []


@pytest.mark.filterwarnings("error")
def test_it_takes_the_whole_window_and_may_alternate_with_other_steps() -> None:
    roundpipe.use_devices("host:3")
    results = []
    for announced in (False, True):
        wrapped = RoundPipe(by_hand.make("mlp"))
        optimizer = optim.AdamW(wrapped, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses: list[float] = []
        for number in range(6):
            if number % 3 == 2:  # an asynchronous result is published before an announced call computes
                losses.append(by_hand.run_call(wrapped, "mlp", 2 * number, torch.bfloat16))
                wrapped.step(optimizer, is_async=True)
                if not announced:
                    wrapped.synchronize()
                continue
            calls = 1 + number % 3
            if announced:
                losses.append(announce(wrapped, optimizer, "mlp", number, torch.bfloat16, calls))
            else:
                numbers = range(number * calls, (number + 1) * calls)
                losses += [by_hand.run_call(wrapped, "mlp", k, torch.bfloat16) for k in numbers][-1:]
                wrapped.step(optimizer, is_async=False)
            scheduler.step()
        wrapped.synchronize()
        results.append((losses, dict(optimizer.named_masters())))
    assert results[0][0] == results[1][0]
    assert [name for name, value in results[0][1].items() if not torch.equal(value, results[1][1][name])] == []


def run(wrapped: RoundPipe, seed: int, optimizer: Any) -> float:
    x, label = batch(seed)
    torch.manual_seed(seed)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=five_layer_plan())
    return float(
        wrapped.forward_backward(
            (x.bfloat16(),),
            label=label,
            loss_fn=lambda out, want: mse(out.float(), want),
            run_config=config,
            step=optimizer,
        )
    )


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(("layer", "kind"), [(0, "backward"), (4, "forward")])
def test_a_failure_says_whether_layers_were_updated(devices: int, layer: int, kind: str) -> None:
    """In the lowest layer's backward the upper ones are updated already; in the forward nothing is."""
    roundpipe.use_devices(f"host:{devices}")
    wrapped = RoundPipe(trapped_model(5, dropout=0.0).bfloat16())
    optimizer = optim.SGD(wrapped, lr=0.1)
    run(wrapped, 0, optimizer)
    wrapped.synchronize()
    before = {name: p.detach().clone() for name, p in wrapped.model.named_parameters()}
    trap = wrapped.model[layer].trap
    trap.arm(kind, 1, ValueError("no more"))
    with pytest.raises(RoundPipeError, match="no more") as caught:
        run(wrapped, 1, optimizer)
        wrapped.synchronize()
    trap.disarm()
    changed = {
        int(name.split(".")[0]) for name, p in wrapped.model.named_parameters() if not torch.equal(p, before[name])
    }
    if kind == "backward":
        assert isinstance(caught.value, PartialStepError) and isinstance(caught.value.__cause__, RoundPipeError)
        assert set(caught.value.layers) == changed and {3, 4} <= changed and 0 not in changed
    else:
        assert not isinstance(caught.value, PartialStepError) and not changed
    run(wrapped, 2, optimizer)
    wrapped.synchronize()
    assert not torch.equal(wrapped.model[0].linear.weight, before["0.linear.weight"])


def test_a_failure_before_any_update_keeps_the_windows_earlier_calls() -> None:
    roundpipe.use_devices("host:2")
    results = []
    for fails in (False, True):
        wrapped = RoundPipe(trapped_model(5, dropout=0.0).bfloat16())
        optimizer = optim.SGD(wrapped, lr=0.1)
        run(wrapped, 0, None)
        if fails:
            wrapped.model[4].trap.arm("forward", 0, ValueError("no more"))
            with pytest.raises(RoundPipeError, match="no more"):
                run(wrapped, 7, optimizer)
            wrapped.model[4].trap.disarm()
        run(wrapped, 1, optimizer)
        wrapped.synchronize()
        results.append({name: p.detach().clone() for name, p in wrapped.model.named_parameters()})
    assert [name for name, value in results[0].items() if not torch.equal(value, results[1][name])] == []


def test_weights_asked_for_through_the_model_are_complete() -> None:
    roundpipe.use_devices("host:1")
    wrapped, twin = RoundPipe(by_hand.make("mlp")), RoundPipe(by_hand.make("mlp"))
    _ops.engine_inject(engines.current().handle, "delay", 3, 10000)
    announce(wrapped, optim.SGD(wrapped, lr=0.1), "mlp", 0, torch.bfloat16)
    seen = wrapped.model[0].weight.clone()
    _ops.engine_inject(engines.current().handle, "delay", 3, 0)
    other = optim.SGD(twin, lr=0.1)
    by_hand.run_call(twin, "mlp", 0, torch.bfloat16)
    twin.step(other, is_async=False)
    twin.synchronize()
    assert torch.equal(seen, twin.model[0].weight)


def test_a_scaled_loss_is_refused() -> None:
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(by_hand.make("mlp"))
    optimizer, scaler = optim.SGD(wrapped, lr=0.1), roundpipe.GradScaler()
    before = wrapped.model[0].weight.clone()
    args, label = by_hand.batch_of("mlp", 6, 0, torch.bfloat16)
    loss_fn = by_hand.loss_of("mlp")
    with pytest.raises(RoundPipeError, match="nothing could be unscaled"):
        wrapped.forward_backward(args, label=label, loss_fn=lambda o, y: scaler.scale(loss_fn(o, y)), step=optimizer)
    assert torch.equal(wrapped.model[0].weight, before)
    wrapped.forward_backward(args, label=label, loss_fn=lambda o, y: scaler.scale(loss_fn(o, y)))
    wrapped.step(optimizer, False, scaler=scaler)
    wrapped.synchronize()
    assert wrapped.model[0].weight.isfinite().all() and not torch.equal(wrapped.model[0].weight, before)


def test_what_cannot_be_announced() -> None:
    roundpipe.use_devices("host:1")
    wrapped, other = RoundPipe(by_hand.make("mlp")), RoundPipe(by_hand.make("mlp"))
    clipped = optim.AdamW(wrapped, max_grad_norm=1.0)
    for step, message in ((clipped, "max_grad_norm = None"), (optim.AdamW(other), "was made for"), (3, "got int")):
        with pytest.raises(errors.ConfigError, match=message):
            announce(wrapped, step, "mlp", 0, torch.bfloat16)
    clipped.max_grad_norm = None
    announce(wrapped, clipped, "mlp", 0, torch.bfloat16)
    wrapped.synchronize()


def lone_layer() -> tuple[RoundPipe, Any]:
    """One trained layer above a frozen one, so that its gradients are the only ones to come down."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)).bfloat16()
    wrapped = RoundPipe(layers)
    return wrapped, optim.AdamW(wrapped, lr=1e-2)


def lone_call(wrapped: RoundPipe, optimizer: Any, seed: int) -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(2))
    loss_fn = lambda out, _: out.float().square().sum()  # noqa: E731
    wrapped.forward_backward((x,), loss_fn=loss_fn, run_config=config, step=optimizer)
    wrapped.synchronize()


def all_state(wrapped: RoundPipe, optimizer: Any) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and the numbers of steps, of which Adam's corrections depend."""
    found = {name: value.clone() for name, value in wrapped.state_dict().items()} | dict(optimizer.named_masters())
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"{name} {key}": value.clone() for name, value in state.items()}
    return found


@pytest.mark.parametrize("fails", ["copies", "submission"])
def test_an_update_that_did_not_happen_is_not_counted(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy of a call fails in turn, or the update cannot be queued: the same call made again is the first one."""
    roundpipe.use_devices("host:1")
    handle = engines.current().handle
    twin = lone_layer()
    lone_call(*twin, 0)
    first = all_state(*twin)
    lone_call(*twin, 1)
    second = all_state(*twin)
    assert {float(value) for name, value in first.items() if name.startswith("step ")} == {1.0}
    counted: list[Any] = []  # updates that were given a number of steps and then did not happen
    submit = _ops.job_gradients_update

    def noted(*args: Any) -> int:
        counted.append(args)
        if fails == "submission":
            raise RoundPipeError("not now")
        return submit(*args)

    undone: set[bool] = set()
    number, rounds = -1, 0
    while rounds < 20 and True not in undone:  # the gradients' copy has another number in each round
        number += 1
        wrapped, optimizer = lone_layer()
        lone_call(wrapped, optimizer, 0)
        counted.clear()
        _ops.engine_inject(handle, "fail_copy", number if fails == "copies" else -1, 0)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(_ops, "job_gradients_update", noted)
                lone_call(wrapped, optimizer, 1)
        except PartialStepError:  # the loss did not come down; the layer was updated
            continue
        except RoundPipeError:
            undone.add(bool(counted))
        else:  # a call has no more copies than that
            number, rounds = -1, rounds + 1
            continue
        finally:
            _ops.engine_inject(handle, "fail_copy", -1, 0)
        got = all_state(wrapped, optimizer)
        assert [name for name, value in got.items() if not torch.equal(value, first[name])] == [], number
        lone_call(wrapped, optimizer, 1)
        got = all_state(wrapped, optimizer)
        assert [name for name, value in got.items() if not torch.equal(value, second[name])] == [], number
    assert True in undone


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_that_fails_after_its_step_says_that_the_step_was_taken(devices: int) -> None:
    """The caller's own function raises when every layer was updated: whoever repeats the call would step twice."""
    roundpipe.use_devices(f"host:{devices}")
    twin = lone_layer()
    for seed in range(2):
        lone_call(*twin, seed)
    want = all_state(*twin)
    wrapped, optimizer = lone_layer()
    lone_call(wrapped, optimizer, 0)

    def merge(outputs: list[Any]) -> Any:
        wrapped._state.drain()
        raise ValueError("no output")

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(2), merge_output=merge)
    with pytest.raises(ValueError, match="no output"):
        wrapped.forward_backward(
            (x,), loss_fn=lambda out, _: out.float().square().sum(), run_config=config, step=optimizer,
            return_outputs=True,
        )  # fmt: skip
    with pytest.raises(PartialStepError, match=r"layers 1: .*checkpoint") as caught:
        wrapped.synchronize()
    assert caught.value.layers == (1,) and isinstance(caught.value.__cause__, ValueError)
    got = all_state(wrapped, optimizer)
    assert [name for name, value in got.items() if not torch.equal(value, want[name])] == []
    lone_call(wrapped, optimizer, 2)
    lone_call(*twin, 2)
    got, want = all_state(wrapped, optimizer), all_state(*twin)
    assert [name for name, value in got.items() if not torch.equal(value, want[name])] == []
