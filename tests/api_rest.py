"""Rows of the table: recompute, optimizers, timer, wrapping of models, devices, errors."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelTimer, OptimizerCtx, RoundPipe, errors, wrap_model_to_roundpipe

from .api_rows import config, net, row, sgd, square_sum, stages

X = torch.linspace(-1, 1, 24).view(6, 4)


# -- recompute --------------------------------------------------------------------------------------------------------
@row
def what_is_saved_comes_back() -> None:
    """save_for_recompute(*data), doing_recompute(), get_recompute_data() (a tuple)."""

    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if roundpipe.doing_recompute():
                data = roundpipe.get_recompute_data()
                assert isinstance(data, tuple)
                found.append((data[0].item(), data[1]))
            else:
                roundpipe.save_for_recompute(x.detach().sum(), "word")
                saved.append((x.sum().item(), "word"))
            return super().forward(x)

    saved: list[Any] = []
    found: list[Any] = []
    wrapped = RoundPipe(nn.Sequential(Keeps(4, 4), nn.Linear(4, 1)))
    plan = stages([range(1)], [range(1, 2), range(1)])
    wrapped.forward_backward((X,), loss_fn=square_sum, run_config=config(num_microbatch=2, execute_plan=plan))
    wrapped.synchronize()
    assert found == saved and len(found) == 2
    found.clear()
    saved.clear()
    with torch.no_grad():
        wrapped(X, roundpipe_run_config=config(num_microbatch=1))  # without grad nothing is kept
    assert not found


@row
def misuse_of_recompute_data() -> None:
    """Once a forward, no tensors that require grad; outside recompute get_recompute_data is an AssertionError."""
    with pytest.raises(AssertionError):
        roundpipe.get_recompute_data()
    assert roundpipe.doing_recompute() is False

    class Twice(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            roundpipe.save_for_recompute(1)
            roundpipe.save_for_recompute(2)
            return super().forward(x)

    class WithGrad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            roundpipe.save_for_recompute(out)
            return out

    plan = stages([range(1)], [range(1, 2), range(1)])
    for layer, said in ((Twice(4, 4), "twice"), (WithGrad(4, 4), "requires grad")):
        with pytest.raises(errors.StageError, match=said):
            RoundPipe(nn.Sequential(layer, nn.Linear(4, 1))).forward_backward(
                (X,), loss_fn=square_sum, run_config=config(execute_plan=plan)
            )


# -- optimizers -------------------------------------------------------------------------------------------------------
def _trained(kind: Any, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(3, 5, dtype=dtype))
    optimizer = kind([parameter], **options)
    for _ in range(5):
        parameter.grad = torch.randn(3, 5, dtype=dtype)
        optimizer.step()
    return parameter.detach()


@row
def adam_gives_torchs_results() -> None:
    """optim.Adam: results of torch.optim.Adam; complex parameters; lr and betas may be 1-element tensors."""
    for dtype in (torch.float32, torch.float64, torch.complex64):
        for options in (
            {},
            {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
            {"weight_decay": 0.1, "decoupled_weight_decay": True},
        ):
            ours, theirs = (_trained(k, dtype, **options) for k in (roundpipe.optim.Adam, torch.optim.Adam))
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    tensors = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.5), torch.tensor(0.9))}
    assert torch.allclose(
        _trained(roundpipe.optim.Adam, torch.float32, **tensors),
        _trained(torch.optim.Adam, torch.float32, lr=0.1, betas=(0.5, 0.9)),
        rtol=1e-5,
    )


@row
def choices_of_implementation() -> None:
    """foreach and fused are ignored with a warning; capturable=True and differentiable=True are errors."""
    parameters = [nn.Parameter(torch.ones(2))]
    for name in ("foreach", "fused"):
        with pytest.warns(UserWarning, match=name):
            roundpipe.optim.Adam(parameters, **{name: True})
    for name in ("capturable", "differentiable"):
        with pytest.raises(ValueError, match=name):
            roundpipe.optim.Adam(parameters, **{name: True})


@row
def optimizers_are_torchs() -> None:
    """optim.Adam/AdamW/SGD/Lion are real torch.optim.Optimizers."""
    for kind in (roundpipe.optim.Adam, roundpipe.optim.AdamW, roundpipe.optim.SGD, roundpipe.optim.Lion):
        optimizer = kind([nn.Parameter(torch.ones(2))], lr=0.1)
        assert isinstance(optimizer, torch.optim.Optimizer)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@row
def the_compact_path() -> None:
    """optim.AdamW(model, lr, master, state_dtype, max_grad_norm) with model.step(optimizer)."""
    wrapped, plain = RoundPipe(net()), net()
    optimizer = roundpipe.optim.AdamW(wrapped, lr=0.1, master="float32", state_dtype="float32", max_grad_norm=1.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        wrapped.forward_backward((X,), loss_fn=square_sum)
        wrapped.step(optimizer, is_async=False)
        theirs.zero_grad()
        square_sum(plain(X), None).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
    wrapped.synchronize()
    assert torch.allclose(wrapped.model[0].weight, plain[0].weight, rtol=1e-3, atol=1e-4)


@row
def torchs_optimizers_inside_a_context() -> None:
    """OptimizerCtx(): torch's own optimizers and clip_grad_norm_ train the wrapped model."""
    wrapped, plain = RoundPipe(net()), net()
    optimizer, theirs = sgd(wrapped), torch.optim.SGD(plain.parameters(), lr=0.1)

    def update() -> None:
        with OptimizerCtx():
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()

    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.step(update, is_async=False)
    square_sum(plain(X), None).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    theirs.step()
    assert torch.allclose(wrapped.model[0].weight, plain[0].weight, rtol=1e-5, atol=1e-6)


# -- scaling of losses ------------------------------------------------------------------------------------------------
def _scaled_training(scaler: Any, is_async: bool = False, infinite: int = -1) -> tuple[RoundPipe, list[float]]:
    wrapped = RoundPipe(net())
    optimizer = sgd(wrapped)
    scales = []

    def update() -> None:
        scaler.step(optimizer)
        optimizer.zero_grad()

    for i in range(4):
        factor = float("inf") if i == infinite else 1.0
        wrapped.forward_backward((X,), loss_fn=lambda out, _, f=factor: scaler.scale(square_sum(out, None) * f))
        wrapped.step(update, is_async=is_async)
        scaler.update(is_async=is_async)
        scales.append(scaler.get_scale())
    wrapped.synchronize()
    return wrapped, scales


@row
def a_scaled_loss_trains_as_an_unscaled_one() -> None:
    """GradScaler: scale in loss_fn (on worker threads), step in the step function, update on the main thread."""
    wrapped, scales = _scaled_training(roundpipe.GradScaler(init_scale=4.0, growth_interval=2))
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(4):
        square_sum(plain(X), None).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(wrapped.model[0].weight, plain[0].weight, rtol=1e-4, atol=1e-5)
    assert scales == [4.0, 8.0, 8.0, 16.0]


@row
def an_infinite_gradient_skips_the_step_and_backs_off() -> None:
    """A step with an infinity or NaN is skipped, the scale backs off; asynchronous updates take effect one later."""
    for is_async, expected in ((False, [4.0, 2.0, 2.0, 2.0]), (True, [4.0, 4.0, 2.0, 2.0])):
        wrapped, scales = _scaled_training(roundpipe.GradScaler(init_scale=4.0), is_async, infinite=1)
        assert scales == expected
        assert all(p.isfinite().all() for p in wrapped.model.parameters())


@row
def methods_of_the_scaler() -> None:
    """Getters and setters as torch's, getters with up_to_date=False; state_dict; update only on the main thread."""
    scaler, theirs = roundpipe.GradScaler(growth_interval=5), torch.amp.GradScaler("cpu", growth_interval=5)
    for name, value in (("growth_factor", 3.0), ("backoff_factor", 0.25), ("growth_interval", 7)):
        assert getattr(scaler, f"get_{name}")() == getattr(theirs, f"get_{name}")()
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")(up_to_date=True) == value
    assert scaler.get_scale(up_to_date=True) == scaler.get_scale() == 2.0**16 and scaler.is_enabled()
    other = roundpipe.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.get_growth_interval() == 7
    disabled = roundpipe.GradScaler(enabled=False)
    assert disabled.scale(X) is X and not disabled.is_enabled() and disabled.get_scale() == 1.0
    wrapped = RoundPipe(net())
    wrapped.forward_backward((X,), loss_fn=square_sum)
    list(wrapped.optim_parameters())
    with pytest.raises(RuntimeError, match="update"):
        wrapped.step(lambda: scaler.update(), is_async=False)


@row
def operators_of_the_data_plane() -> None:
    """host_empty, offload and reload pairs and linear_cross_entropy are operators of torch."""
    for name in (
        "host_empty",
        "offload_start",
        "offload_wait",
        "reload_start",
        "reload_wait",
        "linear_cross_entropy",
    ):
        assert callable(getattr(torch.ops.roundpipe, name))


@row
def offload_activations_keeps_the_gradients() -> None:
    """offload_activations(module): what it saves waits in host memory; the gradients are the same."""
    plain, ours = net(), net()
    roundpipe.offload_activations(ours)
    square_sum(plain(X), None).backward()
    square_sum(ours(X), None).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


# -- timer, wrapping --------------------------------------------------------------------------------------------------
@row
def the_timers_lines() -> None:
    """ModelTimer.VERBOSE = True: a line a layer and phase on stderr after each iteration."""
    import contextlib
    import io

    text = io.StringIO()
    ModelTimer.VERBOSE = True
    try:
        with contextlib.redirect_stderr(text):
            wrapped = RoundPipe(net())
            wrapped.forward_backward((X,), loss_fn=square_sum)
            wrapped.synchronize()
    finally:
        ModelTimer.VERBOSE = False
    line = r"Layer \d+ (fwd|re|bwd)  new record: \d+\.\d{3} ms  new estimate: \d+\.\d{3} ms"
    lines = text.getvalue().splitlines()
    assert len(lines) >= 6 and all(re.fullmatch(line, one) for one in lines)


def _causal_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


@row
def presets_take_the_models_own_arguments() -> None:
    """A preset takes the model's own arguments, and return_logits=False: the loss without materialised logits."""
    model = _causal_model()
    tokens = torch.randint(32, (4, 6))
    wanted = model(input_ids=tokens, labels=tokens).loss
    wrapped = wrap_model_to_roundpipe(model)
    assert wrapped.num_layers == 4
    with torch.no_grad():
        run_config = config(num_microbatch=1)
        whole = wrapped(input_ids=tokens, labels=tokens, roundpipe_run_config=run_config)
        without = wrapped(input_ids=tokens, labels=tokens, return_logits=False, roundpipe_run_config=run_config)
    assert torch.allclose(whole.loss, wanted, rtol=1e-4) and whole.logits.shape == (4, 6, 32)
    assert torch.allclose(without.loss, wanted, rtol=1e-4) and without.get("logits") is None


@row
def use_sequential_preset() -> None:
    """True forces a preset (NotImplementedError if there is none), False skips it."""
    with pytest.raises(NotImplementedError):
        wrap_model_to_roundpipe(nn.Linear(4, 4), use_sequential_preset=True)
    assert wrap_model_to_roundpipe(_causal_model(), use_sequential_preset=True).num_layers == 4
    assert wrap_model_to_roundpipe(net()).num_layers == 3


@row
def chunked_loss_function() -> None:
    """models.function.ChunkedCompileLinearForCausalLMLoss exists for scripts that use it."""
    from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss

    assert issubclass(ChunkedCompileLinearForCausalLMLoss, torch.autograd.Function)


# -- devices ----------------------------------------------------------------------------------------------------------
@row
def devices_are_chosen_by_name() -> None:
    """use_devices("host:4" | "host:2@512MiB" | ...), devices()."""
    roundpipe.use_devices("host:4")
    assert [d.name for d in roundpipe.devices()] == [f"host:{i}" for i in range(4)]
    roundpipe.use_devices("host:2@512MiB")
    assert [d.memory_bytes for d in roundpipe.devices()] == [512 << 20] * 2
    with pytest.raises(ValueError):
        roundpipe.use_devices("cuda:999")


@row
def the_list_of_devices() -> None:
    """device.device_list: objects with .device, those of now."""
    from roundpipe import device

    for count in (3, 2):
        roundpipe.use_devices(f"host:{count}")
        assert [one.device.type for one in device.device_list] == ["cpu"] * count
    with pytest.raises(AttributeError, match="nothing"):
        _ = device.nothing


@row
def devices_by_environment() -> None:
    """ROUNDPIPE_DEVICES names the devices where use_devices does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROUNDPIPE_DEVICES", "host:3")
        roundpipe.use_devices(None)
        assert len(roundpipe.devices()) == 3
    roundpipe.use_devices("host:2")


# -- errors -----------------------------------------------------------------------------------------------------------
@row
def kinds_of_errors() -> None:
    """Every error is a RoundPipeError; those of arguments are ValueErrors too, those of memory what torch raises."""
    kinds = {
        "StageError": (),
        "PartialStepError": (),
        "StallError": (),
        "PlanError": (ValueError,),
        "SplitError": (ValueError,),
        "ConfigError": (ValueError,),
        "DeviceOutOfMemory": (torch.OutOfMemoryError,),
        "HostOutOfMemory": (MemoryError, RuntimeError),
    }
    for name, bases in kinds.items():
        kind = getattr(errors, name)
        assert issubclass(kind, errors.RoundPipeError)
        assert all(issubclass(kind, base) for base in bases)


@row
def errors_of_memory_have_the_words_that_helpers_look_for() -> None:
    """One string argument that holds the phrases of torch's own errors."""
    device, host = errors.DeviceOutOfMemory("no room"), errors.HostOutOfMemory("no room")
    assert len(device.args) == len(host.args) == 1
    assert "CUDA out of memory." in device.args[0]
    assert "DefaultCPUAllocator: can't allocate memory" in host.args[0]


@row
def failures_name_their_place() -> None:
    """A failure on a device names device, phase, stage, layer and microbatch, with the original chained."""

    class Fails(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise LookupError("lost")

    with pytest.raises(errors.StageError) as info:
        RoundPipe(nn.Sequential(nn.Linear(4, 4), Fails(4, 4))).forward_backward((X,), loss_fn=square_sum)
    error = info.value
    assert (error.layer, error.microbatch) == (1, 0) and error.device and error.phase is not None
    assert error.stage is not None and isinstance(error.__cause__, LookupError)


# -- models that run their own forward --------------------------------------------------------------------------------
class Branches(nn.Module):
    """Two stacks beside each other and a head, in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        y = self.left(x)
        for block in self.blocks:
            y = torch.tanh(block(y)) + x
        return -y * self.scale if flip else y * self.scale


def _branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def _auto(model: nn.Module, **arguments: Any) -> Any:
    return wrap_model_to_roundpipe(model, lower_threshold=8, upper_threshold=0, **arguments)


@row
def a_model_with_its_own_forward_becomes_an_auto_roundpipe() -> None:
    """wrap_model_to_roundpipe walks the tree; an AutoRoundPipe has forward and the optimizer's side."""
    from roundpipe.roundpipe import AutoRoundPipe

    wrapped, plain = _auto(_branches()), _branches()
    assert isinstance(wrapped, AutoRoundPipe)
    optimizer, theirs = sgd(wrapped), torch.optim.SGD(plain.parameters(), lr=0.1)
    for flip in (False, True):
        loss = wrapped(X, flip=flip).square().sum()
        loss.backward()
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        theirs.zero_grad()
        wanted = plain(X, flip=flip).square().sum()
        wanted.backward()
        theirs.step()
        assert torch.allclose(loss, wanted, rtol=1e-5)
    state = wrapped.state_dict()
    assert set(state) == set(plain.state_dict())
    assert all(torch.allclose(state[n], v, rtol=1e-4, atol=1e-5) for n, v in plain.state_dict().items())


@row
def an_auto_roundpipe_has_no_forward_backward() -> None:
    """AutoRoundPipe: no forward_backward; the loss comes from its outputs."""
    with pytest.raises((AttributeError, NotImplementedError, RuntimeError), match="backward"):
        _auto(_branches()).forward_backward((X,), loss_fn=square_sum)


def _streamed(wrapped: Any) -> set[str]:
    return set(wrapped._places)


@row
def rules_of_the_tree_walk() -> None:
    """Sequential: several layers; ModuleList elements one by one; thresholds decide; skip_modules stay."""
    wrapped = _auto(_branches())
    assert {"left", "blocks.0", "blocks.1", "blocks.2"} <= _streamed(wrapped)
    model = _branches()
    assert "left" not in _streamed(_auto(model, skip_modules=[model.left]))
    # As one layer: all of it has no more elements than upper_threshold.
    whole = wrap_model_to_roundpipe(_branches(), upper_threshold=10**6)
    assert isinstance(whole, RoundPipe) and whole.num_layers == 1


@row
def override_config_is_for_single_modules() -> None:
    """override_config: a run configuration for one module."""
    model = _branches()
    pieces: list[int] = []
    model.left[0].register_forward_pre_hook(lambda module, args: pieces.append(args[0].shape[0]))
    wrapped = _auto(model, override_config={model.left: config(num_microbatch=6)})
    with torch.no_grad():
        wrapped(X)
    assert pieces == [1] * 6


@row
def functions_can_be_wrapped() -> None:
    """A plain function, such as a loss, becomes a layer without weights."""
    wrapped = wrap_model_to_roundpipe(lambda x, y: (x - y).square())
    with torch.no_grad():
        assert torch.equal(wrapped(X, torch.zeros(6, 4)), X.square())
