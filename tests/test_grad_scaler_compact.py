"""GradScaler with compact optimizers; norms and checks of gradients that were taken on the devices."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import GradScaler, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import ConfigError, ConfigTypeError, RoundPipeError

from .at_rest import at_rest
from .test_grad_scaler import CONFIG, ROWS, SETTINGS, WIDTH, Reference, batches, criterion, make_layers
from .test_grad_scaler import Trainee as OpaqueTrainee


class Trainee:
    def __init__(self, layers: nn.Sequential, max_norm: float | None) -> None:
        self.model = RoundPipe(copy.deepcopy(layers), model_run_config=CONFIG)
        self.optimizer = roundpipe.optim.AdamW(self.model, lr=1e-2, max_grad_norm=max_norm)
        self.scaler = GradScaler(**SETTINGS)

    def forward_backward(self, x: Tensor) -> Tensor:
        return self.model.forward_backward((x,), loss_fn=lambda out, _: self.scaler.scale(criterion(out)))

    def masters(self) -> list[Tensor]:
        return [master for _, master in self.optimizer.named_masters()]


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    roundpipe.use_devices("host:2")
    yield
    if (engine := engines._engine) is not None and engine.simulated:
        _ops.engine_inject(engine.handle, "delay", 0, 0)


@pytest.fixture
def host_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the sums of squares that are taken on the host."""
    taken: list[int] = []
    square_sum = _ops.update_square_sum

    def noting(*args: object) -> int:
        taken.append(1)
        return square_sum(*args)

    monkeypatch.setattr(_ops, "update_square_sum", noting)
    return taken


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_training_equals_the_plain_loop(
    count: int, is_async: bool, max_norm: float | None, host_passes: list[int]
) -> None:
    roundpipe.use_devices(f"host:{count}")
    layers = make_layers()
    trainee, reference = Trainee(layers, max_norm), Reference(layers, is_async)
    _ops.engine_inject(engines.current().handle, "delay", count, 300)
    for step, x in enumerate(batches(20)):
        # (Looking at masters brings pending weights into place, so asynchronously that would be another training.)
        before = (
            None
            if step % 5 or is_async
            else (trainee.masters(), copy.deepcopy(trainee.optimizer.state_dict()["state"]))
        )
        torch.manual_seed(7)
        trainee.forward_backward(x)
        if step % 2:
            trainee.model.step(trainee.optimizer, is_async, scaler=trainee.scaler)
        else:
            trainee.scaler.step(trainee.optimizer, is_async=is_async)
        trainee.scaler.update(is_async=is_async)
        torch.manual_seed(7)
        reference.iterate(x, max_norm)
        assert trainee.scaler.get_scale() == reference.effective.item()
        if before is not None and reference.skipped[-1]:
            assert all(map(torch.equal, trainee.masters(), before[0]))
            for index, values in trainee.optimizer.state_dict()["state"].items():
                assert all(torch.equal(values[name], value) for name, value in before[1].get(index, {}).items())
    assert trainee.scaler.get_scale(up_to_date=True) == reference.newest.item()
    assert 3 <= sum(reference.skipped) < 18
    for got, wanted in zip(trainee.masters(), reference.masters, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-6)
    # The first call did not know; from then on the devices took the sums.
    assert len(host_passes) <= len(list(trainee.model.model))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_training_on_a_gpu(is_async: bool, compact: bool) -> None:
    roundpipe.use_devices("cuda:0")
    layers = make_layers()
    reference = Reference(layers, is_async, "cuda")
    trainee = Trainee(layers, None) if compact else OpaqueTrainee(layers)
    for x in batches(16):
        torch.manual_seed(7)
        if isinstance(trainee, OpaqueTrainee):
            trainee.iterate(x, is_async)
        else:
            trainee.forward_backward(x)
            trainee.model.step(trainee.optimizer, is_async, scaler=trainee.scaler)
            trainee.scaler.update(is_async=is_async)
        torch.manual_seed(7)
        reference.iterate(x)
        assert trainee.scaler.get_scale() == reference.effective.item()
    assert 3 <= sum(reference.skipped) < 14
    for got, wanted in zip(trainee.masters(), reference.masters, strict=True):
        torch.testing.assert_close(got, wanted.cpu(), rtol=1e-3, atol=1e-4)


class Mixed(nn.Module):
    """Several dtypes, sizes that leave gaps in the packed gradients, a parameter that gets no gradient."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.sixteen = nn.Parameter(torch.randn(3, 5).half())
        self.wide = nn.Parameter(torch.randn(5))
        self.unused = nn.Parameter(torch.randn(4))
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.narrow.float().sum().tanh() + (x[:, :3] @ self.sixteen.float()).sum(1, keepdim=True)
        return x[:, :5] * self.wide * self.shared.sum() if x.shape[1] == 5 else x


def shared_layers() -> nn.Sequential:
    torch.manual_seed(2)
    shared = nn.Parameter(torch.randn(11))
    return nn.Sequential(*[Mixed(shared) for _ in range(3)])


@pytest.mark.parametrize("spec", ["host:1", "host:2", "host:4", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
@pytest.mark.parametrize("calls", [1, 3])
def test_norms_taken_on_the_devices_are_those_of_the_gradients(spec: str, calls: int, host_passes: list[int]) -> None:
    roundpipe.use_devices(spec)
    layers = shared_layers()
    model = RoundPipe(layers, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    optimizer = roundpipe.optim.SGD(model, lr=0.0, max_grad_norm=float("inf"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        for _ in range(calls):
            model.forward_backward((torch.randn(4, 5, generator=generator),), loss_fn=lambda out, _: out.square().sum())
        model.synchronize()
        gradients = [p.grad.double() for p in layers.parameters() if p.grad is not None]
        assert len(gradients) == 10
        wanted = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        # Gradients that were shown may have been changed, so those are looked at on the host.
        model.step(optimizer)
        model.synchronize()
        assert optimizer.grad_norm == pytest.approx(wanted, rel=1e-12)
        host_passes.clear()
        for _ in range(calls):
            model.forward_backward((torch.randn(4, 5, generator=generator),), loss_fn=lambda out, _: out.square().sum())
        image = {unit.key: model._state.window.image(unit) for unit in model._state.units}
        model.step(optimizer)
        model.synchronize()
        gradients = [g.double() for unit in model._state.units for g in unit.gradient_views(image[unit.key])]
        wanted = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert optimizer.grad_norm == pytest.approx(wanted, rel=1e-12)
        assert host_passes == []


def test_records_of_norms_are_given_back() -> None:
    layers = make_layers().float()
    model = RoundPipe(layers, model_run_config=CONFIG)
    optimizer = roundpipe.optim.SGD(model, lr=1e-3, max_grad_norm=1.0)
    live = []
    for _ in range(4):
        model.forward_backward((torch.randn(ROWS, WIDTH),), loss_fn=lambda out, _: out.sum())
        model.step(optimizer)
        model.synchronize()
        at_rest()
        live.append(_ops.engine_live(engines.current().handle)[0])
    assert live[-1] == live[1], live
    model.forward_backward((torch.randn(ROWS, WIDTH),), loss_fn=lambda out, _: out.sum())
    model.zero_grad()
    with pytest.raises(RoundPipeError):
        model.forward_backward((torch.randn(ROWS, WIDTH),), loss_fn=lambda out, _: out.bad())
    model.zero_grad()
    model.synchronize()
    at_rest()
    assert _ops.engine_live(engines.current().handle)[0] == live[1]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_on_the_device(value: float, host_passes: list[int]) -> None:
    model = RoundPipe(make_layers().float(), model_run_config=CONFIG)
    optimizer = roundpipe.optim.SGD(model, lr=0.1, max_grad_norm=1.0)
    scaler = GradScaler(init_scale=2.0)
    x = torch.randn(ROWS, WIDTH)

    def train(factor: float, step: Callable[[], None]) -> None:
        model.forward_backward((x,), loss_fn=lambda out, _: scaler.scale(out.sum()) * factor)
        step()
        scaler.update(is_async=False)

    for factor in (value, 1.0, value):
        before = [w.clone() for _, w in optimizer.named_masters()]
        train(factor, lambda: model.step(optimizer, is_async=False, scaler=scaler))
        same = [torch.equal(a, b) for a, (_, b) in zip(before, optimizer.named_masters(), strict=True)]
        assert all(same) if factor == value or factor != factor else not any(same)
        assert math.isfinite(optimizer.grad_norm) == (factor == 1.0)
    assert scaler.get_scale() == 0.5 and host_passes == []


def test_misuse_is_explained() -> None:
    trainee = Trainee(make_layers(), None)
    x = batches(1)[0]
    with pytest.raises(ConfigError, match="clip with its max_grad_norm"):
        trainee.scaler.unscale_(trainee.optimizer)
    with pytest.raises(ConfigTypeError, match="only scaler="):
        trainee.model.step(trainee.optimizer, True, scaler=5)
    trainee.forward_backward(x)
    trainee.model.step(trainee.optimizer, scaler=GradScaler(enabled=False))
    trainee.scaler = GradScaler(init_scale=2.0)
    for _ in range(2):
        trainee.forward_backward(x)
        trainee.model.step(trainee.optimizer, scaler=trainee.scaler)
    with pytest.raises(RoundPipeError, match=r"stepped twice since the last GradScaler.update\(\)"):
        trainee.model.synchronize()
