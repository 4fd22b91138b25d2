"""Attributes of layers in random programs, beside the same modules without us: most calls take none over again, and
those that must do."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.attribute_memo import AttributeMemo

NAMES = ("a", "b", "c")


class Scripted(nn.Module):
    """Computes with whatever attributes it has, and changes them as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.todo: tuple[Any, ...] = ()
        self.a, self.b = 1.0, [0.5]

    def scaled(self) -> torch.Tensor:
        return self.linear.weight * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for change in self.todo:
            apply(self, change)
        for name in NAMES:
            value = self.__dict__.get(name)
            for one in value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]:
                if isinstance(one, nn.Module):
                    x = one(x)
                elif isinstance(one, torch.Tensor):
                    x = x @ one
                elif callable(one):
                    x = x @ one()
                elif one is not None:
                    x = x + float(one)
        return torch.tanh(self.linear(x))


def value_of(layer: Scripted, kind: str, number: int) -> Any:
    return {
        "number": lambda: number / 8,
        "same number": lambda: 1.0,
        "list": lambda: [number / 8],
        "dict": lambda: {"k": number / 8},
        "module": lambda: layer.linear,
        "modules": lambda: [layer.linear, number / 8],
        "weight": lambda: {"w": layer.linear.weight},
        "method": lambda: layer.scaled,
    }[kind]()


KINDS = ["number", "same number", "list", "dict", "module", "modules", "weight", "method"]


def apply(layer: Scripted, change: tuple[str, str, str, int]) -> None:
    what, name, kind, number = change
    if what == "set":
        # Not as a child: what is meant is an attribute, as torch.nn.LSTM has them.
        layer.__dict__[name] = value_of(layer, kind, number)
    elif what == "delete":
        layer.__dict__.pop(name, None)
    elif isinstance(shared := layer.__dict__.get(name), list):
        shared[-1:] = [value_of(layer, kind, number)] if kind in ("number", "module") else []
    elif isinstance(shared, dict):
        shared[kind] = value_of(layer, kind if kind in ("number", "module", "method") else "number", number)


def random_change(rng: random.Random) -> tuple[str, str, str, int]:
    return rng.choice(["set", "set", "delete", "inside"]), rng.choice(NAMES), rng.choice(KINDS), rng.randrange(64)


def look(layer: nn.Module) -> dict[str, Any]:
    """Its attributes; modules, weights and methods as whose they are."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if value is layer.linear:
            return "module"
        if value is layer.linear.weight:  # type: ignore[union-attr]
            return "weight"
        return "method" if callable(value) and value.__self__ is layer else value  # type: ignore[attr-defined]

    return {name: plain(layer.__dict__[name]) for name in NAMES if name in layer.__dict__}


def one_by_one(num_layers: int) -> RoundPipeRunConfig:
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(num_layers)]
    plan.bwd_plan = plan.fwd_plan[::-1]
    return RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)


@pytest.mark.parametrize("devices", [1, 3])
def test_random_changes_are_seen_on_both_sides(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {True: 0, False: 0}
    still = AttributeMemo.still

    def counted(self: AttributeMemo, *args: Any) -> bool:
        found = still(self, *args)
        taken[found] += 1
        return found

    monkeypatch.setattr(AttributeMemo, "still", counted)
    for seed in range(40):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        roundpipe.use_devices(f"host:{devices}")
        plain = nn.Sequential(Scripted(), Scripted())
        wrapped = RoundPipe(copy.deepcopy(plain))
        config = one_by_one(2)
        for call in range(8):
            for index in range(2):
                todo = tuple(random_change(rng) for _ in range(rng.choice([0, 0, 0, 1, 2])))
                host = [random_change(rng) for _ in range(rng.choice([0, 0, 0, 1]))]
                for model in (plain, wrapped.model):
                    layer = model[index]
                    layer.todo = todo  # type: ignore[index, union-attr]
                    for change in host:
                        apply(layer, change)  # type: ignore[arg-type]
            x = torch.randn(2, 4)
            with torch.no_grad():
                got, wanted = wrapped(x, roundpipe_run_config=config), plain(x)
            where = f"seed {seed}, call {call}"
            assert torch.equal(got, wanted), where
            for mine, other in zip(wrapped.model, plain, strict=True):
                assert look(mine) == look(other), where
    assert taken[True] > 100 and taken[False] > 100


def test_what_recompute_sees_is_what_the_forward_left() -> None:
    """The caller changes an attribute between forward and backward, and back, again and again."""
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    plain = nn.Sequential(Scripted(), Scripted(), Scripted())
    wrapped = RoundPipe(copy.deepcopy(plain))
    config = one_by_one(3)
    for number in (1.0, 2.0, 2.0, 1.0, 3.0, 1.0):
        x, grads = torch.randn(2, 4), []
        for model in (plain, wrapped.model):
            for layer in model:
                layer.a = number  # type: ignore[assignment]
        out = wrapped(x.clone(), roundpipe_run_config=config)
        for layer in wrapped.model:
            layer.a = 7.0  # type: ignore[assignment]
        out.sum().backward()
        wrapped.synchronize()
        plain(x).sum().backward()
        for model in (plain, wrapped.model):
            grads.append([p.grad.clone() for p in model.parameters()])
            model.zero_grad()
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert all(layer.a == 7.0 for layer in wrapped.model)


class Logged(nn.Module):
    """Has a list with a module in it under two names, and a table of methods."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__["log"] = self.__dict__["again"] = [self.linear]
        self.ops = {"apply": self.apply_linear}

    def apply_linear(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(0.5)
        return self.ops["apply"](self.log[0](x))


def test_a_container_with_modules_in_it_comes_back_only_where_it_was_changed() -> None:
    roundpipe.use_devices("host:2")
    layer = Logged()
    seen: list[float] = []
    shared: list[Any] = [layer.linear]
    layer.__dict__["hooked"] = shared

    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        shared.append(1.0)  # the host's own list, beside the copy that the skeleton has
        seen.append(1.0)

    layer.register_forward_hook(hook)
    method = layer.ops["apply"]
    wrapped = RoundPipe(nn.Sequential(layer, nn.Tanh()))
    with torch.no_grad():
        for _ in range(3):
            wrapped(torch.randn(4, 4), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    assert len(seen) == 6
    assert shared == [layer.linear, *seen]
    assert layer.log is layer.again and layer.log == [layer.linear, *[0.5] * 6]
    assert layer.ops["apply"] is method


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 4)
        self.order = [self.blocks[0], self.blocks[2], self.blocks[1]]
        self.table = {"first": self.blocks[0], "number": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.order:
            x = torch.tanh(block(x))
        return self.head(x)


def test_containers_of_a_model_whose_parts_are_streamed_stay_the_users() -> None:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    model = Ordered()
    plain = copy.deepcopy(model)
    wrapped = roundpipe.wrap_model_to_roundpipe(model, lower_threshold=4000)
    for _ in range(2):
        x = torch.randn(4, 64)
        torch.testing.assert_close(wrapped(x), plain(x))
        assert [id(block) for block in model.order] == [id(model.blocks[i]) for i in (0, 2, 1)]
        assert model.table["first"] is model.blocks[0]
    wrapped.synchronize()
