"""Several GPUs, and several logical devices on one: the same bits as one device, recovery of all, uneven memory."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import DeviceOutOfMemory

from . import oracle
from .model_zoo import CASES
from .plans import one_layer_stages, random_fused_plan

pytestmark = pytest.mark.needs_cuda

SEVERAL = ["cuda:0*2", "cuda:0*3", pytest.param("cuda", marks=pytest.mark.needs_multi_gpu)]


@pytest.fixture(autouse=True)
def repeatable_kernels() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True


def train(devices: str, name: str, steps: int, grain: str = "stage", is_async: bool = False) -> tuple[list, nn.Module]:
    """Losses and the model after some AdamW steps; the plan changes from step to step, the microbatches do not."""
    roundpipe.use_devices(devices)
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    wrapped = RoundPipe(model)
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        args, label = case.batch(6)
        plan = random_fused_plan(len(model), step % 7)
        config = RoundPipeRunConfig(num_microbatch=3, recompute_grain=grain, execute_plan=plan)
        loss = wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
        losses.append(loss.item())
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    wrapped.synchronize()
    return losses, model


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].shared])
@pytest.mark.parametrize("devices", SEVERAL)
def test_the_same_bits_as_on_one_device(devices: str, name: str, grain: str, is_async: bool) -> None:
    """Sums are taken in the same order on any number of devices, unless stages share parameters."""
    want, plain = train("cuda:0", name, 6, grain, is_async)
    got, model = train(devices, name, 6, grain, is_async)
    assert got == want
    oracle.assert_same_state(model, plain, 0.0)


@pytest.mark.needs_multi_gpu
def test_two_hundred_steps() -> None:
    """The losses of one GPU, bit for bit, and no memory kept from step to step."""
    want, _ = train("cuda:0", "mlp", 200)
    train("cuda", "mlp", 20)
    held = [torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())]
    got, _ = train("cuda", "mlp", 200)
    assert got == want
    after = [torch.cuda.memory_allocated(i) for i in range(torch.cuda.device_count())]
    assert all(now <= before + 2**20 for now, before in zip(after, held, strict=True)), (held, after)


@pytest.mark.needs_multi_gpu
@pytest.mark.parametrize("current", [0, 1])
def test_the_current_device_of_the_caller_stays(current: int) -> None:
    case = CASES["mlp"]
    torch.manual_seed(0)
    try:
        torch.cuda.set_device(current)
        seen = []
        for devices in ("cuda:1", "cuda:0,cuda:1", "cuda:1,cuda:0"):
            roundpipe.use_devices(devices)
            wrapped = RoundPipe(case.make())
            seen.append(torch.cuda.current_device())
            with OptimizerCtx():
                optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            for stages in range(3):  # calls of an even and of an odd number of jobs end on one or the other
                plan = random_fused_plan(wrapped.num_layers, stages)
                config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
                args, label = case.batch(4)
                wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=config)
                seen.append(torch.cuda.current_device())
                wrapped.step(optimizer.step, is_async=stages == 1)
                seen.append(torch.cuda.current_device())
                with torch.no_grad():
                    wrapped(*args)
                seen.append(torch.cuda.current_device())
            wrapped.synchronize()
            del wrapped
            gc.collect()
            seen.append(torch.cuda.current_device())
        assert set(seen) == {current}, seen
    finally:
        torch.cuda.set_device(0)


class HungryOn(nn.Module):
    """Asks for more memory than any GPU has, on one device of several."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self.ordinal = ordinal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.index == self.ordinal:
            x = x + torch.empty(1 << 42, device=x.device).sum()
        return x


@pytest.mark.needs_multi_gpu
@pytest.mark.parametrize("hungry", [0, 1])
def test_one_gpu_out_of_memory_and_all_recover(hungry: int) -> None:
    roundpipe.use_devices("cuda")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), HungryOn(-1)) for _ in range(6)]
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model).cuda()
    wrapped = RoundPipe(model)
    config = RoundPipeRunConfig(num_microbatch=3, execute_plan=one_layer_stages(6))
    x = torch.randn(6, 8)

    def loss_fn(out: torch.Tensor, _: object) -> torch.Tensor:
        return out.square().sum()

    for ordinal in (hungry, -1):
        for layer in layers:
            layer[1].ordinal = ordinal
        if ordinal < 0:
            break
        with pytest.raises(DeviceOutOfMemory) as caught:
            wrapped.forward_backward((x,), loss_fn=loss_fn, run_config=config)
        assert caught.value.device == f"cuda:{hungry}"
    got = wrapped.forward_backward((x,), loss_fn=loss_fn, run_config=config)
    want = oracle.forward_backward(list(plain), (x.cuda(),), loss_fn=loss_fn, num_microbatch=3, device="cuda")
    wrapped.synchronize()
    oracle.assert_close_to_scale(got, want.cpu(), "loss", 1e-6)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(mine.grad, theirs.grad.cpu(), "gradient", 1e-5)


def in_a_process(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


TRAIN = """
import torch, roundpipe
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
wrapped = roundpipe.RoundPipe(model)
config = roundpipe.RoundPipeRunConfig(num_microbatch=4)
x = torch.randn(8, 64)
loss = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum(), run_config=config)
wrapped.synchronize()
print([d.name for d in roundpipe.devices()], torch.cuda.device_count(), loss.item())
"""


@pytest.mark.needs_multi_gpu
def test_visible_devices_are_honoured() -> None:
    last = torch.cuda.device_count() - 1
    shown = {visible: in_a_process(TRAIN, CUDA_VISIBLE_DEVICES=visible) for visible in ("0", str(last), f"{last},0")}
    assert shown["0"].startswith("['cuda:0'] 1 ") and shown["0"] == shown[str(last)]
    assert shown[f"{last},0"].startswith("['cuda:0', 'cuda:1'] 2 ")
    one, both = (float(shown[key].split()[-1]) for key in ("0", f"{last},0"))
    assert one == both


UNEVEN = """
import torch, roundpipe
from torch import nn
cap = 3 << 30
total = torch.cuda.get_device_properties(1).total_memory
torch.cuda.set_per_process_memory_fraction(cap / total, 1)
model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(48)]).bfloat16()  # 1.6e9 bytes
for layer in model:
    layer.weight.data.normal_(0, 1 / 64)
wrapped = roundpipe.RoundPipe(model)
x = torch.randn(64, 4096, dtype=torch.bfloat16)
config = roundpipe.RoundPipeRunConfig(num_microbatch=4)
for _ in range(3):
    loss = wrapped.forward_backward((x,), loss_fn=lambda out, _: out.float().square().mean(), run_config=config)
    wrapped.zero_grad()
wrapped.synchronize()
assert loss.isfinite() and torch.cuda.max_memory_reserved(1) <= cap
print(torch.cuda.max_memory_reserved(0), torch.cuda.max_memory_reserved(1))
"""


@pytest.mark.needs_multi_gpu
def test_plans_fit_the_gpu_with_the_least_memory() -> None:
    reserved = [int(n) for n in in_a_process(UNEVEN, CUDA_VISIBLE_DEVICES="0,1").split()]
    assert 0 < reserved[1] <= 3 << 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


@pytest.mark.parametrize("how", ["wrapper", "in place"])
@pytest.mark.parametrize("devices", SEVERAL)
def test_compiled_layers_stay_compiled_on_every_gpu(devices: str, how: str) -> None:
    """Guards on the index of the device take compilations of their own, more than PyTorch allows one code object."""
    torch._dynamo.reset()
    runs = [0]

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> object:
        def run(*args: torch.Tensor) -> object:
            runs[0] += 1
            return graph(*args)

        return run

    def compiled() -> nn.Module:
        block = Block()
        if how == "in place":
            block.compile(backend=backend, fullgraph=True)
            return block
        return torch.compile(block, backend=backend, fullgraph=True)  # type: ignore[return-value]

    roundpipe.use_devices(devices)
    torch.manual_seed(0)
    layers = [compiled() for _ in range(3)]
    plain = nn.Sequential(*(copy.deepcopy(getattr(layer, "_orig_mod", layer)) for layer in layers))
    for block in plain:
        block._compiled_call_impl = None
    wrapped = RoundPipe(nn.Sequential(*layers))
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(3))
    iterations = max(2, len(roundpipe.devices()))  # every layer on every device
    with torch._dynamo.config.patch(recompile_limit=2):  # with a graph at its input and without
        for seed in range(iterations):
            torch.manual_seed(seed)
            x = torch.randn(4, 16)
            wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().sum(), run_config=config)
            plain(x).square().sum().backward()
        wrapped.synchronize()
    assert runs[0] == iterations * 2 * 5
    oracle.assert_same_gradients(nn.Sequential(*(getattr(layer, "_orig_mod", layer) for layer in layers)), plain)
