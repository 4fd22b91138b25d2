"""What is handed on beside tensors: refused where it holds modules or tensors, right everywhere else."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, held
from roundpipe.errors import ConfigError, StageError

from . import oracle
from .plans import one_layer_stages

WIDTH = 4


class Slotted:
    __slots__ = ("module", "unset")

    def __init__(self, module: nn.Module) -> None:
        self.module = module


def with_default(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, w: torch.Tensor = weight) -> torch.Tensor:
        return x @ w

    return function


def as_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of the shape that torch.compile gives it: beside the function it holds what the compiler keeps."""
    state = SimpleNamespace(example=torch.ones(2))

    def wrapper(*args: Any) -> Any:
        assert state
        return function(*args)

    wrapper._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    return wrapper


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "closure over self": (lambda self, x: lambda y: self.linear(y), r"module with weights \(HandsOn, as self\)"),
    "closure over a module": (
        lambda self, x: (lambda linear: lambda y: linear(y))(self.linear),
        r"\(Linear, as linear\)",
    ),
    "closure over the input": (lambda self, x: lambda y: y * x, r"tensor of shape \(\d, 4\), as x"),
    "method": (lambda self, x: self.apply_to, r"'HandsOn.apply_to'.*\(HandsOn\)"),
    "method of a tensor": (lambda self, x: x.mul, r"tensor of shape"),
    "partial": (lambda self, x: functools.partial(nn.functional.linear, weight=self.linear.weight), r"shape \(4, 4\)"),
    "default": (lambda self, x: with_default(self.linear.weight), r"default\[0\]"),
    "module": (lambda self, x: self.linear, r"which holds a module with weights \(Linear\)"),
    "object": (lambda self, x: SimpleNamespace(inner=[{"f": self.apply_to}]), r"as inner\[0\]\['f'\]"),
    "slots": (lambda self, x: Slotted(self.linear), r"\(Linear, as module\)"),
    "weak reference": (lambda self, x: weakref.ref(self), "HandsOn"),
    "object with a tensor": (lambda self, x: SimpleNamespace(mask=x > 0), r"as mask"),
    "compiled": (lambda self, x: as_compiled(self.apply_to), r"\(HandsOn\)"),
}


class HandsOn(nn.Module):
    def __init__(self, make: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make = make
        self.off = False

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.linear(x)
        return (out, None if self.off else self.make(self, out))


class Uses(nn.Module):
    def forward(self, given: tuple[torch.Tensor, Any]) -> torch.Tensor:
        x, function = given
        return x if function is None else function(x)


def in_stages_of_one(layers: int) -> RoundPipeRunConfig:
    """For inference."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(layers)]
    return RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)


def config(layers: int) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(layers))


def square(out: torch.Tensor, _: Any) -> torch.Tensor:
    return out.square().sum()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_holds_modules_or_tensors_is_refused(kind: str, devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    make, message = REFUSED[kind]
    first = HandsOn(make)
    wrapped = RoundPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), first, Uses(), nn.Linear(WIDTH, 2)))
    x = torch.randn(6, WIDTH)

    def train() -> None:
        wrapped.forward_backward((x,), loss_fn=square, run_config=config(4))
        wrapped.synchronize()

    def infer() -> None:
        with torch.no_grad():
            wrapped(x)

    for call in (train, infer):
        first.off = False
        with pytest.raises(StageError, match=message) as caught:
            call()
        assert caught.value.layer == 1
        assert isinstance(caught.value.__cause__, ConfigError)
        first.off = True
        call()


class Config:
    def __init__(self) -> None:
        self.scale = 3.0
        self.itself = self


def assert_trains_alike(wrapped: RoundPipe, plain: nn.Module, x: torch.Tensor) -> None:
    got = wrapped.forward_backward((x,), loss_fn=square, run_config=config(4))
    want = square(plain(x), None)
    want.backward()
    oracle.assert_close_to_scale(got, want.detach(), "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


HANDED_ON: dict[str, Callable[[Any, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "function": lambda self, x: torch.tanh,
    "closure over numbers": lambda self, x: (lambda scale: lambda y: y * scale)(float(x.shape[1])),
    "partial": lambda self, x: functools.partial(torch.add, other=2.0),
    "module without weights": lambda self, x: nn.GELU(),
    "object": lambda self, x: (lambda config: lambda y: y * config.scale)(Config()),
    "class": lambda self, x: type("Doubles", (), {"__new__": lambda cls, y: y * 2.0}),
    "compiled": lambda self, x: as_compiled(torch.tanh),
}


@pytest.mark.parametrize("kind", HANDED_ON)
def test_functions_that_hold_neither_go_on_working(kind: str) -> None:
    roundpipe.use_devices("host:3")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), HandsOn(HANDED_ON[kind]), Uses(), nn.Linear(WIDTH, 2))
    plain = copy.deepcopy(layers)
    wrapped = RoundPipe(layers)
    x = torch.randn(6, WIDTH)
    assert_trains_alike(wrapped, plain, x)


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, function: Any = None) -> Any:
        x, function = x if isinstance(x, tuple) else (x, function)
        return function(self.linear(x)), function


def test_what_the_caller_gave_passes() -> None:
    roundpipe.use_devices("host:2")
    scale = torch.tensor(3.0)
    layers = nn.Sequential(Passes(), Passes(), Passes())
    wrapped, x = RoundPipe(layers), torch.randn(4, WIDTH)

    def function(y: torch.Tensor) -> torch.Tensor:
        return y * scale

    first = RoundPipeRunConfig(num_microbatch=2, merge_output=lambda outputs: torch.cat([out for out, _ in outputs]))
    with torch.no_grad():
        got = wrapped(x, function, roundpipe_run_config=first)
        want = x
        for layer in layers:
            want = layer.linear(want) * scale
    oracle.assert_close_to_scale(got, want, "output")


class Adds(nn.Module):
    def forward(self, given: tuple[torch.Tensor, Any]) -> Any:
        x, notes = given
        notes.x = x
        return x, notes


def test_an_object_to_which_a_layer_adds_a_tensor_is_refused_there() -> None:
    roundpipe.use_devices("host:2")
    start = HandsOn(lambda self, x: SimpleNamespace())
    wrapped = RoundPipe(nn.Sequential(start, Adds(), Uses()))
    with torch.no_grad(), pytest.raises(StageError, match=r"of Adds, is 'SimpleNamespace'.*as x") as caught:
        wrapped(torch.randn(4, WIDTH))
    assert caught.value.layer == 1


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.linear(x), 1.0)


def test_a_loss_may_get_objects_with_tensors_but_the_caller_may_not() -> None:
    roundpipe.use_devices("host:2")
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Policy())
    plain = copy.deepcopy(layers)
    wrapped, x = RoundPipe(layers), torch.randn(6, WIDTH)

    def loss_fn(out: torch.distributions.Normal, _: Any) -> torch.Tensor:
        return -out.log_prob(torch.ones(())).sum()

    got = wrapped.forward_backward((x,), loss_fn=loss_fn)
    want = loss_fn(plain(x), None)
    want.backward()
    oracle.assert_close_to_scale(got, want.detach(), "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)
    for call in (
        lambda: wrapped.forward_backward((x,), loss_fn=loss_fn, return_outputs=True),
        lambda: wrapped(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)),
    ):
        with pytest.raises(StageError, match=r"'Normal', which holds a tensor"):
            call()


# -- attributes ----------------------------------------------------------------------------------------------------
def keep(how: str, self: Any) -> Any:
    return {
        "method": lambda: self.apply_to,
        "list of methods": lambda: [self.apply_to],
        "closure": lambda: lambda x: self.linear(x),
        "partial": lambda: functools.partial(nn.functional.linear, weight=self.linear.weight, bias=self.linear.bias),
        "object": lambda: SimpleNamespace(__call__=None, f=self.apply_to),
    }[how]()


KEPT = ["method", "list of methods", "closure", "partial", "object"]


class Lazy(nn.Module):
    """Makes a function of itself once, in its first forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how
        self.function: Any = None
        self.table: dict[str, Any] = {}
        self.entries: list[Any] = []

    def apply_to(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in a table":
            return self.table.setdefault("f", self.apply_to)(x).tanh()
        if self.how == "in a list":
            if not self.entries:
                self.entries.append(self.linear)
            return self.entries[0](x).tanh()
        if self.function is None:
            self.function = keep(self.how, self)
        function = self.function[0] if isinstance(self.function, list) else self.function
        return getattr(function, "f", function)(x).tanh()


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("how", [*KEPT, "in a table", "in a list"])
def test_functions_kept_in_attributes_compute_with_the_weights_of_their_device(how: str, devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    torch.manual_seed(0)
    layers = [Lazy(how) for _ in range(4)]
    plain = nn.Sequential(*(copy.deepcopy(layer) for layer in layers))
    wrapped = RoundPipe(nn.Sequential(*layers))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(6, WIDTH)
        with torch.no_grad():
            got = wrapped(x, roundpipe_run_config=in_stages_of_one(4) if seed else RoundPipeRunConfig(num_microbatch=2))
            oracle.assert_close_to_scale(got, plain(x), "output")
        assert_trains_alike(wrapped, plain, x)
        wrapped.zero_grad()
        plain.zero_grad()
        with torch.no_grad():
            for mine, other in zip(wrapped.model.parameters(), plain.parameters(), strict=True):
                mine.add_(0.1)
                other.add_(0.1)
    for layer in layers:  # of the host nothing but what is the host's own
        assert layer.function == (
            layer.apply_to if how == "method" else [layer.apply_to] if how == "list of methods" else None
        )
        assert layer.table == ({"f": layer.apply_to} if how == "in a table" else {})
        assert layer.entries == ([layer.linear] if how == "in a list" else [])


class SavesAFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        roundpipe.save_for_recompute(lambda: self.linear)
        return self.linear(x)


def test_a_function_of_the_layer_is_not_saved_for_recompute() -> None:
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(nn.Sequential(SavesAFunction(), nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(StageError, match=r"given to save_for_recompute.*SavesAFunction, as self"):
        wrapped.forward_backward((torch.randn(4, WIDTH),), loss_fn=square, run_config=config(2))


def test_find_ends() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert held.find(loop, held.holds_state) is None
    assert held.find(list(range(1_000_000)), held.holds_state) is None
    deep: Any = torch.ones(1)
    for _ in range(100):
        deep = SimpleNamespace(x=deep)
    found = held.find(deep, held.holds_state)
    assert found is not None and found[0] == ".x" * 100

    def outer() -> Callable[[], Any]:
        def inner() -> Any:
            return later

        if deep is None:
            later = 1
        return inner

    assert held.find(outer(), held.holds_state) is None
    assert held.find(Slotted(nn.GELU()), held.holds_state) is None
