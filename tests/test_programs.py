"""Random programs of a caller against a plain model: calls, steps of every kind, edits, failures, other devices."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import RoundPipeError

from .plans import random_fused_plan

WIDTH, ROWS, LR = 8, 6, 0.05

Weights = dict[str, torch.Tensor]


class Fails(nn.Module):
    """``when`` "forward" or "backward": raises there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.when: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when == "forward":
            raise ValueError("as asked")
        y = torch.tanh(self.linear(x))
        if self.when == "backward" and y.requires_grad:
            y.register_hook(self._fail)
        return y

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("as asked")


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().sum() / 10


def make(seed: int, count: int) -> nn.Sequential:
    torch.manual_seed(seed)
    first = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(first, *(Fails() for _ in range(count - 2)), Head(first.weight))


class Plain:
    """What the documentation says, with a plain model and gradient descent.

    ``newest``: after every step. ``seen``: what the next call computes with; one asynchronous step behind.
    """

    def __init__(self, layers: nn.Sequential) -> None:
        self.layers = copy.deepcopy(layers)
        self.newest: Weights = {name: p.detach().clone() for name, p in self.layers.named_parameters()}
        self.seen = dict(self.newest)
        self.gradients: Weights | None = None

    def output(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for name, parameter in self.layers.named_parameters():
                parameter.copy_(self.seen[name])
        return self.layers(x)  # type: ignore[no-any-return]

    def call(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = loss_fn(self.output(x), label)
        found = torch.autograd.grad(loss, list(self.layers.parameters()))
        named = dict(zip(self.newest, found, strict=True))
        before = self.gradients
        self.gradients = named if before is None else {name: before[name] + named[name] for name in named}
        return loss.detach()

    def step(self, is_async: bool) -> None:
        self.seen = dict(self.newest)
        if self.gradients is not None:
            self.newest = {name: value - LR * self.gradients[name] for name, value in self.newest.items()}
        self.gradients = None
        if not is_async:
            self.publish()

    def publish(self) -> None:
        self.seen = dict(self.newest)


class Program:
    """One model and its twin; every method is a statement that a caller may write anywhere."""

    def __init__(self, seed: int, compact: bool) -> None:
        self.random = random.Random(seed)
        self.seed, self.compact, self.statements = seed, compact, 0
        self.count = self.random.randint(3, 5)
        layers = make(seed, self.count)
        self.plain = Plain(layers)
        self.use_other_devices()
        self.model = RoundPipe(layers)
        self.optimizer: Any
        if compact:
            self.optimizer = roundpipe.optim.SGD(self.model, lr=LR)
        else:
            with roundpipe.OptimizerCtx():
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, RoundPipeRunConfig]:
        self.statements += 1
        generator = torch.Generator().manual_seed(1000 * self.seed + self.statements)
        x, label = torch.randn(2, ROWS, WIDTH, generator=generator)
        own = random_fused_plan(self.count, 31 * self.seed + self.statements) if self.random.random() < 0.6 else None
        config = RoundPipeRunConfig(
            num_microbatch=self.random.randint(1, 3),
            recompute_grain=self.random.choice(["stage", "layer"]),
            execute_plan=own,
        )
        return x, label, config

    def call(self, step: Any = None) -> None:
        x, label, config = self.batch()
        loss = self.model.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config, step=step)
        torch.testing.assert_close(loss, self.plain.call(x, label), rtol=1e-4, atol=1e-4)

    def announced_call(self) -> None:
        self.plain.publish()
        self.call(self.optimizer)
        self.plain.step(False)

    def step(self, is_async: bool) -> None:
        if self.plain.gradients is None:
            return
        if self.compact:
            self.model.step(self.optimizer, is_async)
        else:
            self.model.step(lambda: (self.optimizer.step(), self.optimizer.zero_grad()), is_async)
        self.plain.step(is_async)

    def synchronize(self) -> None:
        self.model.synchronize()
        self.plain.publish()

    def zero_grad(self) -> None:
        self.model.zero_grad()
        self.plain.gradients = None
        self.synchronize()

    def load(self) -> None:
        loaded = {name: torch.randn_like(value) * 0.3 for name, value in self.plain.newest.items()}
        self.model.load_state_dict({**loaded, f"{self.count - 1}.weight": loaded["0.weight"]})
        self.plain.newest = {name: value.clone() for name, value in loaded.items()}
        self.plain.publish()

    def edit(self) -> None:
        self.synchronize()
        name = self.random.choice(list(self.plain.newest))
        with torch.no_grad():
            dict(self.model.model.named_parameters())[name].mul_(0.5)
        self.plain.newest[name] = self.plain.newest[name] * 0.5
        self.plain.publish()

    def infer(self) -> None:
        self.synchronize()
        x, _, config = self.batch()
        alone = RoundPipeRunConfig(num_microbatch=config.num_microbatch)
        with torch.no_grad():
            torch.testing.assert_close(self.model(x, roundpipe_run_config=alone), self.plain.output(x))

    def fail(self) -> None:
        layer: Any = self.model.model[self.random.randrange(1, self.count - 1)]
        layer.when = self.random.choice(["forward", "backward"])
        x, label, config = self.batch()
        with pytest.raises(RoundPipeError, match="as asked"):
            self.model.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)
            self.model.synchronize()
        layer.when = None
        self.synchronize()

    def look_at_gradients(self) -> None:
        self.synchronize()
        for name, parameter in self.model.model.named_parameters():
            if self.plain.gradients is None:
                assert parameter.grad is None, name
            else:
                torch.testing.assert_close(parameter.grad, self.plain.gradients[name], rtol=1e-4, atol=1e-4)

    def copy(self) -> None:
        self.check()
        twin = copy.deepcopy(self.model) if self.random.random() < 0.5 else pickle.loads(pickle.dumps(self.model))
        for name, parameter in twin.model.named_parameters():
            torch.testing.assert_close(parameter.data, self.plain.newest[name], rtol=1e-4, atol=2e-5)

    def use_other_devices(self) -> None:
        roundpipe.use_devices(f"host:{self.random.randint(1, 4)}")

    def delay(self) -> None:
        _ops.engine_inject(engines.current().handle, "delay", self.seed, self.random.choice([0, 50, 300]))

    def check(self) -> None:
        found = self.model.state_dict()
        self.plain.publish()
        for name, value in self.plain.newest.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5)

    def run(self) -> list[str]:
        """The names of the statements that were run."""
        statements: list[tuple[str, int, Callable[[], None]]] = [
            ("call", 6, self.call),
            ("async step", 3, lambda: self.step(True)),
            ("exact step", 2, lambda: self.step(False)),
            ("announced call", 3 if self.compact else 0, self.announced_call),
            *(
                (one.__name__, 1, one)
                for one in (
                    self.synchronize, self.zero_grad, self.load, self.edit, self.infer, self.fail,
                    self.look_at_gradients, self.use_other_devices, self.delay,
                )
            ),
            ("copy", 0 if self.compact else 1, self.copy),
        ]  # fmt: skip
        names, weights, functions = zip(*statements, strict=True)
        ran = []
        for at in self.random.choices(range(len(names)), weights, k=self.random.randint(6, 14)):
            ran.append(names[at])
            try:
                functions[at]()
            except Exception as error:
                raise AssertionError(f"seed {self.seed}: {', '.join(ran)}") from error
        self.check()
        return ran


@pytest.mark.parametrize("compact", [False, True], ids=["step function", "compact"])
@pytest.mark.parametrize("part", range(3))
def test_a_program_does_what_its_plain_twin_does(part: int, compact: bool) -> None:
    ran: set[str] = set()
    for seed in range(24)[part::3]:
        try:
            ran.update(Program(seed, compact).run())
        finally:
            _ops.engine_inject(engines.current().handle, "delay", 0, 0)
    assert len(ran) > 10
