"""Layers that the user compiled compute, and train, with the weights that are on the device."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.compiled import DeviceCodes, own_forward, rebound
from roundpipe.errors import ConfigError
from roundpipe.models import linear_cross_entropy
from roundpipe.roundpipe import AutoRoundPipe

from . import oracle
from .plans import one_layer_stages


class CompiledMethod(nn.Module):
    """Compiles a method of its own and a plain function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = torch.compile(self.plain, backend="eager")
        self.wave = torch.compile(torch.sin, backend="eager")

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wave(self.inner(x))


class Own(nn.Module):
    """Not of torch.nn, which dynamo treats otherwise; shared parameters inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.linear(x).relu()) * self.gain


def wrapped_linear() -> nn.Module:
    return torch.compile(nn.Linear(8, 8), backend="aot_eager")  # type: ignore[return-value]


def wrapped_own() -> nn.Module:
    return torch.compile(Own(), backend="aot_eager")  # type: ignore[return-value]


def in_place() -> nn.Module:
    layer = Own()
    layer.compile(backend="eager")
    return layer


def inside() -> nn.Module:
    layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    layer[0].compile(backend="eager")
    return layer


def plain_twin(layer: nn.Module) -> nn.Module:
    """The same without compilation."""
    if isinstance(layer, CompiledMethod):
        twin = CompiledMethod()
        twin.load_state_dict(layer.state_dict())
        twin.inner, twin.wave = twin.plain, torch.sin
        return twin
    layer = getattr(layer, "_orig_mod", layer)
    return copy.deepcopy(layer)


def assert_same_gradients(wrapped: RoundPipe, plain: nn.Module) -> None:
    wrapped.synchronize()
    for got, expected in zip(wrapped.model.parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(got.grad, expected.grad, "gradient")


@pytest.mark.parametrize(
    ("make", "grain"),
    [
        (wrapped_linear, "stage"),
        (wrapped_own, "layer"),
        (in_place, "stage"),
        (inside, "layer"),
        (CompiledMethod, "stage"),
    ],
)
def test_compiled_layers_train(make: Callable[[], nn.Module], grain: str) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), make(), make(), nn.Linear(8, 2)]
    plain = nn.Sequential(*(plain_twin(layer) for layer in layers))
    for module in plain.modules():
        module._compiled_call_impl = None
    wrapped = RoundPipe(nn.Sequential(*layers))
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(6, 4)
        loss = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum(), run_config=config)
        want = plain(x).square().sum()
        want.backward()
        oracle.assert_close_to_scale(loss, want.detach(), "loss")
    assert_same_gradients(wrapped, plain)


class Backend:
    """Of torch.compile: counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward

    def __deepcopy__(self, memo: Any) -> Backend:
        return self


@pytest.mark.parametrize("make", [nn.Sequential, wrap_model_to_roundpipe])
def test_the_wrapper_compiles_the_layers(make: Any) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    own, theirs = Backend(), Backend()
    layers = [nn.Linear(4, 8), Own(), Own(), nn.Linear(8, 2)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    layers[2].compile(backend=theirs)
    names = list(plain.state_dict())
    options = {"backend": own, "fullgraph": True}
    if make is nn.Sequential:
        wrapped = RoundPipe(nn.Sequential(*layers), compile=options)
    else:
        wrapped = wrap_model_to_roundpipe(nn.Sequential(*layers), compile=options)
    assert list(wrapped.state_dict()) == names
    for model in (wrapped, copy.deepcopy(wrapped)):
        before = own.graphs
        x = torch.randn(6, 4)
        loss = model.forward_backward(
            (x,), loss_fn=lambda out, _: out.square().sum(), run_config=RoundPipeRunConfig(num_microbatch=2)
        )
        assert own.graphs > before
        plain.zero_grad()
        want = plain(x).square().sum()
        want.backward()
        oracle.assert_close_to_scale(loss, want.detach(), "loss")
        assert_same_gradients(model, plain)
        torch._dynamo.reset()
    assert theirs.graphs > 0


def test_parts_of_a_tree_are_compiled() -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:1")

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), Own()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x) + x)

    backend, tower, x = Backend(), Tower(), torch.randn(4, 8)
    want = tower(x).sum()
    model = wrap_model_to_roundpipe(tower, lower_threshold=1, upper_threshold=0, compile={"backend": backend})
    assert isinstance(model, AutoRoundPipe)
    oracle.assert_close_to_scale(model(x).sum(), want, "output")
    assert backend.graphs >= 1  # of the part that is not of torch.nn


@pytest.mark.parametrize("value", ["yes", 1, None, {1: 2}])
def test_compile_takes_a_bool_or_options(value: Any) -> None:
    with pytest.raises(TypeError, match=r"compile=.*expected True, False, or a dict of options of torch.compile"):
        RoundPipe(nn.Linear(2, 2), compile=value)


def test_what_cannot_be_followed_is_refused_and_what_is_foreign_left_alone() -> None:
    layer, twin = nn.Linear(2, 2), nn.Linear(2, 2)
    foreign = torch.compile(torch.sin, backend="eager")
    assert rebound(foreign, {id(layer): twin}, DeviceCodes()).function is foreign

    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x

    opaque._torchdynamo_orig_callable = layer.forward  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Linear\.forward.*torch\.compile\(layer\)"):
        rebound(opaque, {id(layer): twin}, DeviceCodes())


class Counts:
    """A backend: how many graphs it was given, and how often they ran."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph(*args)

        return run


class Square(nn.Module):
    """Not of torch.nn; as wide as it is made, with keyword-only arguments and a cell of its class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        assert __class__ is Square  # type: ignore[name-defined]
        return self.linear(x).tanh() * scale


class SquareMethod(Square):
    def __init__(self, width: int, backend: Any, fullgraph: bool) -> None:
        super().__init__(width)
        self.inner = torch.compile(self.plain, backend=backend, fullgraph=fullgraph)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.inner(x)


def compiled_layer(how: str, width: int, backend: Any, fullgraph: bool) -> nn.Module:
    if how == "method":
        return SquareMethod(width, backend, fullgraph)
    if how == "in place":
        layer = Square(width)
        layer.compile(backend=backend, fullgraph=fullgraph)
        return layer
    layer = nn.Linear(width, width) if how == "torch.nn" else Square(width)
    return torch.compile(layer, backend=backend, fullgraph=fullgraph)  # type: ignore[return-value]


def decorated(backend: Any, fullgraph: bool) -> type[nn.Module]:
    class Decorated(Square):
        @torch.compile(backend=backend, fullgraph=fullgraph)
        def plain(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.plain(x)

    class DecoratedForward(Square):
        @torch.compile(backend=backend, fullgraph=fullgraph)
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.linear(x).tanh()

    return DecoratedForward if fullgraph else Decorated


WAYS = ["torch.nn", "wrapper", "in place", "method"]
LIMIT = 3
MORE = 5


@pytest.fixture
def limited() -> Iterator[None]:
    """So few compilations of one code object that a small model reaches them."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        yield


@pytest.mark.parametrize(
    ("how", "fullgraph"), [*((how, how != "method") for how in WAYS), ("class", False), ("class", True)]
)
@pytest.mark.usefixtures("limited")
def test_layers_of_many_widths_stay_compiled_on_many_devices(how: str, fullgraph: bool) -> None:
    roundpipe.use_devices("host:12")
    backend, widths = Counts(), range(2, 2 + MORE)
    make = decorated(backend, fullgraph) if how == "class" else lambda w: compiled_layer(how, w, backend, fullgraph)
    layers = [nn.Sequential(make(w), nn.Linear(w, w + 1)) for w in widths]
    wrapped = RoundPipe(nn.Sequential(*layers))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(MORE))
    jobs = 2 * MORE - 1
    for rows in (4, 6):
        loss = wrapped.forward_backward(
            (torch.randn(rows, 2),), loss_fn=lambda out, _: out.square().sum(), run_config=config
        )
        assert torch.isfinite(loss)
    wrapped.synchronize()
    assert backend.runs == 2 * 2 * jobs
    assert MORE <= backend.graphs <= 2 * jobs


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.usefixtures("limited")
def test_each_device_has_its_own_count_of_compilations(how: str) -> None:
    """Skeletons of different widths stand for what tells GPUs apart, the index of the device."""
    backend = Counts()
    layer = compiled_layer(how, 4, backend, True)
    module, name = {
        "torch.nn": (layer, "forward"),
        "wrapper": (layer, "forward"),
        "in place": (layer, "_compiled_call_impl"),
        "method": (layer, "inner"),
    }[how]
    host = getattr(layer, "_orig_mod", layer)
    for width in range(1, 1 + MORE):
        twin = nn.Linear(width, width) if how == "torch.nn" else Square(width)
        twin.plain = types.MethodType(SquareMethod.plain, twin)  # type: ignore[assignment]
        codes = DeviceCodes()
        found = rebound(module.__dict__[name], {id(host): twin}, codes)
        assert found.module is host
        if found.enters:
            twin.forward = own_forward(host, twin, codes)  # type: ignore[assignment]
        x = torch.randn(2, width)
        assert torch.equal(found.function(x), twin.linear(x).tanh() if isinstance(twin, Square) else twin(x))
    assert backend.graphs == backend.runs == MORE


@pytest.mark.parametrize("how", [*WAYS, "class", "class, inside a compiled one"])
def test_layers_that_are_alike_are_compiled_once_a_device(how: str) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:1")
    backend = Counts()
    kind = decorated(backend, True)
    layers = [kind(4) if how.startswith("class") else compiled_layer(how, 4, backend, True) for _ in range(5)]
    if "inside" in how:
        layers = [torch.compile(nn.Sequential(layer), backend=backend, fullgraph=True) for layer in layers]  # type: ignore[misc]
    if how != "torch.nn" and "inside" not in how:
        for number, layer in enumerate(layers):  # as models of transformers number theirs
            layer.layer_idx = number  # type: ignore[assignment]
    wrapped = RoundPipe(nn.Sequential(*layers))
    with torch.no_grad():
        for _ in range(2):
            wrapped(torch.randn(4, 4), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2))
    assert backend.graphs == 1
    assert backend.runs == 2 * 2 * len(layers)


def test_a_compiled_method_of_a_class_follows_its_class_and_its_modules() -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    kind = decorated("eager", True)
    layers = [kind(4) for _ in range(3)]
    wrapped, x = RoundPipe(nn.Sequential(*layers)), torch.randn(4, 4)
    plain = nn.Sequential(*(plain_square(layer) for layer in layers))
    got = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
    want = plain(x).square().sum()
    want.backward()
    oracle.assert_close_to_scale(got, want.detach(), "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)
    assert all("forward" not in layer.__dict__ for layer in layers)
    kind.forward = lambda self, value: value * 2.0  # type: ignore[method-assign, assignment]
    with torch.no_grad():
        assert torch.equal(wrapped(x), x * 8.0)


def plain_square(layer: nn.Module) -> nn.Module:
    made = Square(4)
    made.load_state_dict(layer.state_dict())
    return made


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_nothing_of_ours_is_compiled(grain: str) -> None:
    """PyTorch leaves the operator of a torch.nn layer that was compiled in place alone, as it does without us. The
    hooks of saved tensors are called from there."""
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    backend = Counts()
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers:
        layer.compile(backend=backend)
    layers[0](torch.ones(1, 4))
    assert backend.graphs == 0
    wrapped = RoundPipe(nn.Sequential(*layers))
    config = RoundPipeRunConfig(num_microbatch=2, recompute_grain=grain, execute_plan=one_layer_stages(3))
    for rows in (2, 4):
        wrapped.forward_backward((torch.randn(rows, 4),), loss_fn=lambda out, _: out.square().sum(), run_config=config)
    wrapped.synchronize()
    assert backend.graphs == 0


def test_a_forward_of_its_own_on_the_host_comes_first_and_none_is_left_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    layers = [Square(4) for _ in range(3)]
    for layer in layers:
        layer.compile(backend="eager")
    wrapped = RoundPipe(nn.Sequential(*layers))
    x = torch.randn(4, 4)
    with torch.no_grad():
        wrapped(x)
        assert all("forward" not in layer.__dict__ for layer in layers)
        layers[1].forward = lambda value: value * 3.0  # type: ignore[assignment, method-assign]
        got = wrapped(x)
        want = layers[2].linear(layers[0].linear(x).tanh() * 3.0).tanh()
        oracle.assert_close_to_scale(got, want, "output")
        del layers[1].forward
        want = layers[2].linear(layers[1].linear(layers[0].linear(x).tanh()).tanh()).tanh()
        oracle.assert_close_to_scale(wrapped(x), want, "output")
        monkeypatch.setattr(Square, "forward", lambda self, value: value * 2.0)  # as libraries of kernels do
        assert torch.equal(wrapped(x), x * 8.0)


def test_the_loss_is_compiled_for_each_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []

    def compile_(function: Any) -> Any:
        codes.append(function.__code__)
        return lambda *args: args

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.delenv("RPP_DISABLE_TORCH_COMPILE", raising=False)
    kernel = linear_cross_entropy._ChunkKernel()
    for index in (0, 1, 2, 1, 0):
        kernel(SimpleNamespace(device=torch.device("cuda", index)), torch.zeros(1), -100, 0.0)  # type: ignore[arg-type]
    assert len({id(code) for code in codes}) == len(codes) == 3


class Outer(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 8)
        self.body = wrap(nn.Sequential(Own(), nn.Linear(8, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.head(x).relu()) * 2.0


def parts(model: nn.Module) -> nn.Module:
    wrapped = wrap_model_to_roundpipe(Chain(model), lower_threshold=1, upper_threshold=0)
    assert isinstance(wrapped, AutoRoundPipe)
    return wrapped


class Chain(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers.children())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run_beside(model: Callable[[torch.Tensor], torch.Tensor], plain: nn.Module) -> None:
    """Two forwards with equal outputs, and the backward of each."""
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(6, 4)
        got, want = model(x), plain(x)
        oracle.assert_close_to_scale(got.detach(), want.detach(), "output")
        got.square().sum().backward()
        want.square().sum().backward()


@pytest.mark.parametrize("wrap", [RoundPipe, parts])
def test_a_wrapped_model_inside_a_compiled_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    outer, plain = Outer(wrap), Outer(lambda body: body)
    compiled = torch.compile(outer, backend="aot_eager")
    run_beside(compiled, plain)
    outer.body.synchronize()  # type: ignore[operator, union-attr]
    for mine, other in zip([*outer.head.parameters(), *outer.body.model.parameters()], plain.parameters(), strict=True):  # type: ignore[union-attr]
        oracle.assert_close_to_scale(mine.grad, other.grad, "gradient")


class HoldsCompiled(nn.Module):
    """A part that is streamed, and beside it modules and methods of the forward's own that are compiled."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(4))
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))
        self.small = decorated(backend, True)(4)
        self.other = Square(4)
        self.calls = [self.body.forward, self.scale]
        self.other.compile(backend=backend)
        self.scaled = torch.compile(self.scale, backend=backend)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls[1](self.scaled(self.other(self.small(self.body(x)))))


def test_modules_of_a_forward_of_the_users_own_stay_compiled() -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    backend = Counts()
    model, plain = HoldsCompiled(backend), HoldsCompiled("eager")
    wrapped = wrap_model_to_roundpipe(
        model, lower_threshold=1, upper_threshold=0, skip_modules=(model.small, model.other)
    )
    assert isinstance(wrapped, AutoRoundPipe)
    run_beside(wrapped, plain)
    wrapped.synchronize()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(mine.grad, other.grad, "gradient")
    assert backend.graphs >= 3 and backend.runs == 2 * 3


class Spoken(nn.Module):
    """What code does with a method that its class has compiled, besides calling it."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.linear = what, nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def act(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "copy":
            other = copy.deepcopy(self)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.zero_()
            return self.act(x) + 100 * other.act(x)
        if self.what == "assign":
            self.function = self.act
            return self.function(x)
        if self.what == "signature":
            known = inspect.signature(self.act).parameters
            return self.act(x, **({"scale": 2.0} if list(known) == ["x", "scale"] else {}))
        return self.act(x) * (2.0 if self.act.__self__ is self else 1.0)  # type: ignore[attr-defined]


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


@pytest.mark.parametrize("what", ["copy", "assign", "signature", "self"])
def test_a_compiled_method_of_a_class_is_a_method_of_the_skeleton(what: str) -> None:
    if OLD and what != "signature":
        pytest.skip("before PyTorch 2.12 it is a function there")
    torch._dynamo.reset()
    roundpipe.use_devices("host:1")
    layer, x = Spoken(what), torch.randn(2, 4)
    with torch.no_grad():
        wanted = layer(x)
        vars(layer).pop("function", None)
        wrapped = RoundPipe(nn.Sequential(layer))
        torch.testing.assert_close(wrapped(x), wanted)
    if what == "assign":
        assert layer.function.__self__ is layer  # type: ignore[operator, union-attr]
