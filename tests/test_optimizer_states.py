"""The states of optimizers that work on optimizer parameters are counted, each once, and nobody else's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, optimizer_states

from .at_rest import at_rest
from .checkpoint_runs import Lists

WIDTH = 64


@pytest.fixture(autouse=True)
def two_devices() -> None:
    at_rest()
    roundpipe.use_devices("host:2")


def states_bytes() -> int:
    return roundpipe.memory_report().host.optimizer_states_bytes


def wrapped(dtype: torch.dtype = torch.float32) -> RoundPipe:
    layers = [nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3)]
    return RoundPipe(nn.Sequential(*layers), optim_dtype=torch.float32)


def call(model: RoundPipe) -> None:
    dtype = next(model.model.parameters()).dtype
    model.forward_backward((torch.randn(4, WIDTH, dtype=dtype),), loss_fn=lambda out, _: out.float().square().sum())


def expected(optimizer: torch.optim.Optimizer) -> int:
    leaves = pytree.tree_leaves([dict(state) for state in optimizer.state.values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


MAKE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], float]] = {  # and elements of its states for each weight
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3), 2),
    "AdamW fused": (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), 2),
    "AMSGrad": (lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True), 3),
    "momentum": (lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9), 1),
    "SGD": (lambda p: torch.optim.SGD(p, lr=1e-3), 0),
    "nested": (Lists, 3),
    "ours": (lambda p: roundpipe.optim.AdamW(p, lr=1e-3), 2),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("is_async", [True, False])
def test_states_of_any_optimizer(name: str, is_async: bool) -> None:
    make, number = MAKE[name]
    before = states_bytes()
    model = wrapped(torch.bfloat16)
    with OptimizerCtx():
        optimizer = make(model.parameters())
    assert states_bytes() == before
    pinned = roundpipe.memory_report().host.other_bytes
    for _ in range(2):
        call(model)
        model.step(optimizer.step, is_async)
    model.synchronize()
    weights = 4 * sum(p.numel() for p in model.model.parameters())
    assert states_bytes() - before == expected(optimizer)
    assert number * weights <= expected(optimizer) <= number * weights + 4 * 8
    report = roundpipe.memory_report()
    assert report.host.other_bytes - pinned < weights  # nothing of it is pinned
    assert "optimizer states" in str(report)
    assert report.host.by_purpose()["optimizer states"] == report.host.optimizer_states_bytes
    del optimizer
    at_rest()
    assert states_bytes() == before


def test_two_optimizers_of_a_model_and_one_of_two_models() -> None:
    before = states_bytes()
    first, second = wrapped(), wrapped()
    with OptimizerCtx():
        own = list(first.parameters())
        shared = torch.optim.AdamW([*own[2:], *second.parameters()], lr=1e-3)
        alone = torch.optim.SGD(own[:2], lr=1e-3, momentum=0.9)

    def update() -> None:
        shared.step()
        alone.step()

    call(first)
    call(second)
    second.step(lambda: None, is_async=False)  # leaves its gradients for the function of the other
    first.step(update, is_async=False)
    assert expected(shared) > expected(alone) > 0
    assert states_bytes() - before == expected(shared) + expected(alone)


def test_what_others_train_is_not_counted() -> None:
    before = states_bytes()
    model, other = wrapped(), nn.Linear(WIDTH, WIDTH)
    with OptimizerCtx():
        optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()], lr=1e-3)
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(100))], lr=1e-3)
    plain.param_groups[0]["params"][0].grad = torch.ones(100)
    for p in other.parameters():
        p.grad = torch.ones_like(p)
    call(model)
    model.step(optimizer.step, is_async=False)
    plain.step()
    of_other = sum(t.nbytes for p in other.parameters() for t in optimizer.state[p].values())
    assert of_other > 0
    assert states_bytes() - before == expected(optimizer) - of_other


def test_loaded_states_are_known_before_the_first_step(tmp_path: Path) -> None:
    def make() -> tuple[RoundPipe, torch.optim.Optimizer]:
        model = wrapped()
        with OptimizerCtx():
            return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = make()
    call(model)
    model.step(optimizer.step, is_async=False)
    roundpipe.save(model, optimizer, None, tmp_path / "a").wait()
    before = states_bytes()
    other, loaded = make()
    roundpipe.load(other, loaded, None, tmp_path / "a")
    assert expected(loaded) == expected(optimizer)
    assert states_bytes() - before == expected(loaded)


class Pair(torch.Tensor):
    """Codes and scales behind one shape, as optimizers in eight bits keep their states."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("its size can be told without computing")


def test_each_storage_once_and_whole() -> None:
    class Keeps(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    whole = torch.ones(10)
                    codes = torch.ones(8, dtype=torch.uint8)
                    kept = dict(view=whole[:2], other=whole[3:], itself=p.detach(), pair=Pair(codes, torch.ones(2)))
                    self.state[p].update(kept)

    before = states_bytes()
    model = wrapped()
    with OptimizerCtx():
        optimizer = Keeps(model.parameters())
    call(model)
    model.step(optimizer.step, is_async=False)
    number = sum(1 for _ in model.model.parameters())
    assert states_bytes() - before == number * (40 + 8 + 8)


def test_no_optimizer_is_kept() -> None:
    model = wrapped()
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    call(model)
    model.step(optimizer.step, is_async=False)
    assert optimizer in optimizer_states._known
    number = len(optimizer_states._known)
    del optimizer
    at_rest()
    gc.collect()
    assert len(optimizer_states._known) < number
