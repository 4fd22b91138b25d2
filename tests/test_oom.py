"""A device that runs out of memory: what the error says, whether its advice holds, and that the next call works."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, doing_recompute
from roundpipe import engine as engines
from roundpipe.errors import DeviceOutOfMemory

from . import memory_models as zoo
from . import oracle
from .gpu_history import PeakHistory

MIB = 1 << 20


class _Burst(torch.autograd.Function):
    """Wants a lot of memory in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, want_bytes: int) -> torch.Tensor:  # type: ignore[override]
        ctx.want_bytes = want_bytes
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        torch.empty(ctx.want_bytes, dtype=torch.uint8)
        return grad, None


class Greedy(nn.Module):
    """Wants ``want_bytes`` in the phase ``when``; None: nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.when: str | None = None
        self.want_bytes = 64 * MIB

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase = "recompute" if doing_recompute() else "forward"
        if self.when == phase:
            torch.empty(self.want_bytes, dtype=torch.uint8)
        y = self.linear(x)
        return _Burst.apply(y, self.want_bytes) if self.when == "backward" else y  # type: ignore[no-any-return]


def by_layer_train(count: int) -> ModelExecutePlan:
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(count)]
    plan.bwd_plan = plan.fwd_plan[::-1]
    return plan


def _loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().sum()


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    ("layer", "when", "phase"),
    [(0, "forward", "forward"), (1, "recompute", "recompute"), (1, "backward", "backward"), (3, "forward", "fused")],
)
def test_the_error_of_any_phase_says_where_and_what_and_the_next_call_works(
    layer: int, when: str, phase: str, devices: int
) -> None:
    roundpipe.use_devices(f"host:{devices}@16MiB")
    torch.manual_seed(0)
    layers = nn.Sequential(*(Greedy() for _ in range(4)))
    twin = oracle.twin(layers)
    model = RoundPipe(layers)
    x = torch.randn(8, 16)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=zoo.stages_of(1, 4))
    model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    layers[layer].when = when
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
        model.synchronize()
    error = caught.value
    assert isinstance(error, DeviceOutOfMemory)
    assert (error.phase, error.layer, error.microbatch) == (phase, layer, 0)
    assert error.device in {f"host:{i}" for i in range(devices)}
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    (text,) = error.args
    kinds = ("weight slots", "gradients", "boundaries on their way", "activations")
    others = ("other allocations of this process", "other processes")
    for part in ("CUDA out of memory.", phase, f"layer {layer}", "float32 [4, 16]", *kinds, *others):
        assert part in text, part
    # What a layer takes only in recompute is not seen without values, and that is said.
    assert ("were predicted: a kernel" in text) == (when == "recompute")
    assert error.use is not None and error.use.weights_bytes > 0 and error.capacity_bytes == 16 * MIB
    twin_of_error = pickle.loads(pickle.dumps(error))
    assert (twin_of_error.args, twin_of_error.use) == (error.args, error.use)
    assert copy.copy(error).remedies == error.remedies
    del caught, error, twin_of_error
    gc.collect()
    layers[layer].when = None
    model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    model.synchronize()
    for _ in range(2):  # the call before the failed one counts, that one does not
        oracle.forward_backward(list(twin), (x,), label=x, loss_fn=_loss, num_microbatch=2)
    oracle.assert_same_gradients(model.model, twin)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_predictions_are_the_same_wherever_the_failure_is_told(when: str, grad: bool) -> None:
    """Inside the caller's own backward, where autograd records nothing, when the input waits for its gradient."""
    roundpipe.use_devices("host:1@16MiB")
    layers = nn.Sequential(*(Greedy() for _ in range(4)))
    layers[1].when = when
    model = RoundPipe(layers)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=by_layer_train(4))
    with pytest.raises(DeviceOutOfMemory, match=r"predicted peak of 64\.0 MiB"):
        model(torch.randn(8, 16, requires_grad=grad), roundpipe_run_config=config).sum().backward()
        model.synchronize()
    layers[1].when = None
    model(torch.randn(8, 16), roundpipe_run_config=config).sum().backward()
    model.synchronize()


def test_a_loss_that_is_too_large_and_a_failure_that_comes_late() -> None:
    roundpipe.use_devices("host:1@16MiB")
    layers = nn.Sequential(*(Greedy() for _ in range(3)))
    model = RoundPipe(layers)
    x = torch.randn(8, 16)
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=zoo.stages_of(1, 3))

    def greedy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.empty(64 * MIB, dtype=torch.uint8).sum() + _loss(output, label)

    with pytest.raises(DeviceOutOfMemory, match="fused"):
        model.forward_backward((x,), label=x, loss_fn=greedy, run_config=config)
    layers[0].when = "backward"
    with pytest.raises(DeviceOutOfMemory, match="weight slots") as caught:
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)  # may return before it fails
        layers[0].when = None
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    assert caught.value.phase == "backward" and caught.value.remedies is not None


def test_a_region_for_which_there_is_no_room() -> None:
    roundpipe.use_devices("host:1@1MiB")
    model = RoundPipe(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    x = torch.randn(8, 256)
    config = RoundPipeRunConfig(execute_plan=zoo.stages_of(8))
    with pytest.raises(DeviceOutOfMemory, match="region of weights") as caught:
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    assert caught.value.phase == "region"
    (remedy,) = [r for r in caught.value.remedies or () if r.config.execute_plan is not None]
    assert remedy.fits and "model_memory_limit" in remedy.text
    model.forward_backward((x,), label=x, loss_fn=_loss, run_config=remedy.config)
    model.synchronize()


@pytest.mark.parametrize(
    ("kind", "limit", "least"), [("perceptron", "5MiB", 2), ("attention", "24MiB", 3), ("convolution", "8MiB", 3)]
)
def test_every_remedy_leads_to_the_peak_that_it_names(kind: str, limit: str, least: int) -> None:
    roundpipe.use_devices(f"host:1@{limit}")
    model = RoundPipe(zoo.make(kind))
    x = zoo.batch(kind)
    config = RoundPipeRunConfig(num_microbatch=1, execute_plan=zoo.stages_of(8 if kind != "perceptron" else 2))
    with pytest.raises(DeviceOutOfMemory) as caught:
        model.forward_backward((x,), label=x, loss_fn=zoo.loss_fn, run_config=config)
        model.synchronize()
    remedies = caught.value.remedies or ()
    assert sum(bool(remedy.fits) for remedy in remedies) >= least
    order = [
        ("num_microbatch", "recompute_grain", "execute_plan").index(r.text.split("(")[1].split("=")[0])
        for r in remedies
    ]
    assert order == sorted(order)
    for remedy in remedies:
        assert str(remedy) in caught.value.args[0]
        if remedy.fits:
            assert "->" in str(remedy) and remedy.after_bytes < 0.98 * remedy.before_bytes
            zoo.drop_regions()
            counted = zoo.counted_peak(model, x, config.overridden_by(remedy.config))
            assert remedy.after_bytes == pytest.approx(counted, rel=0.15), str(remedy)


@pytest.mark.parametrize("adapts", [False, True])
def test_microbatches_too_small_for_a_layer_are_not_proposed(adapts: bool) -> None:
    """BatchNorm wants two rows: pieces of one row would fit, and fail."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.norm(x)[:, None, :].expand(-1, 4096, -1) * 2  # 256 KiB a row
            return self.linear(wide.sin().mean(1))

    for rows, limit, most in ((8, "4MiB", 4), (12, "5MiB", 6), (8, "2MiB", 0)):
        roundpipe.use_devices(f"host:1@{limit}")
        model = RoundPipe(nn.Sequential(Normed(), Normed()))
        x = torch.randn(rows, 16)
        config = RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer", execute_plan=zoo.stages_of(1, 2))
        if adapts and most:
            config = config.overridden_by(RoundPipeRunConfig(on_oom="adapt"))
            assert torch.isfinite(model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config))
            model.synchronize()
            continue
        with pytest.raises(DeviceOutOfMemory) as caught:
            model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
            model.synchronize()
        counts = [r.config.num_microbatch for r in caught.value.remedies or () if r.config.num_microbatch]
        fitting = [r for r in caught.value.remedies or () if r.fits]
        assert all(rows // count > 1 for count in counts)
        assert bool(fitting) == bool(most)
        for remedy in fitting:
            model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config.overridden_by(remedy.config))
            model.synchronize()


def test_the_plan_of_the_text_is_the_plan_of_the_config() -> None:
    roundpipe.use_devices("host:1@24MiB")
    model = RoundPipe(zoo.make("attention"), model_run_config=RoundPipeRunConfig(num_microbatch=1))
    x = zoo.batch("attention")
    with pytest.raises(DeviceOutOfMemory) as caught:
        model.forward_backward(
            (x,), label=x, loss_fn=zoo.loss_fn, run_config=RoundPipeRunConfig(execute_plan=zoo.stages_of(8))
        )
    (remedy,) = [r for r in caught.value.remedies or () if r.config.execute_plan is not None]
    made = eval(
        remedy.text,
        {"RoundPipeRunConfig": RoundPipeRunConfig, "ModelExecutePlan": roundpipe.ModelExecutePlan, "model": model},
    )
    assert made.execute_plan.bwd_plan == remedy.config.execute_plan.bwd_plan
    assert made.execute_plan.fwd_plan == remedy.config.execute_plan.fwd_plan


def test_what_cannot_help_is_not_named() -> None:
    """One row, one layer, already by layer."""
    roundpipe.use_devices("host:1@16MiB")
    greedy = Greedy()
    greedy.when = "forward"
    model = RoundPipe(nn.Sequential(greedy))
    with pytest.raises(DeviceOutOfMemory, match="No setting helps") as caught:
        model.forward_backward(
            (torch.randn(1, 16),),
            label=torch.randn(1, 16),
            loss_fn=_loss,
            run_config=RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer"),
        )
    assert caught.value.remedies == ()


def test_what_is_not_enough_is_not_said_to_help() -> None:
    """The layer's own activations are too large with one row."""
    roundpipe.use_devices("host:1@2MiB")
    wide = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    model = RoundPipe(nn.Sequential(wide))
    with pytest.raises(DeviceOutOfMemory, match=r"(?s)None of these is enough by itself.*does not fit yet") as caught:
        model.forward_backward(
            (torch.randn(2, 1024, 64),),
            loss_fn=lambda output, _: output.square().sum(),
            run_config=RoundPipeRunConfig(num_microbatch=1),
        )
    assert "What helps" not in str(caught.value)
    assert caught.value.remedies and not any(remedy.fits for remedy in caught.value.remedies)


def test_a_layer_whose_course_depends_on_values_gets_advice_too() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            width = 32 + int(float(x.detach().flatten()[0]) > 1e9)  # reads a value
            return (self.linear(x)[:, None, :].expand(-1, width, -1) * 2).sin().mean(1)

    roundpipe.use_devices("host:1@4MiB")
    model = RoundPipe(nn.Sequential(Chooses(), Chooses()))
    x = torch.randn(512, 64)
    config = RoundPipeRunConfig(num_microbatch=1)
    with pytest.raises(DeviceOutOfMemory) as caught:
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
        model.synchronize()
    assert any(remedy.config.num_microbatch for remedy in caught.value.remedies or ())
    adapt = RoundPipeRunConfig(num_microbatch=1, on_oom="adapt")
    torch.manual_seed(3)
    loss = model.forward_backward((x,), label=x, loss_fn=_loss, run_config=adapt)
    assert torch.isfinite(loss)
    model.synchronize()


def test_nobody_holds_the_memory_after_the_error_is_gone() -> None:
    roundpipe.use_devices("host:2@16MiB")
    layers = nn.Sequential(*(Greedy() for _ in range(4)))
    layers[2].when = "backward"
    model = RoundPipe(layers)
    x = torch.randn(8, 16)
    with pytest.raises(DeviceOutOfMemory):
        model.forward_backward((x,), label=x, loss_fn=_loss)
        model.synchronize()
    gc.collect()
    for worker in engines.current().workers:
        assert worker.memory is not None and worker.memory.live_bytes < 4096


@pytest.mark.needs_cuda
@pytest.mark.parametrize("adapts", [False, True])
def test_a_capped_gpu_gives_advice_that_holds_and_adapts(adapts: bool) -> None:
    """Eight blocks in one stage whose activations are several times the cap."""
    roundpipe.use_devices("host:1")
    RoundPipe(nn.Linear(1, 1))  # nothing of an earlier test's engine counts
    roundpipe.use_devices("cuda:0")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.manual_seed(0)
    model = RoundPipe(nn.Sequential(*(zoo.perceptron(1024) for _ in range(8))))
    x = torch.randn(16384, 1024)  # 64 MiB a boundary, 576 MiB in a block, 4.6 GiB in all
    plan = zoo.stages_of(8)
    plain = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan)
    used = torch.cuda.memory_allocated(0)
    cap = 3 << 30
    torch.cuda.set_per_process_memory_fraction((used + cap) / total, 0)
    try:
        if adapts:
            adapt = RoundPipeRunConfig(num_microbatch=1, execute_plan=plan, on_oom="adapt")
            loss = model.forward_backward((x,), label=x, loss_fn=zoo.loss_fn, run_config=adapt)
            model.synchronize()
            assert torch.isfinite(loss) and model._state.adapted
            return
        with pytest.raises(DeviceOutOfMemory, match="can be used") as caught:
            model.forward_backward((x,), label=x, loss_fn=zoo.loss_fn, run_config=plain)
            model.synchronize()
        remedies = caught.value.remedies or ()
        assert any(remedy.fits for remedy in remedies)
        del caught
        for remedy in remedies:
            if not remedy.fits:
                continue
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            zoo.drop_regions()
            outside = torch.cuda.memory_allocated(0)
            with PeakHistory() as history:
                counted = zoo.counted_peak(model, x, plain.overridden_by(remedy.config)) - outside
            assert remedy.after_bytes == pytest.approx(counted, rel=0.15), f"{remedy}\n{history}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
