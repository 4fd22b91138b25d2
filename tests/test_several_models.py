"""Models side by side: interleaved, from several threads, under one optimizer, on other devices."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError, StageError

from . import oracle
from .test_model import assert_same, mlp, step_both
from .test_model_state import LR, plain_sgd, sgd, update


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def test_two_models_interleaved() -> None:
    pairs = [(RoundPipe(mlp(seed)), mlp(seed)) for seed in (0, 1)]
    optimizers = [(sgd(wrapped), plain_sgd(plain)) for wrapped, plain in pairs]
    for seed in range(6):
        for (wrapped, plain), (optimizer, plain_optimizer) in zip(pairs, optimizers, strict=True):
            step_both(wrapped, plain, seed)
            if seed % 2:
                wrapped.step(update(optimizer), is_async=False)
                update(plain_optimizer)()
    for wrapped, plain in pairs:
        assert_same(wrapped, plain)


def test_two_models_from_two_threads() -> None:
    """Without random layers: the process has one generator for its callers."""
    failures: list[BaseException] = []
    config = RoundPipeRunConfig(num_microbatch=3)

    def train(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            model = mlp(0)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.5, generator=generator)
            plain = copy.deepcopy(model)
            wrapped = RoundPipe(model)
            optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
            for step in range(12):
                x = torch.randn(9, 6, generator=generator)
                wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().mean(), run_config=config)
                for piece in x.tensor_split(3):
                    plain(piece).square().mean().backward()
                if step % 3 == 2:
                    wrapped.step(update(optimizer), is_async=False)
                    update(plain_optimizer)()
            assert_same(wrapped, plain, 1e-5)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_one_optimizer_for_two_models() -> None:
    pairs = [(RoundPipe(mlp(seed)), mlp(seed)) for seed in (0, 1)]
    with OptimizerCtx():
        optimizer = torch.optim.SGD([p for wrapped, _ in pairs for p in wrapped.parameters()], lr=LR)
    plain_optimizer = torch.optim.SGD([p for _, plain in pairs for p in plain.parameters()], lr=LR)
    (first, plain_first), (second, plain_second) = pairs
    for seed in range(3):
        step_both(first, plain_first, seed)
        step_both(second, plain_second, seed)
        first.step(lambda: None)
        second.step(update(optimizer), is_async=False)
        first.synchronize()
        update(plain_optimizer)()
    for wrapped, plain in pairs:
        assert_same(wrapped, plain)


def test_a_step_that_leaves_the_other_model_out_is_refused() -> None:
    first = RoundPipe(mlp(0), name="first")
    second = RoundPipe(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)), name="second"
    )
    with OptimizerCtx():
        both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=LR)
    second(first(torch.randn(6, 6))).square().mean().backward()
    with pytest.raises(StageError, match="SGD holds parameters of the wrapped model 'second' too") as caught:
        first.step(update(both), is_async=False)
    assert isinstance(caught.value.__cause__, ConfigError)
    weights = [p.detach().clone() for p in second.model.parameters()]
    second.step(update(both), is_async=False)  # that of `first` stands in its copies
    second.synchronize()
    assert not any(torch.equal(p, q) for p, q in zip(weights, second.model.parameters(), strict=True))


def test_a_shared_optimizer_may_step_the_model_that_was_trained_alone() -> None:
    """Also when the other one has begun its next call before the step runs."""
    first, second = RoundPipe(mlp(0)), RoundPipe(mlp(1))
    with OptimizerCtx():
        both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=LR)
    x, go = torch.randn(6, 6), threading.Event()
    for model, other in ((first, second), (second, first)) * 2:
        model.forward_backward((x,), loss_fn=lambda out, _: out.square().mean())
        model.step(lambda: (go.wait(20), *update(both)()))
        if other is second:
            other.forward_backward((x,), loss_fn=lambda out, _: out.square().mean())
            go.set()
            model.synchronize()
            other.zero_grad()
    first.synchronize()
    second.synchronize()


def test_the_same_batch_gives_the_same_result_on_other_devices() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    x = torch.randn(6, 6)
    for devices in ("host:1", "host:3", "host:2"):
        wrapped.synchronize()
        roundpipe.use_devices(devices)
        step_both(wrapped, plain)
        assert_same(wrapped, plain)
    roundpipe.use_devices("host:1")
    with torch.no_grad():
        oracle.assert_close_to_scale(wrapped.eval()(x), plain.eval()(x), "output")


def test_other_devices_while_work_is_in_flight() -> None:
    """What was dispatched ends on the old devices, a step included."""
    wrapped, plain = RoundPipe(mlp()), mlp()
    optimizer, plain_optimizer = sgd(wrapped), plain_sgd(plain)
    for seed, devices in enumerate(("host:1", "host:3", "host:2")):
        step_both(wrapped, plain, seed)
        wrapped.step(lambda: (time.sleep(0.2), *update(optimizer)()))
        update(plain_optimizer)()
        roundpipe.use_devices(devices)
        other = RoundPipe(mlp(1))  # opens the new ones
        other.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out.sum())
        assert_same(wrapped, plain)
