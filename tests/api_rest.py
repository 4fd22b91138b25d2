"""Rows of the table: recompute, optimizers, loss scaling, operators, devices, errors."""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, errors

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
def an_announced_step_equals_a_step_of_its_own() -> None:
    """forward_backward(..., step=optimizer): the call ends the window, and its exact step belongs to it."""
    states = []
    for announced in (False, True):
        wrapped = RoundPipe(net())
        optimizer = roundpipe.optim.AdamW(wrapped, lr=0.1, master="float32")
        for _ in range(3):
            wrapped.forward_backward((X,), loss_fn=square_sum)  # accumulates
            if announced:
                wrapped.forward_backward((X,), loss_fn=square_sum, step=optimizer)
            else:
                wrapped.forward_backward((X,), loss_fn=square_sum)
                wrapped.step(optimizer, is_async=False)
        states.append(copy.deepcopy(wrapped.state_dict()))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


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
def a_scaler_unscales_once_and_takes_a_new_scale() -> None:
    """unscale_ in the step function, for clipping; update(new_scale), which asynchronously counts one update later."""
    wrapped, plain = RoundPipe(net()), net()
    optimizer, scaler = sgd(wrapped), roundpipe.GradScaler(init_scale=8.0)

    def update() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.5)
        scaler.step(optimizer)

    wrapped.forward_backward((X,), loss_fn=lambda out, _: scaler.scale(square_sum(out, None)))
    wrapped.step(update, is_async=False)
    square_sum(plain(X), None).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.allclose(wrapped.model[0].weight, plain[0].weight, rtol=1e-5, atol=1e-6)
    scaler.update(2.0)
    assert (scaler.get_scale(), scaler.get_scale(up_to_date=True)) == (8.0, 2.0)
    scaler.update(4.0, is_async=False)
    assert scaler.get_scale() == 4.0


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
    """with offload_activations(module): what it saves waits in host memory; the gradients are the same."""
    plain, ours = net(), net()
    square_sum(plain(X), None).backward()
    with roundpipe.offload_activations(ours):
        square_sum(ours(X), None).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


# -- checkpoints ------------------------------------------------------------------------------------------------------
@row
def a_checkpoint_brings_everything_back() -> None:
    """save(model, optimizer, scaler, directory) gives a handle with wait() and done(); load continues from it."""
    with tempfile.TemporaryDirectory() as directory:
        first, second = RoundPipe(net()), RoundPipe(net(1))
        optimizers = [sgd(first), sgd(second)]
        first.forward_backward((X,), loss_fn=square_sum)
        first.step(optimizers[0].step, is_async=False)
        handle = roundpipe.save(first, optimizers[0], None, f"{directory}/a", metadata=[1])
        handle.wait()
        assert handle.done()
        assert roundpipe.load(second, optimizers[1], None, f"{directory}/a") == [1]
        assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


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
def without_a_gpu_one_simulated_device_and_one_warning() -> None:
    """The default: all visible GPUs; with none, one simulated device, which is said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ROUNDPIPE_DEVICES", raising=False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setattr(importlib.import_module("roundpipe.devices"), "_warned", False)
        roundpipe.use_devices(None)
        with pytest.warns(UserWarning, match="simulated") as caught:
            assert [d.name for d in roundpipe.devices()] == ["host:0"]
        assert len(caught) == 1
        with pytest.raises(ValueError, match="CUDA"):
            roundpipe.use_devices("cuda")
    roundpipe.use_devices("host:2")


@row
def where_weights_lie() -> None:
    """pin_model: "alloc", "register", "off", or "auto" for the first of them that fits; the results are the same."""
    losses = [
        RoundPipe(net(), pin_model=pin_model).forward_backward((X,), loss_fn=square_sum)
        for pin_model in ("alloc", "register", "off", "auto")
    ]
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    with pytest.raises(ValueError, match="pin_model"):
        RoundPipe(net(), pin_model="yes")


@row
def layers_may_be_compiled() -> None:
    """RoundPipe(..., compile=False); True or a dict of options of torch.compile."""

    class Double(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    graphs = []
    for compile in (False, {"backend": lambda graph, inputs: graphs.append(graph) or graph.forward}):
        assert not graphs
        model = RoundPipe(nn.Sequential(nn.Linear(4, 4), Double()), compile=compile)
        with torch.no_grad():
            torch.testing.assert_close(model(X).cpu(), 2 * model.model[0](X))
    assert graphs
    with pytest.raises(TypeError, match="compile"):
        RoundPipe(net(), compile="yes")


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


@row
def a_trace_is_a_timeline_in_a_file() -> None:
    """`with roundpipe.trace("out.json")` writes a JSON of events."""
    with tempfile.TemporaryDirectory() as folder:
        with roundpipe.trace(f"{folder}/out.json"):
            RoundPipe(nn.Linear(4, 4)).forward_backward((X,), loss_fn=square_sum)
        events = json.loads(Path(f"{folder}/out.json").read_text())["traceEvents"]
    assert {"fwd", "bwd", "copy"} <= {event.get("cat") for event in events}


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
        "CheckpointError": (),
        "CheckpointMismatch": (errors.CheckpointError, ValueError),
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
