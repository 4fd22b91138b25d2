"""Saved activations on the host: the same gradients, once for each storage, and nothing left behind."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundpipe
from roundpipe import _ops, offload_activations
from roundpipe.errors import ConfigError

from .at_rest import at_rest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]
EVERYTHING = dict(min_bytes=1, keep_bytes=0, prefetch_bytes=1 << 12)


class Block(nn.Module):
    """Views of one storage, expanded, transposed and boolean tensors, in-place layers, a buffer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        mixed = F.dropout(mixed, 0.3).relu_()
        mixed = mixed * self.scale.expand_as(mixed) + self.shift * x.mean(-1, keepdim=True).expand_as(x)
        return x + torch.where(mixed > 0, self.out(mixed), mixed.square()) * mixed[:, ::2].repeat_interleave(2, 1)


def gradients(model: nn.Module, x: Tensor, context=None) -> list[Tensor]:
    torch.manual_seed(5)
    x = x.detach().requires_grad_()
    if context is None:
        loss = model(x).square().mean()
    else:
        with context:
            loss = model(x).square().mean()
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


@pytest.fixture(params=DEVICES)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)]).to(request.param)
    return model, torch.randn(4, 6, 16, device=request.param)


@pytest.mark.parametrize("prefetch", [0, 2000, 1 << 30])
@pytest.mark.parametrize("keep", [0, 3000, 1 << 30])
def test_gradients_are_those_without(case, keep: int, prefetch: int) -> None:
    model, x = case
    torch.ops.roundpipe.data_plane_inject("delay", 3, 100)
    plain = gradients(model, x)
    got = gradients(model, x, offload_activations(model, min_bytes=1, keep_bytes=keep, prefetch_bytes=prefetch))
    torch.ops.roundpipe.data_plane_inject("delay", 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


def test_storages_move_once_and_the_models_own_stay() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    module = nn.Module()
    module.weight = weight
    x = torch.randn(8, 64, requires_grad=True)
    with offload_activations(module, **EVERYTHING) as session:
        y = x.exp()  # saves y
        rows = (y @ weight) * y * y.view(64, 8).t().reshape(8, 64) * (y.t() * 2).t()  # y and its views, weight
    # y (and with it its views), y @ weight, the first two products, and what was doubled; neither x nor the weight.
    assert session.offloaded_bytes == 5 * x.nbytes
    rows.sum().backward()
    assert session.reloaded_bytes == 5 * x.nbytes


def test_small_tensors_and_other_devices_are_left_alone() -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(16, 8, requires_grad=True)
    with offload_activations(layer, min_bytes=x.nbytes + 1) as session:
        layer(x.exp()).sum().backward()
        big = torch.randn(64, 1, requires_grad=True).expand(64, 64) * torch.randn(1).expand(64, 64)
        big.sum().backward()  # expanded: smaller than it looks
    assert session.offloaded_bytes == 0
    with offload_activations(layer.to("meta"), **EVERYTHING) as session:
        x.exp().sum().backward()
    assert session.offloaded_bytes == 0


def test_activations_leave_the_device_and_the_host_gets_its_memory_back(case) -> None:
    model, x = case
    seen: list[weakref.ref[Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: seen.append(weakref.ref(out)))
        for block in model
        for layer in (block.qkv, block.norm)
    ]
    gradients(model, x, offload_activations(model, **EVERYTHING))
    at_rest()
    before = _ops.host_stats()[2]
    seen.clear()
    torch.manual_seed(5)
    with offload_activations(model, **EVERYTHING) as session:
        loss = model(x).sum()
        assert [ref for ref in seen if ref() is not None] == []
    assert _ops.host_stats()[2] >= before + session.offloaded_bytes
    loss.backward()
    assert session.reloaded_bytes == session.offloaded_bytes > 0
    assert _ops.host_stats()[2] == before
    with offload_activations(model, **EVERYTHING):
        loss = model(x).sum()
    del loss  # without a backward
    assert _ops.host_stats()[2] == before
    for hook in hooks:
        hook.remove()


def test_second_backward_double_backward_and_checkpoint() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.randn(4, 8)
    plain = gradients(model, x)
    leaf = x.clone().requires_grad_()
    with offload_activations(model, **EVERYTHING):
        loss = model(leaf).square().mean()
        inner = torch.utils.checkpoint.checkpoint(model, leaf, use_reentrant=False).square().mean()
    leaves = [leaf, *model.parameters()]
    for _ in range(2):
        assert all(map(torch.equal, torch.autograd.grad(loss, leaves, retain_graph=True), plain))
    assert all(map(torch.equal, torch.autograd.grad(inner, leaves), plain))
    (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
    plain_loss = model(leaf).square().mean()
    (plain_slope,) = torch.autograd.grad(plain_loss, leaf, create_graph=True)
    wanted = torch.autograd.grad(plain_slope.square().sum(), leaf)[0]
    torch.testing.assert_close(torch.autograd.grad(slope.square().sum(), leaf)[0], wanted)


def test_what_is_written_in_place_during_the_copy_is_an_error() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    for keep in (0, 1 << 20):
        with offload_activations(nn.Identity(), min_bytes=1, keep_bytes=keep):
            y = x.exp()
            loss = y.square().sum() if keep == 0 else y.sum()
            y.detach().add_(1)
        if keep:
            with pytest.raises(RuntimeError, match="modified in place while offload_activations"):
                loss.backward()
        else:  # it had left by then, and the copy is what backward needs
            loss.backward()
            torch.testing.assert_close(x.grad, 2 * x.exp().square())


def test_misuse_is_explained() -> None:
    roundpipe.use_devices("host:1")
    layer = nn.Linear(2, 2)
    cases = [
        ((torch.randn(2),), {}, "got a Tensor, expected an nn.Module"),
        ((roundpipe.RoundPipe(nn.Linear(2, 2)),), {}, "got a RoundPipe"),
        ((layer,), dict(min_bytes=-1), "'min_bytes': expected bytes, 0 or more, got -1"),
        ((layer,), dict(keep_bytes=1.5), "'keep_bytes'.*got 1.5"),
        ((layer,), dict(prefetch_bytes=None), "'prefetch_bytes'.*got None"),
    ]
    for args, kwargs, message in cases:
        with pytest.raises(ConfigError, match=message):
            offload_activations(*args, **kwargs).__enter__()


def test_the_benchmark_runs_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import json

    import offload

    options = ["--model", "tiny", "--tokens", "32", "--iterations", "1", "--device", "cpu", "--results", str(tmp_path)]
    assert offload.main(options) == 0
    result = json.loads(next(tmp_path.glob("offload-*.json")).read_text())
    assert set(result["modes"]) == {"plain", "checkpointed", "offloaded"}
    assert result["agree"] and result["modes"]["offloaded"]["offloaded_bytes"] > 0
    sys.modules.pop("offload")
