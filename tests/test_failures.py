"""Whatever raises, wherever it does: one typed error that says where, and the next call is as if nothing had been."""

from __future__ import annotations

import copy
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.call import Call
from roundpipe.errors import ConfigError, DeviceOutOfMemory, HostOutOfMemory, RoundPipeError, StageError
from roundpipe.stage_job import StageJob

from . import oracle
from .at_rest import at_rest
from .faults import WIDTH, Trap, Trapped, five_layer_plan, plan_of, trapped_model

MICROBATCHES = 3


class Boom(Exception):
    """Raised by the traps."""


def mse(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(out, label)


def batch(seed: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def config(grain: str = "stage", **more: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(
        num_microbatch=MICROBATCHES, recompute_grain=grain, execute_plan=five_layer_plan(), **more
    )


def run(wrapped: RoundPipe, seed: int, grain: str = "stage", loss_fn: Any = mse) -> Any:
    x, label = batch(seed)
    torch.manual_seed(seed)
    return wrapped.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config(grain))


def run_plain(plain: nn.Sequential, seed: int) -> torch.Tensor:
    x, label = batch(seed)
    torch.manual_seed(seed)
    return oracle.forward_backward(list(plain), (x,), label=label, loss_fn=mse, num_microbatch=MICROBATCHES)


def fail(wrapped: RoundPipe, seed: int, grain: str = "stage", loss_fn: Any = mse) -> RoundPipeError:
    """Runs a call that must fail, at once or when the next one on the model comes; gives the error."""
    with pytest.raises(RoundPipeError) as caught:
        run(wrapped, seed, grain, loss_fn)
        wrapped.synchronize()
    return caught.value


def live_after_gc() -> list[int]:
    at_rest()
    records, nbytes, _, jobs, handles = _ops.engine_live(engines.current().handle)
    return [records, nbytes, jobs, handles]


def make(devices: int, layers: int = 5) -> tuple[RoundPipe, nn.Sequential]:
    roundpipe.use_devices(f"host:{devices}")
    model = trapped_model(layers)
    return RoundPipe(model), copy.deepcopy(model)


def trap_of(wrapped: RoundPipe, layer: int) -> Any:
    found = wrapped.model[layer]
    assert isinstance(found, Trapped)
    return found.trap


# (kind of visit, layer) -> (phase that the error must name, stage)
PLACES = {
    ("forward", 0): ("forward", 0),
    ("forward", 2): ("forward", 1),
    ("forward", 3): ("fused", 0),
    ("backward", 4): ("fused", 0),
    ("recompute", 1): ("recompute", 1),
    ("recompute", 0): ("recompute", 2),
    ("backward", 2): ("backward", 1),
    ("backward", 1): ("backward", 1),
    ("backward", 0): ("backward", 2),
}


@pytest.mark.parametrize(("devices", "grain"), [(1, "stage"), (2, "layer"), (3, "stage"), (3, "layer")])
def test_error_of_a_layer_names_its_place_and_leaves_no_trace(devices: int, grain: str) -> None:
    roundpipe.use_devices(f"host:{devices}")
    engines.current()
    before = live_after_gc()
    wrapped, plain = make(devices)
    run(wrapped, 0, grain)
    run_plain(plain, 0)
    wrapped.synchronize()
    for number, ((kind, layer), (phase, stage)) in enumerate(PLACES.items()):
        trap = trap_of(wrapped, layer)
        microbatch = (number + devices) % MICROBATCHES
        boom = Boom(f"{kind} of {layer}")
        trap.arm(kind, microbatch, boom)
        error = fail(wrapped, 100 + number, grain)
        trap.disarm()
        assert type(error) is StageError and error.__cause__ is boom, (kind, layer, error)
        assert (error.phase, error.layer, error.microbatch) == (phase, layer, microbatch), (kind, layer, error)
        assert error.stage == stage, (kind, layer, error)
        assert error.device is not None and error.device.startswith("host:") and "Boom" in str(error)
        del error, boom
    oracle.assert_same_state(wrapped.model, plain, 0.0)
    run(wrapped, 1, grain)
    run_plain(plain, 1)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)
    del wrapped, trap
    assert live_after_gc() == before, "something outlives the model"


@pytest.mark.parametrize(("kind", "layer"), [("forward", 4), ("backward", 0)])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB."), DeviceOutOfMemory),
        (MemoryError("no room"), HostOutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), HostOutOfMemory),
        (ValueError("wrong"), StageError),
    ],
)
def test_kinds_of_errors(raised: BaseException, expected: type, layer: int, kind: str) -> None:
    wrapped, plain = make(2)
    trap_of(wrapped, layer).arm(kind, 1, raised)
    error = fail(wrapped, 5)
    assert type(error) is expected and error.__cause__ is raised
    assert (error.layer, error.microbatch) == (layer, 1)  # type: ignore[attr-defined]
    assert error.device is not None and error.phase is not None  # type: ignore[attr-defined]
    trap_of(wrapped, layer).disarm()
    run(wrapped, 1)
    run_plain(plain, 1)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)


@pytest.mark.parametrize("devices", [1, 3])
def test_loss_fn_that_raises(devices: int) -> None:
    wrapped, plain = make(devices)
    seen = []

    def loss_fn(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen.append(out)
        if len(seen) == 2:
            raise Boom
        return mse(out, label)

    x, label = batch(3)
    with pytest.raises(StageError) as caught:
        wrapped.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config())
    error = caught.value
    assert isinstance(error.__cause__, Boom)
    assert (error.phase, error.stage, error.layer, error.microbatch) == ("fused", 0, None, 1)
    run(wrapped, 1)
    run_plain(plain, 1)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_earlier_calls_of_the_window_survive(kind: str, devices: int) -> None:
    """Call 1 succeeds, 2 fails, 3 succeeds: the gradients are those of 1 and 3; buffers likewise."""
    wrapped, plain = make(devices)
    for layer in (4, 2, 0):
        run(wrapped, 10 + layer)
        run_plain(plain, 10 + layer)
        trap_of(wrapped, layer).arm(kind, 1, Boom())
        fail(wrapped, 20 + layer)
        trap_of(wrapped, layer).disarm()
    run(wrapped, 30)
    run_plain(plain, 30)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


def test_backward_that_fails_late_is_raised_once_by_the_next_call() -> None:
    wrapped, plain = make(2)
    run(wrapped, 0)
    run_plain(plain, 0)
    for layer in wrapped.model:
        layer.drop.p = 0.0  # a layer that draws makes the call wait for its recompute
    boom = Boom("late")
    trap_of(wrapped, 0).arm("backward", MICROBATCHES - 1, boom, hangs=True)
    run(wrapped, 1)
    trap_of(wrapped, 0).release()
    with pytest.raises(StageError) as caught:
        run(wrapped, 2)
    assert caught.value.__cause__ is boom and caught.value.phase == "backward"
    for layer in wrapped.model:
        layer.drop.p = 0.1
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)
    run(wrapped, 3)
    run_plain(plain, 3)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


@pytest.mark.parametrize("devices", [1, 2])
def test_inference_that_fails(devices: int) -> None:
    wrapped, plain = make(devices)
    x, _ = batch(0)
    wrapped.eval()
    plain.eval()
    boom = Boom()
    trap_of(wrapped, 3).arm("forward", 1, boom)
    infer = RoundPipeRunConfig(num_microbatch=MICROBATCHES)
    with torch.no_grad(), pytest.raises(StageError) as caught:
        wrapped(x, roundpipe_run_config=infer)
    assert caught.value.__cause__ is boom and caught.value.layer == 3 and caught.value.microbatch == 1
    with torch.no_grad():
        assert torch.equal(wrapped(x, roundpipe_run_config=infer), torch.cat([plain(p) for p in x.tensor_split(3)]))


def test_functions_of_the_caller_that_raise() -> None:
    """Split functions fail before anything runs, a merge function after everything; both drop the call."""
    wrapped, plain = make(2)
    run(wrapped, 0)
    run_plain(plain, 0)
    x, label = batch(1)

    def raises(*_: Any) -> Any:
        raise Boom

    for bad in (config(split_input=raises), config(split_label=raises), config(merge_output=raises)):
        with pytest.raises((Boom, RoundPipeError)) as caught:
            wrapped.forward_backward((x,), label=label, loss_fn=mse, run_config=bad, return_outputs=True)
        assert isinstance(caught.value, Boom) or isinstance(caught.value.__cause__, Boom)
    run(wrapped, 2)
    run_plain(plain, 2)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


@pytest.mark.parametrize("is_async", [True, False])
def test_step_function_that_raises(is_async: bool) -> None:
    """As in plain PyTorch: what it did before it raised counts, and gradients that it left are still there."""
    wrapped, plain = make(2)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for fails_after_update in (False, True, False):

        def step(fails_after_update: bool = fails_after_update) -> None:
            if not fails_after_update:
                raise Boom
            optimizer.step()
            raise Boom

        run(wrapped, 0)
        run_plain(plain, 0)
        if fails_after_update:
            plain_optimizer.step()
        with pytest.raises(StageError) as caught:
            wrapped.step(step, is_async=is_async)
            wrapped.synchronize()
        assert isinstance(caught.value.__cause__, Boom) and caught.value.phase == "step"
        wrapped.synchronize()
        oracle.assert_same_state(wrapped.model, plain)
    with OptimizerCtx():
        for got, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
            oracle.assert_close_to_scale(got.grad, want.grad, "gradient left by a failed step")
    run(wrapped, 1)
    run_plain(plain, 1)
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=is_async)
    plain_optimizer.step()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain)


def test_sum_of_a_window_survives_though_the_next_window_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls 1 and 2, a step that is dispatched, call 3 of the next window; then 2 fails at its very end.

    The step did not run, and what call 1 had accumulated is still whole, though call 3 was on its way to reuse its
    memory.
    """
    wrapped, plain = make(2)
    for layer in wrapped.model:
        layer.drop.p = 0.0
    for layer in plain:
        layer.drop.p = 0.0
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    run(wrapped, 1)
    run_plain(plain, 1)
    adopt, dispatch, dispatched = StageJob._adopt_replaced, Call.dispatch, threading.Event()
    failed: list[StageJob] = []

    def fails_late(job: StageJob, *args: Any) -> None:  # outside the lock under which the third call draws its seed
        adopt(job, *args)
        if job._last and job.stage.start == 0 and not failed:
            failed.append(job)
            assert dispatched.wait(Trap.PATIENCE_S)
            raise Boom("late")

    def notes(call: Call, *args: Any) -> None:
        dispatch(call, *args)
        dispatched.set()

    wrapped.synchronize()  # or the backward of the first call might come here
    monkeypatch.setattr(StageJob, "_adopt_replaced", fails_late)
    run(wrapped, 2)
    wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    monkeypatch.setattr(Call, "dispatch", notes)
    with pytest.raises(StageError) as caught:
        run(wrapped, 3)
        wrapped.synchronize()
    assert dispatched.is_set()
    assert isinstance(caught.value.__cause__, Boom)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain, bitwise=True)
    oracle.assert_same_state(wrapped.model, plain, 0.0)


def test_an_error_of_memory_holds_no_activations() -> None:
    """Helpers that retry with a smaller batch do so inside the except block."""
    seen: list[weakref.ref[torch.Tensor]] = []

    class Fills(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = x * 2.0
            seen.append(weakref.ref(big))
            raise torch.OutOfMemoryError("CUDA out of memory.")

    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), Fills()))
    with pytest.raises(DeviceOutOfMemory) as caught:
        wrapped.forward_backward((batch(0)[0],), loss_fn=mse)
    assert caught.value.__traceback__ is not None
    assert [ref() for ref in seen] == [None]


def test_a_layer_larger_than_the_device_is_an_error_of_memory() -> None:
    roundpipe.use_devices("host:2@64KiB")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 400), nn.Linear(400, 4))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    x = torch.randn(6, 64)
    one_each = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan_of([(0, 1), (1, 2)], [(2, 3), (1, 2), (0, 1)]))
    for _ in range(2):
        with pytest.raises(DeviceOutOfMemory, match="CUDA out of memory"):
            wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=one_each)
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    wrapped.forward_backward((x,), loss_fn=lambda out, _: out.sum(), run_config=one_each)
    wrapped.synchronize()
    torch.manual_seed(0)
    oracle.forward_backward(list(plain), (x,), loss_fn=lambda out, _: out.sum(), num_microbatch=2)
    oracle.assert_same_gradients(wrapped.model, plain)


class LeavesAFunction(nn.Module):
    """Behind a global variable, where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LEFT[:] = [lambda: self.linear(x)]
        return x


LEFT: list[Any] = []


class CallsIt(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return LEFT.pop()()


def test_a_layer_that_computes_with_the_weights_of_another_stage() -> None:
    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(LeavesAFunction(), CallsIt(), nn.Linear(WIDTH, WIDTH)))
    x, _ = batch(0)
    cut, whole = plan_of([(0, 1)], [(1, 3), (0, 1)]), plan_of([], [(0, 3)])
    with pytest.raises(StageError, match=r"layer 1.*belongs to another layer.*hand on tensors"):
        wrapped.forward_backward(
            (x,), loss_fn=lambda out, _: out.sum(), run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=cut)
        )
    wrapped.forward_backward(
        (x,), loss_fn=lambda out, _: out.sum(), run_config=RoundPipeRunConfig(num_microbatch=2, execute_plan=whole)
    )
    wrapped.synchronize()
    assert wrapped.model[0].linear.weight.grad is not None


@pytest.mark.parametrize("said", ["soon", "", "0", "-3", "nan"])
def test_a_stall_limit_that_is_no_number_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    roundpipe.use_devices("host:2")
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(4, 4)
    wrapped = RoundPipe(net, model_run_config=RoundPipeRunConfig(num_microbatch=2))
    with torch.no_grad():
        want = wrapped(x)
        with monkeypatch.context() as patched:
            patched.setenv("ROUNDPIPE_STALL_SECONDS", said)
            roundpipe.use_devices("host:1")
            with pytest.raises(ConfigError, match=f"ROUNDPIPE_STALL_SECONDS is '{said}', expected seconds above 0"):
                wrapped(x)
        oracle.assert_close_to_scale(wrapped(x), want, "output")
