"""Parity on real GPUs: the same cases as on simulated devices, against a plain loop on the first GPU."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines

from . import oracle
from .model_zoo import CASES
from .plans import one_layer_stages, random_fused_plan

pytestmark = pytest.mark.needs_cuda

# Some kernels add in an order of their own (atomic additions in embedding and convolution backward).
TOLERANCE = 2e-6


# One GPU, two logical devices on it, and every GPU there is.
@pytest.fixture(autouse=True, params=["cuda:0", "cuda:0*2", pytest.param("cuda", marks=pytest.mark.needs_multi_gpu)])
def on_gpu(request: pytest.FixtureRequest) -> None:
    roundpipe.use_devices(request.param)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def to_gpu(tree: object) -> object:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cuda(), tree)


def run_both(name: str, config: RoundPipeRunConfig, rows: int, seed: int, calls: int = 1) -> None:
    case = CASES[name]
    torch.manual_seed(seed)
    model = case.make()
    plain = copy.deepcopy(model).cuda()
    wrapped = RoundPipe(model)
    for call in range(calls):
        torch.manual_seed(seed + call)
        args, label = case.batch(rows)
        state = torch.get_rng_state()
        got = wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
        torch.set_rng_state(state)
        want = oracle.forward_backward(
            list(plain),
            to_gpu(args),
            label=to_gpu(label),
            loss_fn=case.loss_fn,
            num_microbatch=min(rows, config.num_microbatch),
            device="cuda",
        )
        oracle.assert_close_to_scale(got, want.cpu(), "loss", TOLERANCE)
    wrapped.synchronize()
    others = dict(plain.named_parameters())
    for parameter_name, parameter in wrapped.model.named_parameters():
        want_grad = others[parameter_name].grad
        oracle.assert_close_to_scale(
            parameter.grad, None if want_grad is None else want_grad.cpu(), parameter_name, 10 * TOLERANCE
        )
    oracle.assert_same_state(wrapped.model, plain.cpu(), TOLERANCE)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", CASES)
def test_one_layer_stages(name: str, grain: str) -> None:
    plan = one_layer_stages(len(CASES[name].make()))
    run_both(name, RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan), 6, 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_random_plans(name: str, seed: int) -> None:
    plan = random_fused_plan(len(CASES[name].make()), seed)
    grain = "stage" if seed % 2 else "layer"
    config = RoundPipeRunConfig(num_microbatch=1 + seed % 4, recompute_grain=grain, execute_plan=plan)
    run_both(name, config, 7, seed, calls=1 + seed % 3)


@pytest.mark.parametrize("is_async", [False, True])
def test_training(is_async: bool) -> None:
    """20 AdamW steps; asynchronously against weights that are one step stale."""
    case = CASES["mlp"]
    torch.manual_seed(0)
    model = case.make()
    newest = copy.deepcopy(model)
    plain = copy.deepcopy(model).cuda()
    wrapped = RoundPipe(model)
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    newest_optimizer = torch.optim.AdamW(newest.parameters(), lr=1e-2)
    for step in range(20):
        torch.manual_seed(step)
        args, label = case.batch(6)
        state = torch.get_rng_state()
        config = RoundPipeRunConfig(num_microbatch=3, execute_plan=random_fused_plan(len(model), step % 4))
        got = wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        torch.set_rng_state(state)
        want = oracle.forward_backward(
            list(plain), to_gpu(args), label=to_gpu(label), loss_fn=case.loss_fn, num_microbatch=3, device="cuda"
        )
        oracle.assert_close_to_scale(got, want.cpu(), f"loss of step {step}", 1e-4)
        stale = copy.deepcopy(newest.state_dict())
        for mine, theirs in zip(newest.parameters(), plain.parameters(), strict=True):
            mine.grad = None if theirs.grad is None else theirs.grad.cpu()
            theirs.grad = None
        newest_optimizer.step()
        plain.load_state_dict(stale if is_async else newest.state_dict())
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, newest, 1e-3)


def test_bfloat16_weights_stay_off_the_gpu() -> None:
    """A model many times the region: what the process holds on the GPU is the region and activations."""
    width, depth = 2048, 64
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)]).bfloat16()
    wrapped = RoundPipe(model, optim_dtype=torch.float32)
    plan = one_layer_stages(depth)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)

    def call() -> None:
        x = torch.randn(64, width, dtype=torch.bfloat16)
        wrapped.forward_backward((x,), loss_fn=lambda out, _: out.float().square().mean(), run_config=config)

    call()  # makes the workspaces of matrix products, one for each stream
    wrapped.synchronize()
    gc.collect()  # what earlier tests left must not go meanwhile
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    regions = sum(w.region.numel() for w in engines.current().workers if w.device.index == 0)
    before = torch.cuda.memory_allocated() - regions
    for _ in range(3):
        call()
    wrapped.synchronize()
    weights = depth * width * width * 2
    held = torch.cuda.max_memory_allocated() - before
    assert held < weights / 3, f"{held / 2**20:.0f} MiB on the GPU for {weights / 2**20:.0f} MiB of weights"
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in wrapped.model.parameters())


def test_inputs_on_the_gpu_and_failing_layer() -> None:
    class Fails(nn.Module):
        fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fail:
                raise ValueError("on purpose")
            return x * 2

    fails = Fails()
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), fails, nn.Linear(4, 4)))
    x = torch.randn(6, 4, device="cuda")
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=one_layer_stages(3))
    with pytest.raises(roundpipe.errors.StageError) as caught:
        wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=config)
    assert isinstance(caught.value.__cause__, ValueError)
    fails.fail = False
    got = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=config)
    want = copy.deepcopy(wrapped.model).cuda()(x).sum()
    oracle.assert_close_to_scale(got, want.detach().cpu(), "loss", 1e-5)


def test_pinned_memory_is_registered_and_out_of_memory_is_typed() -> None:
    engines.current()
    assert _ops.host_empty([1 << 20], torch.uint8).is_pinned()

    class Hungry(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(1 << 42, device=x.device).sum()

    hungry = nn.Sequential(nn.Linear(4, 4), Hungry(), nn.Linear(4, 4))
    wrapped = RoundPipe(hungry)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum())
    hungry[1].__class__ = nn.Identity
    assert wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum()).isfinite()
