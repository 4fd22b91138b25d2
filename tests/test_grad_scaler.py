"""GradScaler beside the optimizer thread, against torch's arithmetic in a plain loop of float16 training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, _ops, finite_checks
from roundpipe import engine as engines
from roundpipe.errors import ConfigError, RoundPipeError, StageError

from . import oracle

WIDTH, ROWS, PIECES = 8, 6, 2
SETTINGS = dict(init_scale=2.0**26, growth_interval=3)  # overflows at first, then backs off and grows
CONFIG = RoundPipeRunConfig(num_microbatch=PIECES)


def make_layers(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1)).half()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator).half() for _ in range(count)]


def criterion(output: Tensor) -> Tensor:
    return output.float().square().sum() / ROWS


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Reference:
    """float16 layers, float32 masters, torch's operators for check, unscaling and update of the scale."""

    def __init__(self, layers: nn.Sequential, is_async: bool, device: str = "cpu") -> None:
        self.layers = copy.deepcopy(layers).to(device)
        self.device = device
        self.is_async = is_async
        self.masters = [nn.Parameter(p.detach().float()) for p in self.layers.parameters()]
        self.optimizer = make_optimizer(self.masters)
        self.newest = torch.tensor(SETTINGS["init_scale"])
        self.tracker = torch.zeros((), dtype=torch.int32)
        self.effective = self.newest.clone()
        self.skipped: list[bool] = []

    def iterate(self, x: Tensor, max_norm: float | None = None) -> None:
        before = [p.detach().half() for p in self.masters]
        self.layers.zero_grad()
        scale = self.effective.item()
        oracle.forward_backward(
            list(self.layers),
            (x.to(self.device),),
            loss_fn=lambda out, _: criterion(out) * scale,
            num_microbatch=PIECES,
            device=self.device,
        )
        for master, weight in zip(self.masters, self.layers.parameters(), strict=True):
            master.grad = weight.grad.float()
        found = torch.zeros((), device=self.device)
        inverse = self.effective.double().reciprocal().float().to(self.device)
        torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in self.masters], found, inverse)
        if not found:
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.masters, max_norm)
            self.optimizer.step()
        self.skipped.append(bool(found))
        late = self.newest.clone()
        torch._amp_update_scale_(self.newest, self.tracker, found.cpu(), 2.0, 0.5, SETTINGS["growth_interval"])
        self.effective = late if self.is_async else self.newest.clone()
        # The next iteration computes with the weights from before this step, or with the new ones.
        shown = before if self.is_async else [p.detach().half() for p in self.masters]
        with torch.no_grad():
            for weight, value in zip(self.layers.parameters(), shown, strict=True):
                weight.copy_(value)


class Trainee:
    def __init__(self, layers: nn.Sequential, make: Callable[[Any], torch.optim.Optimizer] = make_optimizer) -> None:
        self.model = RoundPipe(copy.deepcopy(layers), optim_dtype=torch.float32, model_run_config=CONFIG)
        with OptimizerCtx():
            self.optimizer = make(self.model.parameters())
        self.scaler = GradScaler(**SETTINGS)

    def forward_backward(self, x: Tensor) -> Tensor:
        return self.model.forward_backward((x,), loss_fn=lambda out, _: self.scaler.scale(criterion(out)))

    def iterate(self, x: Tensor, is_async: bool, max_norm: float | None = None) -> None:
        self.forward_backward(x)
        self.model.step(self.update, is_async, max_norm)
        self.scaler.update(is_async=is_async)

    def update(self, max_norm: float | None = None) -> None:
        if max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def masters(self) -> list[Tensor]:
        self.model.synchronize()
        return [p.detach().clone() for p in self.model.optim_parameters()]


@pytest.fixture(autouse=True)
def devices() -> Iterator[None]:
    roundpipe.use_devices("host:2")
    yield
    if (engine := engines._engine) is not None and engine.simulated:
        _ops.engine_inject(engine.handle, "delay", 0, 0)


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_training_equals_the_plain_loop(count: int, is_async: bool, max_norm: float | None) -> None:
    roundpipe.use_devices(f"host:{count}")
    layers = make_layers()
    trainee, reference = Trainee(layers), Reference(layers, is_async)
    _ops.engine_inject(engines.current().handle, "delay", count, 300)
    scales: list[float] = []
    for x in batches(24):
        torch.manual_seed(7)
        trainee.iterate(x, is_async, max_norm)
        torch.manual_seed(7)
        reference.iterate(x, max_norm)
        assert trainee.scaler.get_scale() == reference.effective.item()
        scales.append(reference.newest.item())
    assert trainee.scaler.get_scale(up_to_date=True) == reference.newest.item()
    assert trainee.scaler._get_growth_tracker(up_to_date=True) == reference.tracker.item()
    assert 3 <= sum(reference.skipped) < 20
    assert any(later > earlier for earlier, later in zip(scales, scales[1:], strict=False))  # it has grown, too
    assert all(map(torch.equal, trainee.masters(), reference.masters))
    ours, torchs = trainee.optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    for index, state in torchs.items():
        assert all(torch.equal(ours[index][name], value) for name, value in state.items())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: roundpipe.optim.AdamW(p, lr=1e-2),
        lambda p: roundpipe.optim.SGD(p, lr=1e-2, momentum=0.9),
    ],
    ids=["fused", "ours", "sgd"],
)
def test_other_optimizers_and_a_skipped_step_changes_nothing(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    layers = make_layers()
    trainee = Trainee(layers, make)
    reference = Reference(layers, False)
    reference.optimizer = make(reference.masters)
    for x in batches(14):
        torch.manual_seed(7)
        before, state = trainee.masters(), copy.deepcopy(trainee.optimizer.state_dict())
        trainee.iterate(x, False)
        torch.manual_seed(7)
        reference.iterate(x)
        if reference.skipped[-1]:
            assert all(map(torch.equal, trainee.masters(), before))
            after = trainee.optimizer.state_dict()["state"]
            assert after.keys() == state["state"].keys()
            for index, values in state["state"].items():
                assert all(torch.equal(after[index][name], value) for name, value in values.items())
    assert 3 <= sum(reference.skipped) < 12
    for got, wanted in zip(trainee.masters(), reference.masters, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


def test_the_check_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("gradients were looked at a second time")

    trainee = Trainee(make_layers())
    known: list[bool | None] = []

    def update() -> None:
        known.extend(finite_checks.ask(p.grad) for p in trainee.model.parameters())
        trainee.update()

    monkeypatch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", refuse)
    for x in batches(9):
        trainee.forward_backward(x)
        trainee.model.step(update, is_async=False)
        trainee.scaler.update(is_async=False)
    assert set(known) == {False, True}


def test_gradients_that_the_step_function_changed_are_looked_at_again() -> None:
    trainee = Trainee(make_layers())
    trainee.scaler = GradScaler(init_scale=1.0)
    before = trainee.masters()

    def update(bad: float) -> None:
        parameters = list(trainee.model.parameters())
        parameters[2].grad[0] = bad
        assert finite_checks.ask(parameters[2].grad) is None
        trainee.update()

    trainee.forward_backward(batches(1)[0])
    trainee.model.step(update, False, float("inf"))
    trainee.scaler.update(is_async=False)
    assert all(map(torch.equal, trainee.masters(), before))
    assert trainee.scaler.get_scale() == 0.5
    trainee.forward_backward(batches(1)[0])
    trainee.model.step(update, False, 1.0)
    assert not any(map(torch.equal, trainee.masters(), before))


def test_two_optimizers_are_skipped_each_for_itself() -> None:
    model = RoundPipe(make_layers(), optim_dtype=torch.float32, model_run_config=CONFIG)
    with OptimizerCtx():
        *most, last = model.parameters()
    first, second = torch.optim.SGD(most, lr=1.0), torch.optim.SGD([last], lr=1.0)
    scaler = GradScaler(init_scale=4.0)
    before = [p.detach().clone() for p in (*most, last)]

    def update() -> None:
        most[1].grad[0] = float("nan")
        scaler.step(first)
        scaler.step(second)

    model.forward_backward((batches(1)[0],), loss_fn=lambda out, _: scaler.scale(criterion(out)))
    model.step(update, is_async=False)
    scaler.update(is_async=False)
    assert all(map(torch.equal, most, before)) and not torch.equal(last, before[-1])
    assert scaler.get_scale() == 2.0


def test_a_failed_call_leaves_the_scale_and_the_next_iteration_works() -> None:
    trainee = Trainee(make_layers())
    trainee.scaler = GradScaler(init_scale=4.0)
    x = batches(1)[0]

    def fails() -> None:
        raise ZeroDivisionError

    for step in (fails, trainee.update):
        trainee.forward_backward(x)
        trainee.model.step(step)
        trainee.scaler.update()
        if step is fails:
            with pytest.raises(StageError):
                trainee.model.synchronize()
    trainee.model.synchronize()
    assert trainee.scaler.get_scale(up_to_date=True) == 4.0
    assert trainee.scaler._get_growth_tracker() == 1


def test_states_are_torchs() -> None:
    ours = GradScaler(init_scale=3.0, growth_factor=1.5, backoff_factor=0.25, growth_interval=7)
    torchs = torch.amp.GradScaler("cpu", init_scale=1.0)
    torchs.load_state_dict(ours.state_dict())
    assert torchs.state_dict() == ours.state_dict()
    torchs.scale(torch.ones(()))
    torchs.set_growth_factor(5.0)
    torchs.update(16.0)
    ours.load_state_dict(torchs.state_dict())
    assert ours.get_scale() == 16.0 and ours.get_growth_factor(up_to_date=True) == 5.0
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert twin.state_dict() == ours.state_dict()
    assert GradScaler().state_dict() == torch.amp.GradScaler("cpu").state_dict()
    disabled = GradScaler(enabled=False)
    assert disabled.state_dict() == {} and disabled.get_scale() == 1.0 and not disabled.is_enabled()
    assert pickle.loads(pickle.dumps(disabled)).state_dict() == {}


def test_a_given_scale_and_settings() -> None:
    scaler = GradScaler(init_scale=8.0)
    scaler.update(2.0)
    assert scaler.get_scale() == 8.0 and scaler.get_scale(up_to_date=True) == 2.0
    scaler.update(torch.tensor([4.0]))
    assert scaler.get_scale() == 2.0
    scaler.update(32.0, is_async=False)
    assert scaler.get_scale() == 32.0
    scaler.set_growth_interval(5)
    scaler.set_backoff_factor(0.1)
    assert (scaler.get_growth_interval(), scaler.get_backoff_factor(True)) == (5, 0.1)
    scaled = scaler.scale([torch.ones(2), (torch.ones(1), torch.ones(1, dtype=torch.float16))])
    assert scaled[0].tolist() == [32.0, 32.0] and scaled[1][1].item() == 32.0
    assert isinstance(scaled, list) and isinstance(scaled[1], tuple)


def test_without_roundpipe_it_is_a_plain_scaler() -> None:
    weight, wanted = (nn.Parameter(torch.ones(3)) for _ in range(2))
    scaler, torchs = GradScaler(init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for parameter, one in ((weight, scaler), (wanted, torchs)):
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        for factor in (1.0, float("inf"), 3.0):
            optimizer.zero_grad()
            one.scale((parameter * factor).sum()).backward()
            one.step(optimizer)
            one.update(**({"is_async": False} if one is scaler else {}))
    assert torch.equal(weight, wanted) and scaler.get_scale() == torchs.get_scale() == 512.0


def test_disabled_does_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = GradScaler(enabled=False)
    loss = scaler.scale(weight.sum())
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.5] * 3


def test_misuse_is_explained() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for arguments, message in (
        (dict(init_scale=0.0), "'init_scale': expected a positive number, got 0.0"),
        (dict(growth_factor=1.0), "'growth_factor'.*above 1"),
        (dict(backoff_factor=1.0), "'backoff_factor'.*between 0 and 1"),
        (dict(growth_interval=0), "'growth_interval'.*above 0"),
        (dict(growth_interval=2.5), "'growth_interval'"),
    ):
        with pytest.raises(ConfigError, match=message):
            GradScaler(**arguments)
    scaler = GradScaler(init_scale=2.0)
    with pytest.raises(ConfigError, match=r"has a gradient.*OptimizerCtx.*model\.step\(lambda"):
        scaler.step(optimizer)
    weight.grad = torch.ones(3)
    scaler.unscale_(optimizer)
    with pytest.raises(RoundPipeError, match="twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RoundPipeError, match=r"called twice.*call update\(\)"):
        scaler.step(optimizer)
    with pytest.raises(RoundPipeError, match=r"after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RoundPipeError, match="closures"):
        scaler.step(optimizer, closure=lambda: 0.0)
    scaler.update(is_async=False)
    with pytest.raises(RoundPipeError, match="no gradients were looked at"):
        scaler.update(is_async=False)
    scaler.update()  # asynchronous: told later
    with pytest.raises(RoundPipeError, match="no gradients were looked at"):
        scaler.get_scale(up_to_date=True)
    assert scaler.get_scale(up_to_date=True) == 2.0
    for bad in (-1.0, float("nan"), "2", torch.ones(2)):
        with pytest.raises(ConfigError, match="expected a positive number"):
            scaler.update(bad)
    with pytest.raises(ConfigError, match="expected a tensor or an iterable of tensors, got str"):
        scaler.scale("loss")
    for state, message in (({}, "empty"), ({"scale": 1.0}, "lacks _growth_tracker, backoff_factor")):
        with pytest.raises(ConfigError, match=message):
            scaler.load_state_dict(state)
    trainee = Trainee(make_layers())
    trainee.forward_backward(batches(1)[0])
    trainee.model.step(trainee.scaler.update, is_async=True)
    with pytest.raises(StageError, match="inside a step function"):
        trainee.model.synchronize()
    half = RoundPipe(make_layers(), model_run_config=CONFIG)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(half.parameters(), lr=1.0)
    half.forward_backward((batches(1)[0],), loss_fn=lambda out, _: criterion(out))
    half.step(lambda: scaler.step(optimizer))
    with pytest.raises(StageError, match=r"float16.*optim_dtype=torch.float32"):
        half.synchronize()
