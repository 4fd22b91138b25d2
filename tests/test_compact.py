"""Training with compact optimizers: the bits of a loop that is written by hand, in every mode and format."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import roundpipe
from roundpipe import RoundPipe, _ops, compact_step, optim
from roundpipe import engine as engines

from . import by_hand

STEPS = 8


@functools.cache
def expected(case: str, is_async: bool, steps: int = STEPS, **options: Any) -> Any:
    return by_hand.train_by_hand(case, steps, is_async, **options)


def train(
    case: str,
    is_async: bool,
    steps: int = STEPS,
    *,
    dtype: torch.dtype = torch.bfloat16,
    calls: int = 1,
    **options: Any,
) -> tuple[list[float], dict[str, torch.Tensor], RoundPipe, Any]:
    wrapped = RoundPipe(by_hand.make(case, dtype))
    optimizer = optim.AdamW(wrapped, **options)
    losses = []
    for number in range(steps):
        losses += [by_hand.run_call(wrapped, case, number * calls + k, dtype) for k in range(calls)]
        wrapped.step(optimizer, is_async)
    return losses, dict(optimizer.named_masters()), wrapped, optimizer


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert torch.equal(value, want[name]), f"{name} is off by {(value - want[name]).abs().max():.2e}"


@pytest.mark.parametrize("master", ["split", "float32"])
@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_a_tied_decoder_trains_as_by_hand(devices: int, is_async: bool, master: str) -> None:
    """Both kinds of masters have the same bits, and host weights are them, rounded."""
    losses, masters, _ = expected("decoder", is_async)
    roundpipe.use_devices(f"host:{devices}")
    _ops.engine_inject(engines.current().handle, "delay", devices, 300)
    got_losses, got_masters, wrapped, _ = train("decoder", is_async, master=master)
    assert got_losses == losses
    assert_same(got_masters, masters)
    for name, parameter in wrapped.model.named_parameters():
        assert torch.equal(parameter, by_hand.round_away(masters[name], torch.bfloat16)), name


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_random_delays_change_no_bit(devices: int) -> None:
    """Fifty seeds of delays before copies and updates on each number of devices; cases and modes in turn."""
    cases = [(case, is_async) for case in ("decoder", "mlp", "shared_module") for is_async in (False, True)]
    for case, is_async in cases:
        expected(case, is_async, steps=3)
    roundpipe.use_devices(f"host:{devices}")
    handle = engines.current().handle
    for seed in range(50):
        case, is_async = cases[(seed + devices) % 6]
        losses, masters, _ = expected(case, is_async, steps=3)
        _ops.engine_inject(handle, "delay", seed, (20, 60, 200)[seed % 3])
        try:
            got_losses, got_masters, wrapped, _ = train(case, is_async, steps=3)
            wrapped.synchronize()
        finally:
            _ops.engine_inject(handle, "delay", 0, 0)
        assert got_losses == losses, f"seed {seed}"
        assert_same(got_masters, masters)
        assert_same(
            dict(wrapped.model.named_parameters()),
            {name: by_hand.round_away(value, torch.bfloat16) for name, value in masters.items()},
        )


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("mlp", torch.float16),
        ("frozen", torch.float32),
        ("unused", torch.float16),
        ("odd_outputs", torch.float32),
    ],
)
def test_other_weights_and_traits(case: str, dtype: torch.dtype, is_async: bool) -> None:
    """Frozen parameters and those without a gradient stay; empty and 0-dim ones are trained as others."""
    losses, masters, _ = expected(case, is_async, dtype=dtype)
    roundpipe.use_devices("host:2")
    got_losses, got_masters, wrapped, optimizer = train(case, is_async, dtype=dtype)
    assert got_losses == losses
    assert_same(got_masters, masters)
    for name, parameter in wrapped.model.named_parameters():
        if not parameter.requires_grad:
            assert parameter not in optimizer.state, f"{name} is frozen and has a state"


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_accumulation_and_two_gradient_images(is_async: bool) -> None:
    losses, masters, _ = expected("mlp", is_async, steps=5, calls=3)
    roundpipe.use_devices("host:3")
    got_losses, got_masters, *_ = train("mlp", is_async, steps=5, calls=3)
    assert got_losses == losses
    assert_same(got_masters, masters)


def test_an_exact_step_is_torchs_within_rounding() -> None:
    losses, masters, _ = expected("mlp", False, dtype=torch.float32, make_update=by_hand.adamw_of_torch, lr=1e-2)
    roundpipe.use_devices("host:2")
    got_losses, got_masters, *_ = train("mlp", False, dtype=torch.float32, lr=1e-2)
    torch.testing.assert_close(got_losses, losses, rtol=1e-5, atol=1e-6)
    for name, value in got_masters.items():
        torch.testing.assert_close(value, masters[name], rtol=1e-5, atol=1e-6)


def sequences(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences with a rule and some noise, so that there is something to learn."""
    generator = torch.Generator().manual_seed(number)
    start, at = torch.randint(0, 11, (12, 1), generator=generator), torch.arange(9)
    rows = (start * 3 + at * 2 + (at % 3) * start) % 11
    noise = torch.rand(rows.shape, generator=generator) < 0.15
    rows = torch.where(noise, torch.randint(0, 11, rows.shape, generator=generator), rows)
    return rows[:, :-1], rows[:, 1:]


def test_compressed_moments_end_within_a_percent_of_float32() -> None:
    roundpipe.use_devices("host:1")
    results = {}
    for state_dtype in ("float32", "bfloat16", "int8"):
        wrapped = RoundPipe(by_hand.make("decoder"))
        wrapped.eval()
        optimizer = optim.AdamW(wrapped, lr=5e-3, state_dtype=state_dtype)
        losses = []
        for number in range(200):
            tokens, label = sequences(number)
            loss = wrapped.forward_backward((tokens,), label=label, loss_fn=by_hand.loss_of("decoder"))
            losses.append(float(loss))
            wrapped.step(optimizer, is_async=False)
        results[state_dtype] = sum(losses[-10:]) / 10
        assert results[state_dtype] < 0.75 * losses[0]
    assert results["float32"] != results["bfloat16"] != results["int8"]
    for state_dtype in ("bfloat16", "int8"):
        assert results[state_dtype] == pytest.approx(results["float32"], rel=0.01)


def test_modes_may_alternate() -> None:
    """An exact step after an asynchronous one sees its result, and so does inference."""
    roundpipe.use_devices("host:2")
    case, modes = "decoder", [True, False, True, True, False, False, True]
    wrapped = RoundPipe(by_hand.make(case))
    optimizer = optim.AdamW(wrapped)
    twin = RoundPipe(by_hand.make(case))
    named = dict(twin.model.named_parameters())
    masters = [p.detach().float().clone() for p in named.values()]
    update = by_hand.fused_adamw(masters)
    for number, is_async in enumerate(modes):
        assert by_hand.run_call(wrapped, case, number, torch.bfloat16) == by_hand.run_call(
            twin, case, number, torch.bfloat16
        )
        wrapped.step(optimizer, is_async)
        twin.synchronize()
        gradients = [p.grad.float() for p in named.values()]  # type: ignore[union-attr]
        twin.zero_grad()
        before = [by_hand.round_away(m, torch.bfloat16) for m in masters]
        update(gradients)
        after = [by_hand.round_away(m, torch.bfloat16) for m in masters]
        with torch.no_grad():
            for parameter, value in zip(named.values(), before if is_async else after, strict=True):
                parameter.copy_(value)
    assert_same(dict(optimizer.named_masters()), dict(zip(named, masters, strict=True)))


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("devices", [1, 3])
def test_clipping_by_the_exact_global_norm(devices: int, is_async: bool) -> None:
    losses, masters, norms = expected("decoder", is_async, max_grad_norm=0.5)
    assert max(norms) > 0.5
    roundpipe.use_devices(f"host:{devices}")
    got_losses, got_masters, _, optimizer = train("decoder", is_async, max_grad_norm=0.5)
    torch.testing.assert_close(got_losses, losses, rtol=1e-4, atol=1e-4)
    assert optimizer.grad_norm == pytest.approx(norms[-1], rel=1e-4)
    for name, value in got_masters.items():
        torch.testing.assert_close(value, masters[name], rtol=1e-3, atol=1e-4)


def test_a_norm_is_measured_without_clipping() -> None:
    losses, masters, _ = expected("decoder", False)
    *_, norms = expected("decoder", False, max_grad_norm=1e30)
    roundpipe.use_devices("host:2")
    got_losses, got_masters, _, optimizer = train("decoder", False, max_grad_norm=float("inf"))
    assert got_losses == losses
    assert_same(got_masters, masters)
    assert optimizer.grad_norm == pytest.approx(norms[-1], rel=1e-12)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_updates_go_in_the_order_in_which_the_next_iteration_waits(
    is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights from the first layer on; gradients, which the next backward writes again, from the last layer on. The
    tied embedding stands in both: it comes first in either order."""
    roundpipe.use_devices("host:1")
    order: list[tuple[int, ...]] = []
    find = compact_step.find_update

    def noting(memory: Any, unit: Any, *rest: Any) -> Any:
        order.append(unit.layers)
        return find(memory, unit, *rest)

    monkeypatch.setattr(compact_step, "find_update", noting)
    wrapped = train("decoder", is_async, steps=1)[2]
    wrapped.synchronize()
    tied = next(layers for layers in order if len(layers) > 1)
    assert {tied[0], tied[-1]} == {0, wrapped.num_layers - 1}
    place = [layers[-1] if is_async else layers[0] for layers in order]
    assert place == sorted(place, reverse=is_async) and len(order) > 3
    assert place.index(place[0]) <= order.index(tied) <= place.count(place[0])
