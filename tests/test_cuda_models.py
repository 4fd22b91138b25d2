"""On real GPUs: chains of packed models, models that run their own forward, autocast, compiled layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe

from . import oracle
from .auto_models import CASES
from .test_packed_models import PACKED, first, second, third

pytestmark = pytest.mark.needs_cuda


@pytest.fixture(autouse=True, params=["cuda:0", "cuda:0*2", pytest.param("cuda", marks=pytest.mark.needs_multi_gpu)])
def on_gpu(request: pytest.FixtureRequest) -> None:
    roundpipe.use_devices(request.param)
    torch.backends.cudnn.allow_tf32 = False


def to_gpu(tree: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), tree)


def on_cpu(plain: nn.Module) -> nn.Module:
    """With its gradients."""
    twin = copy.deepcopy(plain).cpu()
    for mine, other in zip(twin.parameters(), plain.parameters(), strict=True):
        mine.grad = None if other.grad is None else other.grad.cpu()
    return twin


def test_a_chain_of_packed_models() -> None:
    torch.manual_seed(0)
    models = [first(), second(), third()]
    plain = copy.deepcopy(nn.ModuleList(models)).cuda()
    one, two, three = (RoundPipe(model) for model in models)
    for _ in range(3):
        x = torch.randn(7, 4, requires_grad=True)
        other = x.detach().cuda().requires_grad_()
        packed = one(x, roundpipe_run_config=PACKED)
        out = three(two(packed, roundpipe_run_config=PACKED))
        middle = [plain[0](piece) for piece in other.tensor_split(3)]
        want = torch.cat([plain[2](plain[1](piece)) for piece in middle])
        packed["y"].synchronize()
        for mine, theirs in zip(packed["y"], middle, strict=True):
            oracle.assert_close_to_scale(mine.detach(), theirs["y"].detach().cpu(), "packed", 1e-5)
        oracle.assert_close_to_scale(out.detach(), want.detach().cpu(), "output", 1e-5)
        out.square().sum().backward()
        want.square().sum().backward()
        oracle.assert_close_to_scale(x.grad, other.grad.cpu(), "input gradient", 1e-5)
    for wrapped, one_plain in zip((one, two, three), plain, strict=True):
        wrapped.synchronize()
        oracle.assert_same_gradients_within(wrapped.model, on_cpu(one_plain), 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_models_that_run_their_own_forward(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    plain = copy.deepcopy(model).cuda()
    wrapped = wrap_model_to_roundpipe(
        model,
        use_sequential_preset=False,
        lower_threshold=case.lower,
        override_config=case.overrides(model),
        model_run_config=RoundPipeRunConfig(num_microbatch=2),
    )
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step in range(3):
        torch.manual_seed(step)
        batch = case.batch()
        loss, want = wrapped(**batch)["loss"], plain(**to_gpu(batch))["loss"]
        oracle.assert_close_to_scale(loss.detach().cpu(), want.detach().cpu(), f"loss of step {step}", 1e-4)
        loss.backward()
        want.backward()
        wrapped.synchronize()
        oracle.assert_same_gradients_within(wrapped.model, on_cpu(plain), 1e-4)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    oracle.assert_same_state_within(wrapped.model, on_cpu(plain), 1e-4)


@pytest.mark.parametrize("call", ["forward_backward", "forward"])
def test_autocast_is_that_of_the_caller(call: str) -> None:
    torch.manual_seed(0)
    seen: set[torch.dtype] = set()
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    plain = copy.deepcopy(model).cuda()
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    wrapped = RoundPipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = torch.randn(16, 32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        want = plain(x.cuda()).float().square().mean()
        if call == "forward":
            loss = wrapped(x).float().square().mean()
        else:
            loss = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.float().square().mean())
    want.backward()
    if call == "forward":
        loss.backward()
    wrapped.synchronize()
    assert seen == {torch.bfloat16}
    oracle.assert_close_to_scale(loss.detach(), want.detach().cpu(), "loss", 1e-5)
    oracle.assert_same_gradients_within(model, on_cpu(plain), 1e-5)


def test_compiled_layers_train() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(3)]
    plain = copy.deepcopy(nn.Sequential(*layers)).cuda()
    wrapped = RoundPipe(nn.Sequential(torch.compile(layers[0]), layers[1], torch.compile(layers[2])))
    x = torch.randn(12, 16)
    loss = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum())
    want = plain(x.cuda()).square().sum()
    want.backward()
    wrapped.synchronize()
    oracle.assert_close_to_scale(loss, want.detach().cpu(), "loss", 1e-5)
    oracle.assert_same_gradients_within(nn.Sequential(*layers), on_cpu(plain), 1e-4)
