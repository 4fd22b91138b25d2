"""A run that was saved and resumed is, bit for bit, the run that was neither; and saving changes nothing."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import roundpipe
from roundpipe.checkpoint import small_state

from .checkpoint_runs import Run, assert_same

BEFORE, AFTER = 3, 3


def three_ways(tmp_path: Path, devices: tuple[str, str], how: str, mode: str, **options: Any) -> None:
    roundpipe.use_devices(devices[0])
    plain = Run(how, mode, **options)
    torch.manual_seed(11)
    want = plain.train(BEFORE + AFTER).bits()
    interrupted = Run(how, mode, **options)
    torch.manual_seed(11)
    handle = interrupted.train(BEFORE).save(tmp_path / "at 3")
    assert_same(interrupted.train(AFTER).bits(), want)  # while it is being written
    handle.wait()
    roundpipe.use_devices(devices[1])
    other = Run(how, mode, **options, seed=5)
    torch.manual_seed(12)
    other.train(2)  # what is loaded finds something to overwrite
    other.losses.clear()
    assert_same(other.load(tmp_path / "at 3").train(AFTER).bits(), want)


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("split", "exact"),
        ("split", "async"),
        ("split", "mixed"),
        ("split", "announced"),
        ("float32", "async"),
        ("bfloat16 moments", "exact"),
        ("int8 moments", "mixed"),
    ],
)
def test_compact(tmp_path: Path, how: str, mode: str) -> None:
    three_ways(tmp_path, ("host:2", "host:1"), how, mode)


@pytest.mark.parametrize(
    ("how", "mode"), [("adamw", "exact"), ("adamw", "async"), ("sgd", "async"), ("sgd", "mixed"), ("lists", "exact")]
)
def test_step_function(tmp_path: Path, how: str, mode: str) -> None:
    three_ways(tmp_path, ("host:1", "host:3"), how, mode)


@pytest.mark.parametrize(
    ("how", "dtype", "mode"),
    [
        ("split", torch.bfloat16, "async"),
        ("float32", torch.float16, "exact"),
        ("adamw", torch.float16, "exact"),
        ("adamw", torch.float16, "async"),
    ],
)
def test_with_a_loss_scale(tmp_path: Path, how: str, dtype: torch.dtype, mode: str) -> None:
    """Step 4, after the checkpoint, overflows; before it the scale has grown."""
    three_ways(tmp_path, ("host:2", "host:3"), how, mode, dtype=dtype, scaled=True)


@pytest.mark.parametrize(
    ("how", "mode", "pin_model"), [("split", "async", "register"), ("split", "exact", "off"), ("sgd", "async", "off")]
)
def test_weights_that_stay_in_place(tmp_path: Path, how: str, mode: str, pin_model: str) -> None:
    three_ways(tmp_path, ("host:2", "host:2"), how, mode, dtype=torch.float32, pin_model=pin_model)


def test_again_and_again(tmp_path: Path) -> None:
    """From a checkpoint of a resumed run, in both directions between modes, replacing the one before."""
    roundpipe.use_devices("host:2")
    plain = Run("split", "mixed")
    torch.manual_seed(1)
    want = plain.train(6).bits()
    run = Run("split", "mixed")
    torch.manual_seed(1)
    for number in range(6):
        handle = run.train(1).save(tmp_path / "last", overwrite=True)
        if number % 2:
            handle.wait()
            run = Run("split", "mixed", seed=number)
            torch.manual_seed(99)
            run.load(tmp_path / "last")
    assert_same(run.bits(), want)
    run.save(tmp_path / "last", overwrite=True).wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last"]


@pytest.mark.parametrize("how", ["split", "sgd"])
def test_gradients_that_have_accumulated_stay(tmp_path: Path, how: str) -> None:
    """They are not saved, but saving does not touch them; loading drops them."""
    roundpipe.use_devices("host:2")

    def accumulate(run: Run) -> None:
        run.model.forward_backward((torch.ones(6, 8).bfloat16(),), loss_fn=lambda out, _: out.float().square().mean())

    found = []
    for saves in (False, True):
        run = Run(how, "async")
        torch.manual_seed(2)
        run.train(2)
        accumulate(run)
        if saves:
            run.save(tmp_path / how)
        found.append(run.train(2).bits())
    assert_same(*found)
    accumulate(run)
    torch.manual_seed(3)
    want = run.load(tmp_path / how).train(1).bits()
    assert_same(Run(how, "async", seed=1).load(tmp_path / how).train(1).bits(), want)


def test_random_numbers(tmp_path: Path) -> None:
    roundpipe.use_devices("host:2")

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), np.random.normal()

    run = Run("split", "exact").train(1)
    np.random.normal()  # numpy keeps the second of a pair
    run.save(tmp_path / "with").wait()
    want = draw()
    run.load(tmp_path / "with")
    assert draw() == want
    roundpipe.load(run.model, None, None, tmp_path / "with")  # weights alone leave them
    assert draw() != want
    roundpipe.load(run.model, None, None, tmp_path / "with", rng_state=True)
    assert draw() == want
    run.save(tmp_path / "without", rng_state=False).wait()
    run.load(tmp_path / "without")
    assert draw() != want
    with pytest.raises(roundpipe.errors.CheckpointMismatch, match="rng_state"):
        roundpipe.load(run.model, None, None, tmp_path / "without", rng_state=True)


class Devices:
    """Generators that stand for those of GPUs."""

    def __init__(self, number: int, first_seed: int) -> None:
        self.generators = [torch.Generator().manual_seed(first_seed + i) for i in range(number)]

    def draw(self) -> list[list[float]]:
        return [torch.rand(3, generator=one).tolist() for one in self.generators]


@pytest.mark.parametrize("loading", [0, 1, 3, 4])
@pytest.mark.parametrize("saving", [0, 3])
def test_random_numbers_of_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, saving: int, loading: int
) -> None:
    roundpipe.use_devices("host:2")
    run = Run("split", "exact").train(1)
    before, after, alone = Devices(saving, 5), Devices(loading, 50), Devices(loading, 50)
    monkeypatch.setattr(small_state, "_device_generators", lambda: before.generators)
    before.draw()
    run.save(tmp_path / "a").wait()
    want = before.draw()[:loading]
    want += alone.draw()[len(want) :]  # as if nothing had been loaded
    monkeypatch.setattr(small_state, "_device_generators", lambda: after.generators)
    run.load(tmp_path / "a")
    assert after.draw() == want
    assert ("random numbers of 3 devices" in caplog.text) == (saving == 3 and loading != 3)


def test_random_numbers_of_another_kind_of_device_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roundpipe.use_devices("host:2")
    run = Run("split", "exact").train(1)
    monkeypatch.setattr(
        small_state,
        "_device_generators",
        lambda: [SimpleNamespace(get_state=lambda: torch.zeros(16, dtype=torch.uint8))],
    )
    run.save(tmp_path / "a").wait()
    own = Devices(1, 5)
    monkeypatch.setattr(small_state, "_device_generators", lambda: own.generators)
    run.load(tmp_path / "a")
    assert own.draw() == Devices(1, 5).draw()
    assert "not of its kind" in caplog.text


@pytest.mark.needs_cuda
def test_random_numbers_of_gpus(tmp_path: Path) -> None:
    roundpipe.use_devices("cuda")
    run = Run("split", "exact").train(1)
    gpus = [one.device for one in roundpipe.devices()]
    [torch.rand(3, device=gpu) for gpu in gpus]
    run.save(tmp_path / "a").wait()
    want = [torch.rand(3, device=gpu).tolist() for gpu in gpus]
    run.load(tmp_path / "a")
    assert [torch.rand(3, device=gpu).tolist() for gpu in gpus] == want


def test_weights_alone_are_the_newest(tmp_path: Path) -> None:
    """With no optimizer there is no step to leave anything to, also where the saved one was asynchronous."""
    roundpipe.use_devices("host:2")
    for how in ("split", "adamw"):
        run = Run(how, "async").train(3)
        run.save(tmp_path / how).wait()
        want = {name: value.clone() for name, value in run.model.state_dict().items()}
        other = Run(how, "async", seed=4)
        roundpipe.load(other.model, None, None, tmp_path / how)
        raw = other.model._modules["model"].state_dict()
        assert all(torch.equal(raw[name], value) for name, value in want.items())
        other.train(1)
        again = Run(how, "async", seed=4)  # a loaded weight is not reverted by the master from before
        roundpipe.load(again.model, None, None, tmp_path / how)
        for group in again.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        again.scheduler = torch.optim.lr_scheduler.LambdaLR(again.optimizer, lambda n: 0.0)
        again.train(2)
        now = again.model.state_dict()
        trained = dict(again.model._naming_model().named_parameters())
        assert all(torch.equal(now[name], want[name]) for name in trained)


@pytest.mark.parametrize(("how", "seed"), [("split", 0), ("split", 1), ("adamw", 2), ("sgd", 3)])
def test_any_order_of_steps_saves_and_loads(tmp_path: Path, how: str, seed: int) -> None:
    """What stands in a checkpoint is the state of a run that did the same without saving."""
    roundpipe.use_devices("host:2")
    draw = random.Random(seed)
    done: list[str] = []
    run = Run(how, "exact")
    torch.manual_seed(seed)
    saved: dict[str, list[str]] = {}
    handles = []
    actions = [draw.choice(["exact", "async", "async", "save", "load", "publish"]) for _ in range(13)]
    for number, action in enumerate(["async", "save", *actions, "async", "exact"]):
        if action == "save":
            name = f"{number}"
            handles.append(run.save(tmp_path / name))
            saved[name] = list(done)
        elif action == "load" and saved:
            name = draw.choice(list(saved))
            run = Run(how, "exact", seed=number) if draw.random() < 0.5 else run
            run.load(tmp_path / name)
            done = list(saved[name])
        elif action == "publish":
            run.model.synchronize()
            done.append(action)
        elif action != "load":
            run.mode = action
            run.train(1)
            done.append(action)
    plain = Run(how, "exact")
    torch.manual_seed(seed)
    for action in done:
        if action == "publish":
            plain.model.synchronize()
        else:
            plain.mode = action
            plain.train(1)
    assert_same(run.bits(), plain.bits())
    handles[-1].wait()


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("how", "mode"), [("split", "async"), ("adamw", "exact"), ("float32", "announced")])
def test_on_a_gpu(tmp_path: Path, how: str, mode: str) -> None:
    three_ways(tmp_path, ("cuda:0", "cuda:0"), how, mode)
