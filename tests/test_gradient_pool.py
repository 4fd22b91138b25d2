"""Gradients of announced steps pass through a pool: results are those of exact steps, the images go and come back, and
what fails gives everything back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops, gradient_pool, optim
from roundpipe import engine as engines
from roundpipe.errors import RoundPipeError

from .plans import one_layer_stages, random_fused_plan

ROWS, WORDS, WIDTH = 4, 17, 8


class Head(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def uneven(seed: int) -> nn.Sequential:
    """A tied embedding of many elements below and above layers of all sizes, one of them frozen and one without
    parameters."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    embedding = nn.Embedding(WORDS, WIDTH)
    inner: list[nn.Module] = []
    for _ in range(rng.randint(2, 4)):
        hidden = rng.choice([1, 5, 40, 120])
        inner.append(nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH, bias=False)))
    inner.insert(rng.randrange(len(inner)), nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    inner.insert(rng.randrange(len(inner)), nn.Tanh())
    return nn.Sequential(embedding, *inner, Head(embedding)).bfloat16()


def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float().flatten(0, 1), label.flatten(), reduction="sum") / 12


def call(wrapped: RoundPipe, number: int, plan: ModelExecutePlan, step: Any = None) -> float:
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(0, WORDS, (ROWS, 4), generator=generator)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    loss = wrapped.forward_backward((words[:, :-1],), label=words[:, 1:], loss_fn=loss_fn, run_config=config, step=step)
    return float(loss)


def refused(wrapped: RoundPipe) -> int:
    """How often a download found no room in the pool."""
    handle = wrapped._state.gradient_pool.handle
    return _ops.gradient_pool_stats(handle)[4] if handle else 0


def everything(wrapped: RoundPipe, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in wrapped.state_dict().items()}
    found |= {f"master {name}": value for name, value in optimizer.named_masters()}
    for key, state in optimizer.state_dict()["state"].items():
        found |= {f"{name} {key}": value.clone() for name, value in state.items()}
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], what: str = "") -> None:
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == [], what


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_announced_steps_are_exact_ones_bit_for_bit(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models, plans, delays and sizes of the pool of many seeds; one place is the smallest pool there is."""
    waited = 0
    for seed in range(50)[devices - 1 :: 4]:
        rng = random.Random(seed)
        more = rng.choice([1 - devices, 1 - devices, 0, 2])
        monkeypatch.setattr(gradient_pool, "PLACES_BESIDE_DEVICES", more)
        delay_us = (
            1500 if more == 1 - devices and seed // 4 % 2 else 60
        )  # where copies are slow, downloads wait for a place
        plan = random_fused_plan(len(uneven(seed)), seed) if seed % 3 else one_layer_stages(len(uneven(seed)))
        calls = rng.choice([1, 1, 2, 3])
        state_dtype = rng.choice(["float32", "float32", "int8"])
        results = []
        for announced in (True, False):
            roundpipe.use_devices(f"host:{devices}")
            wrapped = RoundPipe(uneven(seed))
            optimizer = optim.AdamW(wrapped, lr=1e-2, state_dtype=state_dtype)
            if announced:
                _ops.engine_inject(engines.current().handle, "delay", seed, delay_us)
            losses = []
            for step in range(2):
                for k in range(calls):
                    last = k == calls - 1 and announced
                    losses.append(call(wrapped, 100 * seed + step * calls + k, plan, optimizer if last else None))
                if not announced:
                    wrapped.step(optimizer, is_async=False)
            waited += refused(wrapped)
            wrapped.synchronize()
            assert all(p.grad is None for p in wrapped.model.parameters())
            results.append((losses, everything(wrapped, optimizer)))
            _ops.engine_inject(engines.current().handle, "delay", seed, 0)
        assert results[0][0] == results[1][0], f"seed {seed}"
        assert_equal(results[0][1], results[1][1], f"seed {seed}")
    assert waited > 0, "no download ever waited for a place"


def bytes_of(wrapped: RoundPipe) -> tuple[int, int]:
    """(gradient images, pool)."""
    state = wrapped._state
    return sum(unit.host_gradient_bytes for unit in state.units), state.gradient_pool.host_bytes


def test_images_go_and_come_back() -> None:
    roundpipe.use_devices("host:2")
    results = []
    for announces in (True, False):
        layers = [nn.Linear(64, 64, bias=False) for _ in range(12)]
        torch.manual_seed(0)
        for layer in layers:
            layer.reset_parameters()
        wrapped = RoundPipe(nn.Sequential(*layers).bfloat16())
        optimizer = optim.AdamW(wrapped, lr=1e-2)
        plan, one = one_layer_stages(12), 64 * 64 * 2
        images = []
        # Announced ones, two others, announced ones again (the first of which finds images and keeps them).
        for number, announced in enumerate((True, True, False, True, False, True, True, True)):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(number)).bfloat16()
            config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
            step = optimizer if announced and announces else None
            wrapped.forward_backward((x,), loss_fn=lambda o, _: o.float().square().mean(), run_config=config, step=step)
            if step is None:
                wrapped.step(optimizer, is_async=False)
            wrapped.synchronize()
            images.append(bytes_of(wrapped)[0] // one)
            report = roundpipe.memory_report().host
            assert report.gradients_bytes >= sum(bytes_of(wrapped))
            if announces:
                assert bytes_of(wrapped)[1] == 4 * one
        results.append(everything(wrapped, optimizer))
        if announces:
            assert images == [0, 0, 12, 12, 12, 12, 0, 0]
            kept = [update for update in optimizer._memory.updates.values() if update.image is not None]
            assert not kept, "an update keeps memory that nobody else has"
        else:
            assert images == [12] * 8 and bytes_of(wrapped)[1] == 0
    assert_equal(*results)


def test_what_is_frozen_between_two_steps_is_left_alone() -> None:
    """The unit is packed anew: what was prepared for the old packing would write to its neighbours."""
    roundpipe.use_devices("host:1")
    results = []
    for announced in (True, False):
        torch.manual_seed(0)
        wrapped = RoundPipe(
            nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(3)]).bfloat16()
        )
        optimizer = optim.AdamW(wrapped, lr=1e-2)
        for number in range(6):
            if number % 2:
                wrapped.model[1][0].requires_grad_(number == 3)
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).bfloat16()
            step = optimizer if announced else None
            wrapped.forward_backward((x,), loss_fn=lambda o, _: o.float().square().sum(), step=step)
            if step is None:
                wrapped.step(optimizer, is_async=False)
            wrapped.synchronize()
        results.append(everything(wrapped, optimizer))
    assert_equal(*results)


def test_a_copy_that_fails_gives_its_place_back_and_counts_no_step() -> None:
    """Whatever copy fails: either nothing was updated and the call can be made again, or it is a PartialStepError."""
    undone = partial = 0
    for number in range(60):
        model = uneven(1)
        if number % 2:  # where one unit is trained, the failure of its download leaves nothing updated
            model = model.requires_grad_(False)
            model[1].requires_grad_(True)
        roundpipe.use_devices("host:2")
        wrapped = RoundPipe(model)
        optimizer = optim.AdamW(wrapped, lr=1e-2)
        plan = one_layer_stages(wrapped.num_layers)
        call(wrapped, 0, plan, optimizer)
        before = everything(wrapped, optimizer)
        handle = engines.current().handle
        _ops.engine_inject(handle, "fail_copy", number, 0)
        try:
            call(wrapped, 1, plan, optimizer)
            wrapped.synchronize()
        except roundpipe.errors.PartialStepError:
            partial += 1
        except RoundPipeError:
            undone += 1
            _ops.engine_inject(handle, "fail_copy", -1, 0)
            assert_equal(everything(wrapped, optimizer), before, f"copy {number}")
        _ops.engine_inject(handle, "fail_copy", -1, 0)
        assert _ops.gradient_pool_stats(wrapped._state.gradient_pool.handle)[1] == 0
        call(wrapped, 2, plan, optimizer)
        wrapped.synchronize()
    assert undone > 10 and partial > 0


def test_a_model_whose_optimizer_takes_gradients_as_they_arrive_does_not_stop_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its updates are in the queue before its gradients come, behind which those of the pool's come down."""
    for seed in range(6):
        roundpipe.use_devices("host:2")
        monkeypatch.setattr(gradient_pool, "PLACES_BESIDE_DEVICES", -1)
        first, second = RoundPipe(uneven(seed)), RoundPipe(uneven(seed + 1))
        compact = optim.AdamW(first, lr=1e-2)
        with roundpipe.OptimizerCtx():
            other = torch.optim.SGD(second.parameters(), lr=0.1)
        plans = [one_layer_stages(w.num_layers) for w in (first, second)]
        _ops.engine_inject(engines.current().handle, "delay", seed, 200)
        for number in range(2):
            call(first, number, plans[0], compact)
            call(second, number, plans[1])
            second.step(lambda o=other: (o.step(), o.zero_grad()))
        _ops.engine_inject(engines.current().handle, "delay", seed, 0)
        first.synchronize()
        second.synchronize()
