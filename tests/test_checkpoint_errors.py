"""What cannot be saved or loaded is said in words that help; the model and the checkpoint before stay as they are."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, optim
from roundpipe.checkpoint import disk
from roundpipe.errors import CheckpointError, CheckpointMismatch, ConfigError

from .checkpoint_runs import Run, assert_same


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


# -- saving ------------------------------------------------------------------------------------------------------------
def no_space(name: str, after: int) -> Callable[..., Any]:
    real, count = getattr(disk, name), [0]

    def call(*args: Any) -> Any:
        count[0] += 1
        if count[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    return call


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("open_new", 0),
        ("open_new", 3),
        ("write_at", 0),
        ("write_at", 9),
        ("sync", 1),
        ("sync_directory", 1),
        ("rename", 0),
    ],
)
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    run = Run("split", "async").train(2)
    run.save(tmp_path / "a").wait()
    run.train(1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, name, no_space(name, after))
        if name == "rename":
            patch.setattr(disk, "exchange", lambda one, other: False)
        handle = run.save(tmp_path / "a", overwrite=True)
        with pytest.raises(CheckpointError, match=r"a failed.*No space left on device") as caught:
            handle.wait()
    assert isinstance(caught.value.__cause__, OSError) and handle.done() and "failed" in repr(handle)
    with pytest.raises(CheckpointError):  # as often as it is asked
        handle.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    run.train(1)  # told once; training was not affected, and is as without it
    plain = Run("split", "async")
    plain.load(tmp_path / "a").train(2)
    want = plain.bits()
    again = Run("split", "async", seed=1).load(tmp_path / "a").train(2)
    assert_same(again.bits(), want)


def test_a_limit_of_the_system(tmp_path: Path) -> None:
    run = Run("split", "exact").train(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=os.strerror(errno.EFBIG)):
            run.save(tmp_path / "a").wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("split", "exact").train(1)
    monkeypatch.setattr(disk, "free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"needs [\d,]+ bytes.*1,000 bytes free"):
        run.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(disk, "free_bytes", lambda path: None)
    run.save(tmp_path / "a").wait()


@pytest.mark.parametrize("how", ["step", "call", "synchronize", "save"])
def test_a_failure_is_told_by_the_next_use_of_the_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run = Run("split", "exact").train(1)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "sync", no_space("sync", 0))
        handle = run.save(tmp_path / "a")
        handle.wait_quietly()
    x = torch.zeros(6, 8, dtype=torch.bfloat16)
    uses: dict[str, Callable[[], Any]] = {
        "step": lambda: run.model.step(run.optimizer),
        "call": lambda: run.model.forward_backward((x,), loss_fn=lambda out, _: out.float().sum()),
        "synchronize": run.model.synchronize,
        "save": lambda: run.save(tmp_path / "b"),
    }
    with pytest.raises(CheckpointError, match="No space left"):
        uses[how]()
    uses[how]()
    run.model.synchronize()


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("split", "exact").train(1)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("mine")
    (tmp_path / "empty").mkdir()
    for place, options, said in (
        (tmp_path / "file", {}, "no directory"),
        (tmp_path / "file" / "below", {}, "cannot be written"),
        (tmp_path / "full", {}, "not empty"),
        (tmp_path / "full", {"overwrite": True}, "something else than a checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=said):
            run.save(place, **options)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "make_directory", refuse)
        with pytest.raises(CheckpointError, match="Permission denied"):
            run.save(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]
    assert (tmp_path / "full" / "thing").read_text() == "mine"
    run.save(tmp_path / "empty").wait()
    with pytest.raises(CheckpointError, match="overwrite=True"):
        run.save(tmp_path / "empty")
    with monkeypatch.context() as patch:  # the path is that of the call, wherever the process goes
        patch.chdir(tmp_path)
        handle = run.save("here/and/there")
        patch.chdir("/")
        handle.wait()
    assert (tmp_path / "here" / "and" / "there" / "checkpoint.json").exists()


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    run = Run("split", "exact").train(1)
    (tmp_path / "store").mkdir()
    run.save(tmp_path / "store" / "a").wait()
    (tmp_path / "latest").symlink_to(tmp_path / "store" / "a")
    want = run.train(1).bits()
    run.save(tmp_path / "latest", overwrite=True).wait()
    assert (tmp_path / "latest").is_symlink()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["a"]
    for place in ("latest", "store/a"):
        assert_same(Run("split", "exact", seed=1).load(tmp_path / place).bits(), want)


def test_a_directory_that_fills_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("split", "exact").train(1)
    real = disk.put_in_place

    def late(written: Path, target: Path, overwrite: bool) -> None:
        target.mkdir()
        (target / "thing").write_text("another's")
        real(written, target, overwrite)

    monkeypatch.setattr(disk, "put_in_place", late)
    with pytest.raises(CheckpointError, match="not empty"):
        run.save(tmp_path / "a").wait()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["thing"]


def test_a_save_between_step_and_update_of_the_scaler(tmp_path: Path) -> None:
    run = Run("split", "exact", scaled=True)
    x = torch.randn(6, 8).bfloat16()
    run.model.forward_backward((x,), loss_fn=lambda out, _: run.scaler.scale(out.float().square().sum()))
    run.model.step(run.optimizer, False, scaler=run.scaler)
    with pytest.raises(ConfigError, match="update"):
        run.save(tmp_path / "a")
    run.scaler.update()
    run.save(tmp_path / "a").wait()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait(tmp_path: Path) -> None:
    run = Run("split", "exact").train(1)
    handle = run.save(tmp_path / "a")
    child = os.fork()
    if child == 0:
        try:
            handle.wait()
        except roundpipe.errors.RoundPipeError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    handle.wait()


# -- loading -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    roundpipe.use_devices("host:2")
    directory = tmp_path_factory.mktemp("whole") / "a"
    Run("split", "async", scaled=True).train(3).save(directory, max_shard_bytes=600).wait()
    return directory


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 3])


def fill(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


def edit_header(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data and len(old) == len(new)
    path.write_bytes(data.replace(old, new, 1))


def edit_manifest(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def flip(path: Path) -> None:
    """One bit, at the end."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def replaced(path: Path) -> None:
    """In a checkpoint without checksums."""
    path.write_bytes(b"x" * path.stat().st_size)
    edit_manifest(path.with_name("checkpoint.json"), crc32={})


WEIGHTS, STATES = "model-00002-of-*", "optimizer-00003-of-*"
DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no weights": (WEIGHTS, Path.unlink, "missing"),
    "no state": (STATES, Path.unlink, "missing"),
    "no previous weights": ("previous-00001-of-*", Path.unlink, "missing"),
    "cut weights": (WEIGHTS, cut, "cut off"),
    "cut states": (STATES, cut, "cut off"),
    "longer": (STATES, fill, "written over"),
    "cut in the header": (WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:20]), "header is not there"),
    "nothing left": (WEIGHTS, lambda path: path.write_bytes(b""), "header is not there"),
    "no header": (WEIGHTS, lambda path: edit_header(path, b'{"__meta', b'{"__m\xffta'), "header"),
    "unknown dtype": (WEIGHTS, lambda path: edit_header(path, b'"BF16"', b'"BF99"'), "header"),
    "another shape": (WEIGHTS, lambda path: edit_header(path, b'"shape":[8', b'"shape":[9'), "header"),
    "no small state": ("state.pt", Path.unlink, "missing"),
    "cut small state": ("state.pt", cut, "cut off"),
    "other small state": ("state.pt", lambda path: path.write_bytes(b"x" * path.stat().st_size), "checksum"),
    "another small state": ("state.pt", replaced, "cannot be read"),
    "a changed weight": (WEIGHTS, flip, "damaged.*checksum"),
    "a changed moment": (STATES, flip, "damaged.*checksum"),
    "a changed index": ("model.safetensors.index.json", flip, "damaged.*checksum"),
    "no checksum": ("checkpoint.json", lambda path: edit_manifest(path, crc32={"state.pt": "x"}), "damaged"),
    "no checksums": ("checkpoint.json", lambda path: edit_manifest(path, crc32=[1]), "damaged"),
    "no index": ("model.safetensors.index.json", Path.unlink, "missing"),
    "no manifest": ("checkpoint.json", Path.unlink, "no checkpoint"),
    "another manifest": ("checkpoint.json", lambda path: edit_manifest(path, files={"model": []}), "damaged"),
    "damaged manifest": ("checkpoint.json", cut, "damaged"),
    "newer format": ("checkpoint.json", lambda path: edit_manifest(path, format=99), "format 99"),
}


@pytest.fixture(scope="module")
def target() -> Run:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    return Run("split", "async", scaled=True, seed=7).train(2)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path, whole: Path, target: Run, name: str) -> None:
    pattern, damage, said = DAMAGES[name]
    shutil.copytree(whole, tmp_path / "a")
    (path,) = (tmp_path / "a").glob(pattern)
    damage(path)
    want = target.bits()
    with pytest.raises(CheckpointError, match=said) as caught:
        target.load(tmp_path / "a")
    assert path.name in str(caught.value)
    assert_same(target.bits(), want)


def renamed() -> RoundPipe:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x)

    return RoundPipe(Other())


def wider() -> RoundPipe:
    torch.manual_seed(0)
    model = Run("split", "async").model.model
    model[2] = nn.Linear(8, 5).bfloat16()
    return RoundPipe(model)


def other_groups() -> tuple[RoundPipe, Any]:
    model = Run("split", "async").model
    return model, optim.AdamW(model, groups=[{"params": "2.bias"}])


def swapped_groups() -> tuple[RoundPipe, Any]:
    """As many in each as in the checkpoint."""
    model = Run("split", "async").model
    biases = [n for n, _ in model.model.named_parameters() if n.endswith("bias")]
    return model, optim.AdamW(model, groups=[{"params": ["2.weight", *biases[1:]]}])


def own() -> tuple[RoundPipe, Any]:
    run = Run("split", "async")
    return run.model, run.optimizer


def another_kind() -> tuple[RoundPipe, Any]:
    model = Run("split", "async").model
    return model, optim.Lion(model, groups=[{"params": "*bias"}])


def mismatches() -> dict[str, tuple[Callable[[], Any], Callable[[Any], dict[str, Any]], str]]:
    def none(_: Any) -> dict[str, Any]:
        return {}

    def scheduled(optimizer: Any) -> dict[str, Any]:
        return {"scheduler": [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]}

    return {
        "names": (lambda: (renamed(), None), none, r"lacks 'inside.*has no '0\.across', .* more"),
        "shape": (lambda: (wider(), None), none, r"'2\.bias' is .*\(4,\), in the model .*\(5,\)"),
        "dtype": (lambda: (Run("sgd", "exact", torch.float32).model, None), none, "bfloat16.*in the model.*float32"),
        "number of groups": (other_groups, none, r"groups of \[\d+, \d+\]"),
        "other parameters": (swapped_groups, none, "group 0 holds other parameters"),
        "another optimizer": (another_kind, none, "AdamW, the optimizer is a Lion"),
        "schedulers": (own, scheduled, "1 schedulers, but 2"),
    }


@pytest.mark.parametrize("name", mismatches())
def test_a_checkpoint_of_something_else_changes_nothing(whole: Path, name: str) -> None:
    make, options, said = mismatches()[name]
    model, optimizer = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=said):
        roundpipe.load(model, optimizer, None, whole, **options(optimizer))
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_what_was_not_saved_cannot_be_loaded(tmp_path: Path) -> None:
    run = Run("split", "exact", scaled=True).train(1)
    roundpipe.save(run.model, None, None, tmp_path / "weights").wait()
    for optimizer, scaler, said in ((run.optimizer, None, "no optimizer"), (None, run.scaler, "no scaler")):
        with pytest.raises(CheckpointMismatch, match=said):
            roundpipe.load(run.model, optimizer, scaler, tmp_path / "weights")
    roundpipe.save(run.model, None, roundpipe.GradScaler(enabled=False), tmp_path / "disabled").wait()
    with pytest.raises(CheckpointMismatch, match="disabled"):
        roundpipe.load(run.model, None, run.scaler, tmp_path / "disabled")


def test_arguments(tmp_path: Path) -> None:
    run, other = Run("split", "exact"), Run("adamw", "exact")
    model, optimizer = run.model, run.optimizer
    on_host = torch.optim.SGD(other.model.model.parameters(), lr=0.1)
    there = tmp_path / "a"
    for call, said in (
        (lambda f: f(model.model, optimizer, None, there), "expected a wrapped model"),
        (lambda f: f(model, "adam", None, there), "expected a torch.optim.Optimizer"),
        (lambda f: f(other.model, optimizer, None, there), "was made for the model"),
        (lambda f: f(other.model, on_host, None, there), "OptimizerCtx"),
        (lambda f: f(model, optimizer, 2.0, there), "scaler: got float"),
        (lambda f: f(model, optimizer, None, there, scheduler=[run]), "scheduler: got Run"),
        (lambda f: f(model, optimizer, None, 3), "path of a directory"),
        (lambda f: f(model, optimizer, None, ""), "path of a directory"),
        (lambda f: f(model, optimizer, None, "/"), "beside which"),
        (lambda f: f(model, optimizer, None, there, rng_state=1), "rng_state"),
    ):
        for function in (roundpipe.save, roundpipe.load):
            roundpipe.save(model, optimizer, None, tmp_path / "a", overwrite=True).wait()
            with pytest.raises(ConfigError, match=said):
                call(function)
    for options, said in (
        (dict(max_shard_bytes=0), "max_shard_bytes=0"),
        (dict(trainable_only="yes"), "trainable_only"),
        (dict(metadata={"run": run}), "metadata holds something"),
    ):
        with pytest.raises(ConfigError, match=said):
            roundpipe.save(model, optimizer, None, tmp_path / "b", **options)
    run.train(1)
    other.model.step(lambda: None, False)

    def inside() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            roundpipe.save(other.model, None, None, tmp_path / "b")

    with OptimizerCtx(), pytest.raises(roundpipe.errors.StageError, match="step function"):
        other.model.step(inside, False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
