"""Where weights live on the host changes nothing that is computed, and what was locked is unlocked."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import ConfigError, HostOutOfMemory, RoundPipeError
from roundpipe.host_placement import peak_of_copying

from .at_rest import at_rest
from .model_zoo import CASES, Case, mse

REGISTERED, PINNED, PAGEABLE, FILE, REGISTRATIONS = range(5)
WIDE = 512  # a float32 weight of this width squared is worth a registration of its own


claimed_before = [0, 0, 0, 0, 0]  # by what other tests of the process still hold


def claims() -> list[int]:
    """Of the present test."""
    gc.collect()
    return [now - before for now, before in zip(_ops.host_claim_stats(0), claimed_before, strict=True)]


@pytest.fixture(autouse=True)
def nothing_stays_claimed() -> Iterator[None]:
    at_rest()
    claimed_before[:] = _ops.host_claim_stats(0)
    yield
    at_rest()
    assert claims() == [0, 0, 0, 0, 0]


def wide() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh()) for _ in range(4)], nn.Linear(WIDE, 8))


def uneven() -> nn.Sequential:
    """An expanded weight, slices of one buffer, and one that is stored transposed."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 4))
    buffer = torch.randn(3 * 64 + 5)
    model[0].weight = nn.Parameter(torch.randn(8, 1).expand(8, 8), requires_grad=False)
    for i in (1, 2):
        model[i].weight = nn.Parameter(buffer[3 + 64 * i : 67 + 64 * i].view(8, 8))
    model[3].weight = nn.Parameter(torch.randn(8, 8).t())
    return model


ZOO = {name: CASES[name] for name in ("cnn", "decoder", "frozen", "odd_outputs")}
ZOO["uneven"] = Case(uneven, CASES["mlp"].batch, mse)
ZOO["wide"] = Case(wide, lambda rows: ((torch.randn(rows, WIDE),), torch.randn(rows, 8)), mse)


def torch_step(model: RoundPipe) -> Callable[[bool], None]:
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda is_async: model.step(update, is_async)


def compact_step(model: RoundPipe) -> Callable[[bool], None]:
    optimizer = roundpipe.optim.AdamW(model, lr=1e-2, max_grad_norm=1.0)
    return lambda is_async: model.step(optimizer, is_async)


def train(
    case: Case, pin_model: str, make_step: Callable[[RoundPipe], Callable[[bool], None]]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Losses, gradients before the last step, and the state after it."""
    torch.manual_seed(0)
    layers = case.make()
    model = RoundPipe(layers, pin_model=pin_model)
    step = make_step(model)
    losses: list[torch.Tensor] = []
    config = RoundPipeRunConfig(num_microbatch=2)
    for is_async in (True, True, False):
        for _ in range(2):
            args, label = case.batch(4)
            losses.append(model.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config))
        if not is_async:
            model.synchronize()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in layers.named_parameters()}
        step(is_async)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return losses, gradients, state


@pytest.mark.parametrize(("devices", "make_step"), [(1, torch_step), (2, compact_step), (3, torch_step)])
@pytest.mark.parametrize("name", ZOO)
def test_training_is_the_same_bit_for_bit(name: str, devices: int, make_step: Any) -> None:
    roundpipe.use_devices(f"host:{devices}")
    want = train(ZOO[name], "alloc", make_step)
    for pin_model in ("register", "off"):
        losses, gradients, state = train(ZOO[name], pin_model, make_step)
        assert all(map(torch.equal, losses, want[0]))
        assert gradients.keys() == want[1].keys() and any(g is not None for g in gradients.values())
        for key, gradient in gradients.items():
            other = want[1][key]
            assert (gradient is None) == (other is None), key
            assert gradient is None or other is None or torch.equal(gradient, other), key
        assert all(torch.equal(value, want[2][key]) for key, value in state.items())


def test_random_delays_change_nothing_and_the_checker_stays_silent() -> None:
    roundpipe.use_devices("host:2")
    want = train(ZOO["wide"], "alloc", torch_step)
    handle = engines.current().handle
    for pin_model in ("register", "off"):
        _ops.engine_inject(handle, "delay", 5, 200)
        try:
            got = train(ZOO["wide"], pin_model, torch_step)
        finally:
            _ops.engine_inject(handle, "delay", 0, 0)
        assert all(map(torch.equal, got[0], want[0]))
        assert all(torch.equal(value, want[2][key]) for key, value in got[2].items())


def weights_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_register_locks_weights_where_they_are_and_unlocks_them_in_any_order() -> None:
    roundpipe.use_devices("host:2")
    for order in ((0, 1), (1, 0)):
        models = [wide(), wide()]
        before = [{n: p.data_ptr() for n, p in m.named_parameters()} for m in models]
        wrapped: list[RoundPipe | None] = [RoundPipe(m, pin_model="register") for m in models]
        assert before == [{n: p.data_ptr() for n, p in m.named_parameters()} for m in models]
        stats = _ops.host_claim_stats(wrapped[0]._state.placement.claim)  # type: ignore[union-attr]
        large = sum(p.numel() * 4 for p in models[0].parameters() if p.numel() == WIDE * WIDE)
        assert stats[REGISTERED] + 8192 >= large and stats[REGISTRATIONS] >= 1
        assert stats[PAGEABLE] <= weights_bytes(models[0]) - large + 16 * 4096
        both = claims()[REGISTERED]
        for at in order:
            wrapped[at] = None
            both, before_this = claims()[REGISTERED], both
            assert both < before_this
        assert both == 0
        for m in models:  # ordinary tensors again
            assert torch.isfinite(m(torch.randn(2, WIDE))).all()


def test_only_pageable_weights_go_through_bounce_buffers() -> None:
    roundpipe.use_devices("host:1@64MiB")
    handle = engines.current().handle
    bounced = {}
    for pin_model in ("alloc", "register", "off"):
        model = RoundPipe(wide(), pin_model=pin_model)
        _ops.engine_reset_bytes(handle)
        with torch.no_grad():
            model(torch.randn(2, WIDE))
        bounced[pin_model] = _ops.engine_bounced_bytes(handle, 0)
        size = weights_bytes(model.model)
        del model
    assert bounced["alloc"] == 0
    assert 0 < bounced["register"] < size / 20  # the small ones, and pages that others share
    assert bounced["off"] == size


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_edits_loads_copies_and_a_new_wrapper(pin_model: str) -> None:
    roundpipe.use_devices("host:2")
    layers = wide()
    model = RoundPipe(layers, pin_model=pin_model)
    x = torch.randn(3, WIDE)

    def out(of: RoundPipe) -> torch.Tensor:
        with torch.no_grad():
            return of(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))

    home = layers[0][0].weight.data_ptr()
    with torch.no_grad():
        layers[0][0].weight.mul_(0.5)
    assert torch.equal(out(model), layers(x))
    layers[0][0].weight.data = torch.randn(WIDE, WIDE)  # re-pointed: its value moves home
    want = layers(x)
    assert torch.equal(out(model), want) and layers[0][0].weight.data_ptr() == home
    model.load_state_dict(wide().state_dict(), assign=True)
    assert torch.equal(out(model), wide()(x)) and layers[0][0].weight.data_ptr() == home
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert twin._state.placement.asked == thawed._state.placement.asked == pin_model
    assert torch.equal(out(twin), out(model)) and torch.equal(out(thawed), out(model))
    del twin, thawed
    locked = claims()
    again = RoundPipe(layers, pin_model=pin_model)
    assert torch.equal(out(again), wide()(x)) and claims() == locked
    with pytest.raises(ConfigError, match="was replaced"):
        out(model)
    del model
    assert claims() == locked
    again.bfloat16()
    x = x.bfloat16()
    assert torch.equal(out(again), wide().bfloat16()(x))


def test_a_model_follows_other_devices() -> None:
    roundpipe.use_devices("host:2")
    model = RoundPipe(wide(), pin_model="register")
    x = torch.randn(3, WIDE)
    with torch.no_grad():
        want = model(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        roundpipe.use_devices("host:3@64MiB")
        assert torch.equal(model(x, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)), want)
    assert claims()[REGISTERED] > 0


@pytest.mark.parametrize("failing", [0, 2])
def test_a_registration_that_fails_gives_everything_back(failing: int) -> None:
    roundpipe.use_devices("host:2")
    layers = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(3)])
    gaps = [torch.empty(1 << 20) for _ in range(2)]  # keeps the weights from being one range
    layers[1].weight.data = torch.randn(1 << 20)[: WIDE * WIDE].view(WIDE, WIDE)
    layers[2].weight.data = torch.randn(1 << 20)[-WIDE * WIDE :].view(WIDE, WIDE)
    values = [p.clone() for p in layers.parameters()]
    handle = engines.current().handle
    _ops.engine_inject(handle, "fail_registration", failing, 0)
    try:
        if failing == 0 or _registrations(layers) > failing:
            with pytest.raises(RoundPipeError, match='pin_model="off"'):
                RoundPipe(layers, pin_model="register")
    finally:
        _ops.engine_inject(handle, "fail_registration", -1, 0)
    assert claims() == [0, 0, 0, 0, 0]
    assert all(map(torch.equal, layers.parameters(), values))
    model = RoundPipe(layers, pin_model="register")
    model.forward_backward((torch.randn(4, WIDE),), loss_fn=lambda out, _: out.square().mean())
    model.synchronize()
    del gaps


def _registrations(layers: nn.Module) -> int:
    handle = engines.current().handle
    claim = _ops.host_claim(handle, [p.detach().flatten() for p in layers.parameters()], False)
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * 4) for p in layers.parameters())
    _ops.host_claim_drop(claim)
    return 1 + sum(begin - end > 8192 for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))


def test_copying_that_fails_half_way_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:2")
    layers = wide()
    values = {n: p.clone() for n, p in layers.named_parameters()}
    engines.current()
    used = _ops.host_stats()[2]
    make, made = _ops.host_empty, [0]

    def scarce(size: Any, dtype: torch.dtype) -> torch.Tensor:
        made[0] += 1
        if made[0] == 4:
            raise HostOutOfMemory("not now")
        return make(size, dtype)

    with monkeypatch.context() as patched:
        patched.setattr(_ops, "host_empty", scarce)
        with pytest.raises(HostOutOfMemory):
            RoundPipe(layers)
        made[0] = 0
        fallen = RoundPipe(layers, pin_model="auto")  # copying fails, so they are locked where they are
        assert fallen._state.placement.mode == "register"
        del fallen
    at_rest()
    assert _ops.host_stats()[2] == used
    assert all(torch.equal(p, values[n]) for n, p in layers.named_parameters())
    assert RoundPipe(layers)._state.placement.mode == "alloc"


# -- auto ----------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("memory_is_checked")
@pytest.mark.parametrize(("room", "mode"), [(1 << 40, "alloc"), (5 << 20, "register"), (1 << 20, "off")])
def test_auto_takes_the_first_that_fits_and_says_why(
    room: int, mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roundpipe.use_devices("host:2")
    monkeypatch.setattr(_ops, "host_limits", lambda: [1 << 40, room, 0, 0, room, 1 << 40, 0])
    layers = wide()  # four weights of 1 MiB, and their gradients
    layers[:3].requires_grad_(False)
    layers[3:].requires_grad_(True)
    whole = torch.empty(weights_bytes(layers) // 4)  # one storage, which goes only when the last weight has moved
    at = 0
    for parameter in layers.parameters():
        flat = whole[at : at + parameter.numel()]
        parameter.data = flat.copy_(parameter.data.flatten()).view(parameter.shape)
        at += parameter.numel()
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        model = RoundPipe(layers, pin_model="auto", name="mine")
    assert model._state.placement.mode == mode
    (line,) = [r.getMessage() for r in caplog.records if "auto" in r.getMessage()]
    assert f'mine: pin_model="auto" chose "{mode}"' in line and "of host memory are left" in line


@pytest.mark.usefixtures("memory_is_checked")
def test_auto_falls_back_when_locking_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roundpipe.use_devices("host:2")
    monkeypatch.setattr(_ops, "host_limits", lambda: [1 << 40, 5 << 20, 0, 0, 5 << 20, 1 << 40, 0])
    handle = engines.current().handle
    _ops.engine_inject(handle, "fail_registration", 0, 0)
    whole = torch.randn(8 * WIDE * WIDE)
    layers = nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(8)])
    for i, parameter in enumerate(layers.parameters()):
        parameter.requires_grad_(False)
        parameter.data = whole[i * WIDE * WIDE : (i + 1) * WIDE * WIDE].view(WIDE, WIDE)
    model = RoundPipe(layers, pin_model="auto")
    assert model._state.placement.mode == "off"
    assert "injected failure" in caplog.text


def test_how_much_copying_takes_at_its_peak() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    one = 64 * 64 * 4
    assert peak_of_copying(layers, True) == one
    assert peak_of_copying(layers, False) == 4 * one
    layers[3].weight = layers[0].weight
    assert peak_of_copying(layers, True) == one
    assert peak_of_copying([nn.Sequential(*layers)], True) == 3 * one


@pytest.mark.parametrize("bad", ["pin", None, 3, "ALLOC"])
def test_other_names_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="'alloc', 'register', 'off', 'auto'"):
        RoundPipe(nn.Linear(2, 2), pin_model=bad)


# -- files -----------------------------------------------------------------------------------------------------------
class Adapted(nn.Module):
    """A frozen weight and a small trained addition to it."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE, bias=False)
        self.base.requires_grad_(False)
        self.down = nn.Linear(WIDE, rank, bias=False)
        self.up = nn.Linear(rank, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(path: Path | None) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(*[Adapted() for _ in range(4)])
    if path is not None:
        weights = torch.load(path, mmap=True, weights_only=True)
        for layer, weight in zip(model, weights, strict=True):
            layer.base.weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize("devices", [1, 2])
def test_a_frozen_model_in_a_file_trains_its_adapters(devices: int, tmp_path: Path) -> None:
    roundpipe.use_devices(f"host:{devices}")
    path = tmp_path / "weights.pt"
    torch.save([layer.base.weight.detach() for layer in adapted(None)], path)
    case = Case(lambda: adapted(path), lambda rows: ((torch.randn(rows, WIDE),), torch.randn(rows, WIDE)), mse)
    frozen = sum(layer.base.weight.nbytes for layer in adapted(None))
    probe = RoundPipe(adapted(path), pin_model="off")
    assert claims()[FILE] == frozen and claims()[REGISTERED] == 0
    del probe
    want = train(Case(lambda: adapted(None), case.batch, mse), "alloc", torch_step)
    for pin_model in ("off", "register", "auto"):
        losses, _, state = train(case, pin_model, torch_step)
        assert all(map(torch.equal, losses, want[0]))
        assert all(torch.equal(value, want[2][key]) for key, value in state.items())


@pytest.mark.usefixtures("memory_is_checked")
def test_locking_a_file_is_counted_at_full_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:2")
    path = tmp_path / "weights.pt"
    torch.save([layer.base.weight.detach() for layer in adapted(None)], path)
    for room, mode in ((1 << 40, "alloc"), (3 << 20, "off")):  # 4 MiB in the file
        monkeypatch.setattr(_ops, "host_limits", lambda room=room: [1 << 40, room, 0, 0, room, 1 << 40, 0])
        assert RoundPipe(adapted(path), pin_model="auto")._state.placement.mode == mode


# -- processes -------------------------------------------------------------------------------------------------------
def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exit_with_living_models() -> None:
    out = run("""
        import torch, roundpipe
        from torch import nn
        roundpipe.use_devices("host:2")
        models = [
            roundpipe.RoundPipe(nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)]), pin_model=mode)
            for mode in ("alloc", "register", "off")
        ]
        for model in models:
            model.forward_backward((torch.randn(4, 512),), loss_fn=lambda out, _: out.mean())
        print("done")
    """)
    assert out == "done\n"


PEAK = """
    import gc, torch, roundpipe
    from torch import nn
    roundpipe.use_devices("host:1")
    torch.set_num_threads(1)

    def status(key):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    warm = roundpipe.RoundPipe(nn.Linear(8, 8))
    layers = nn.Sequential(*[nn.Linear(4096, 2048, bias=False) for _ in range(10)])  # 32 MiB each
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    model = roundpipe.RoundPipe(layers, pin_model="alloc")
    after, peak = status("VmRSS"), status("VmHWM")
    print((peak - before) / 2**20, (after - before) / 2**20, roundpipe._ops.host_stats()[2] / 2**20)
"""


def test_copying_a_model_takes_no_second_copy() -> None:
    """Ten layers of 32 MiB: copied one by one, and the model costs its size afterwards."""
    peak, grown, used = map(float, run(PEAK).split())
    assert peak < 48
    assert abs(grown) < 8  # as much as the storages that went
    assert used == pytest.approx(320, abs=2)
