"""Models that another library has placed or packed are refused with the remedy; plain quantised weights are not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError

from .oracle import assert_same_gradients, forward_backward
from .plans import one_layer_stages


@pytest.fixture(autouse=True)
def two_simulated_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


def sequential() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def marked(model: nn.Module, **attributes) -> nn.Module:
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class _Quantizer:
    """As transformers hangs one on the model it has loaded."""

    class quantization_config:  # noqa: N801
        quant_method = "bitsandbytes"


class Int8Params(nn.Parameter):
    """As bitsandbytes names it."""


class Packed(torch.Tensor):
    """A tensor that holds its values in a way of its own, as torchao's do."""


class LinearBeside(nn.Linear):
    """Its scale is no parameter and no buffer, as in HQQ."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.meta = {"scale": torch.ones(2)}


def _with_weight(weight: nn.Parameter, **marks) -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight = weight
    return marked(layer, **marks)


def _fsdp_module() -> nn.Module:
    """fully_shard gives a module a class of this base."""
    from torch.distributed.fsdp import FSDPModule

    model = sequential()
    model[0].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {"__new__": object.__new__})
    return model


class DataParallelByName(nn.Module):
    """A module that is called so by its author has nothing to do with torch's."""

    def forward(self, x):
        return x * 2


DataParallelByName.__name__ = "DataParallel"


def _engine() -> nn.Module:
    kind = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    engine = kind()
    engine.module = sequential()
    return engine


CASES = {
    "loaded in 8 bit": (lambda: marked(sequential(), is_loaded_in_8bit=True), "quantised.*load_in_8bit"),
    "loaded in 4 bit": (lambda: marked(sequential(), is_loaded_in_4bit=True), "quantised.*load_in_4bit"),
    "part in 8 bit": (lambda: nn.Sequential(marked(nn.Linear(2, 2), is_loaded_in_8bit=True)), "quantised"),
    "class of bitsandbytes": (
        lambda: _with_weight(Int8Params(torch.zeros(2, 2))),
        "weight is of bitsandbytes' class Int8Params",
    ),
    "tensor subclass": (
        lambda: _with_weight(
            nn.Parameter(torch.zeros(2, 2).as_subclass(Packed)), quantization_method="torchao", is_quantized=True
        ),
        r"quantised \(torchao\).*weight is of the class Packed, no plain tensor",
    ),
    "scales beside": (
        lambda: marked(nn.Sequential(LinearBeside()), hf_quantizer=_Quantizer()),
        r"quantised \(bitsandbytes\).*0\.meta is a tensor but neither",
    ),
    "several devices": (
        lambda: marked(sequential(), hf_device_map={"0": 0, "1": "cpu", "2": "disk"}),
        "device_map, which put parts of it on 0, disk; load it without device_map",
    ),
    "data parallel": (lambda: nn.DataParallel(sequential()), r"it is under torch.nn.DataParallel.*\.module"),
    "part data parallel": (
        lambda: nn.Sequential(nn.DataParallel(nn.Linear(2, 2))),
        r"its module '0' is under torch.nn.DataParallel",
    ),
    "distributed": (
        lambda: object.__new__(nn.parallel.DistributedDataParallel),
        r"under DistributedDataParallel.*\.module",
    ),
    "fully_shard": (_fsdp_module, "its module '0' is under FSDP"),
    "deepspeed": (_engine, "under DeepSpeed.*not the engine"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device.*load the weights"),
}


def _made(name: str) -> tuple[nn.Module, str]:
    make, message = CASES[name]
    model = make()
    if "_modules" not in vars(model):  # DDP without a process group
        nn.Module.__init__(model)
        model.module = sequential()
    return model, message


@pytest.mark.parametrize("wrap", [wrap_model_to_roundpipe, RoundPipe])
@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_remedy(name, wrap):
    model, message = _made(name)
    with pytest.raises(ConfigError, match=message):
        wrap(model)


def test_names_alone_condemn_nobody():
    RoundPipe(nn.Sequential(nn.Linear(2, 2), DataParallelByName()))
    wrap_model_to_roundpipe(marked(sequential(), hf_device_map={"": "cpu"}, hf_quantizer=None))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("wrap", [wrap_model_to_roundpipe, RoundPipe])
def test_a_model_on_a_gpu_is_refused(wrap):
    with pytest.raises(ConfigError, match=r"0.weight is on cuda:0.*model\.cpu\(\)"):
        wrap(sequential().cuda())


class QuantLinear(nn.Module):
    """Eight-bit weights with a scale a row, all plain tensors, and a trained adapter: a frozen base as in QLoRA."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qweight = nn.Parameter(torch.randint(-127, 128, (width, width), dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.rand(width, 1) / 127)
        self.lora_a = nn.Parameter(torch.randn(2, width) / 4)
        self.lora_b = nn.Parameter(torch.randn(width, 2) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.qweight.to(x.dtype) * self.scale
        return torch.tanh(x @ weight.T + x @ self.lora_a.T @ self.lora_b.T)


@pytest.mark.parametrize("pin_model", ["alloc", "register", "off"])
def test_frozen_quantised_weights_that_are_plain_tensors_are_streamed(pin_model):
    torch.manual_seed(0)
    model = marked(
        nn.Sequential(*(QuantLinear(16) for _ in range(4))),
        is_quantized=True,
        quantization_method="gptq",
        hf_quantizer=_Quantizer(),
    )
    plain = copy.deepcopy(model)
    wrapped = wrap_model_to_roundpipe(model, pin_model=pin_model)
    x, label = torch.randn(6, 16), torch.randn(6, 16)
    wanted = forward_backward(list(plain), (x,), label=label, loss_fn=nn.functional.mse_loss, num_microbatch=2)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(4))
    got = wrapped.forward_backward((x,), label=label, loss_fn=nn.functional.mse_loss, run_config=config)
    wrapped.synchronize()
    assert torch.equal(got, wanted)
    assert_same_gradients(model, plain)
    assert all((p.grad is None) == (p.dtype == torch.int8) for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in wrapped.optim_parameters())
