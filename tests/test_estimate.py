"""``estimate_memory`` beside what a real run takes: counted on simulated devices, reported and resident on the host."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops, runs, wrap_model_to_roundpipe
from roundpipe import engine as engines
from roundpipe.errors import ConfigError, ConfigTypeError
from roundpipe.estimate import estimate_memory
from roundpipe.hf.causal_lm import causal_lm_to_sequential
from roundpipe.host_advice import format_bytes
from roundpipe.layer_memory import FakeRun
from roundpipe.layer_run import LayerRun
from roundpipe.layer_sizes import layer_costs_of, unit_sizes
from roundpipe.optimizer_format import COMPACT_FORMATS, OptimizerFormat
from roundpipe.units import align

from .at_rest import at_rest
from .plans import one_layer_stages

transformers = pytest.importorskip("transformers")

MIB = 1 << 20
SMALL = dict(
    num_hidden_layers=5,
    hidden_size=128,
    intermediate_size=384,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    vocab_size=1000,
)
_limits = itertools.count(512)


def fresh_devices(count: int, limit: str | None = None) -> None:
    """An engine of its own for each test: regions never shrink, and peaks are kept."""
    at_rest()
    roundpipe.use_devices(f"host:{count}@" + (limit or f"{next(_limits)}MiB"))


def qwen(**changes: Any) -> Any:
    return transformers.Qwen3Config(**{**SMALL, "tie_word_embeddings": True, **changes})


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": False, **changes})


def language_model(config: Any, dtype: torch.dtype, lora: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora is None:
        return model
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=lora, target_modules="all-linear"))


def convolutions() -> nn.Sequential:
    blocks = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.Sequential(nn.Flatten(), nn.Linear(16 * 256, 10)))


def perceptron(width: int = 256, layers: int = 6, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    made = [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)]
    return nn.Sequential(*made).to(dtype)


@dataclasses.dataclass
class Case:
    """``batch``: rows; ``seq`` None: not a language model."""

    make: Callable[[], nn.Module]
    batch: int
    seq: int | None
    devices: int
    settings: dict[str, Any]


CASES = {
    "qwen3, by stage": Case(lambda: language_model(qwen(), torch.bfloat16), 4, 256, 1, dict(num_microbatch=2)),
    "qwen3, by layer, two devices": Case(
        lambda: language_model(qwen(), torch.bfloat16), 4, 128, 2, dict(num_microbatch=4, recompute_grain="layer")
    ),
    "llama, float32, one layer a stage": Case(
        lambda: language_model(llama(), torch.float32), 4, 256, 1, dict(num_microbatch=2, plan=one_layer_stages(7))
    ),
    "llama, adapters, three devices": Case(
        lambda: language_model(llama(), torch.bfloat16, 4), 6, 128, 3, dict(num_microbatch=3, plan=one_layer_stages(7))
    ),
    "convolutions": Case(convolutions, 24, None, 1, dict(num_microbatch=3, optimizer="adamw")),
    "perceptron": Case(perceptron, 4096, None, 2, dict(num_microbatch=4, optimizer="sgd-momentum")),
}


def loss_of(case: Case) -> tuple[Any, Callable[[Any, Any], torch.Tensor]]:
    """(label, loss_fn)"""
    if case.seq is not None:
        return None, lambda output, _: output.loss
    label = torch.randint(10, (case.batch,)) if case.make is convolutions else torch.randn(case.batch, 256)
    loss = nn.functional.cross_entropy if case.make is convolutions else nn.functional.mse_loss
    return label, lambda output, target: loss(output, target)


def inputs_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if case.seq is not None:
        tokens = torch.randint(1000, (case.batch, case.seq))
        return (), dict(input_ids=tokens, labels=tokens, return_logits=False)
    return ((torch.randn(case.batch, 3, 16, 16) if case.make is convolutions else torch.randn(case.batch, 256)),), {}


def run(case: Case, model: nn.Module, settings: dict[str, Any], config: RoundPipeRunConfig) -> tuple[Any, int]:
    """The wrapped model after two steps with its step, and the peak of the fullest device in the second."""
    wrapped = wrap_model_to_roundpipe(model) if case.seq is not None else RoundPipe(model)
    args, kwargs = inputs_of(case)
    label, loss_fn = loss_of(case)
    name = settings.get("optimizer", "compact")
    if name.startswith("compact"):
        step: Any = roundpipe.optim.AdamW(wrapped, lr=1e-3)
    else:
        with roundpipe.OptimizerCtx():
            kind = torch.optim.AdamW if name == "adamw" else torch.optim.SGD
            optimizer = kind(wrapped.parameters(), lr=1e-3, **({} if name == "adamw" else {"momentum": 0.9}))
        step = lambda: (optimizer.step(), optimizer.zero_grad())  # noqa: E731
    for _ in range(2):
        roundpipe.memory.reset_device_peaks()
        wrapped.forward_backward(args, kwargs, label, loss_fn, run_config=config)
        wrapped.step(step, is_async=settings.get("is_async", False))
        wrapped.synchronize()
    return (wrapped, step), max(device.peak_bytes or 0 for device in roundpipe.memory_report().devices)


@pytest.mark.parametrize("name", CASES)
def test_an_estimate_is_what_a_run_takes(name: str) -> None:
    case = CASES[name]
    fresh_devices(case.devices)
    model = case.make()
    label, loss_fn = loss_of(case)
    inputs = None if case.seq is not None else inputs_of(case)
    settings = {"is_async": False, "optim_dtype": None, **case.settings}
    estimate = estimate_memory(model, case.batch, case.seq, inputs=inputs, label=label, loss_fn=loss_fn, **settings)
    assert estimate.num_devices == case.devices and estimate.fits
    configuration = estimate.asked.configuration
    assert configuration.num_microbatch == case.settings["num_microbatch"]
    # Copies down that are late on a busy machine count up to a 64th of a device.
    fresh_devices(case.devices, f"{4 * estimate.device.total_bytes}B")
    at_rest()
    before = roundpipe.memory_report().host  # of models that other tests still hold
    (_wrapped, _step), counted = run(case, model, settings, configuration.run_config())
    assert estimate.device.total_bytes == pytest.approx(counted, rel=0.1)
    report = roundpipe.memory_report().host
    assert estimate.host.weights_bytes == report.weights_bytes - before.weights_bytes
    assert estimate.host.gradients_bytes == report.gradients_bytes - before.gradients_bytes
    kept = report.optimizer_bytes - before.optimizer_bytes
    kept += report.optimizer_states_bytes - before.optimizer_states_bytes
    assert estimate.host.optimizer_bytes == pytest.approx(kept, rel=0.01)
    peak = _ops.engine_live(engines.current().handle)[2]
    assert estimate.host.activations_bytes == pytest.approx(peak, rel=0.1, abs=32 << 10)


def test_a_configuration_and_its_model_have_one_estimate(tmp_path: Path) -> None:
    config = qwen()
    settings: dict[str, Any] = dict(device_kind="cuda", num_devices=2, device_memory_bytes=64 * MIB)
    of_config = estimate_memory(config, 2, 128, **settings)
    of_model = estimate_memory(language_model(config, torch.bfloat16), 2, 128, **settings)
    assert of_config == of_model
    config.save_pretrained(tmp_path)
    assert estimate_memory(str(tmp_path), 2, 128, **settings) == of_config
    roundpipe.use_devices("host:1")
    wrapped = wrap_model_to_roundpipe(language_model(config, torch.bfloat16))
    assert estimate_memory(wrapped, 2, 128, **settings) == of_config
    settings = dict(loss_fn=lambda out, _: out.sum(), device_kind="host", num_devices=1)
    with torch.device("meta"):
        layers = perceptron()
    x = torch.empty(64, 256, device="meta")
    real = estimate_memory(perceptron(), 64, inputs=((torch.randn(64, 256),), {}), **settings)
    assert estimate_memory(layers, 64, inputs=((x,), {}), **settings) == real


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_estimate_does_not_depend_on_the_callers_grad_mode(mode: Any) -> None:
    settings: dict[str, Any] = dict(loss_fn=lambda out, _: out.sum(), device_kind="host", num_devices=1)
    inputs: Any = ((torch.empty(64, 256),), {})
    model = perceptron()
    wanted = estimate_memory(model, 64, inputs=inputs, **settings)
    with mode():
        assert estimate_memory(model, 64, inputs=inputs, **settings) == wanted


def test_the_fastest_configuration_runs_within_a_limit_that_what_was_asked_for_breaks() -> None:
    case = CASES["qwen3, by stage"]
    whole = estimate_memory(qwen(), 4, 256, num_microbatch=1, device_kind="host", num_devices=1)
    limit = int(whole.device.total_bytes * 0.3)
    fresh_devices(1, f"{limit}B")
    estimate = estimate_memory(qwen(), 4, 256, num_microbatch=1, plan=whole.asked.configuration.plan())
    assert not estimate.fits and not estimate.asked.fits_device and estimate.fastest is not None
    assert estimate.fastest.fits and estimate.fastest.device.total_bytes <= 0.9 * limit
    config = estimate.fastest.configuration.run_config()
    _, counted = run(case, case.make(), {}, config)
    assert counted <= limit
    assert estimate.fastest.device.total_bytes == pytest.approx(counted, rel=0.1)


def test_memory_falls_with_microbatches_and_grain() -> None:
    settings: dict[str, Any] = dict(device_kind="cuda", num_devices=1, plan=one_layer_stages(7))
    peaks = [
        estimate_memory(qwen(), 16, 256, num_microbatch=n, **settings).device.total_bytes for n in (1, 2, 4, 8, 16)
    ]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > 1.5 * peaks[-1]
    deep = roundpipe.ModelExecutePlan()
    deep.fwd_plan, deep.bwd_plan = [range(6)], [range(6, 7), range(6)]
    settings["plan"] = deep
    stage, layer = (
        estimate_memory(qwen(), 4, 256, num_microbatch=4, recompute_grain=grain, **settings)
        for grain in ("stage", "layer")
    )
    assert layer.device.activations_bytes < stage.device.activations_bytes
    assert layer.host.activations_bytes > stage.host.activations_bytes


class Tied(nn.Module):
    """The embedding's weight as a head."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize(("devices", "whole"), [(1, False), (2, False), (1, True)])
def test_announced_steps_hold_the_pool_and_the_images_of_what_several_stages_write(
    devices: int, whole: bool, calls: int
) -> None:
    fresh_devices(devices)
    embedding = nn.Embedding(300, 64)
    layers = nn.Sequential(embedding, *perceptron(64, 6), Tied(embedding)).bfloat16()
    words, loss_fn = torch.randint(300, (8, 4)), (lambda out, _: out.float().square().mean())
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [], [range(8)]  # one stage: the tied weight is written once
    settings: dict[str, Any] = dict(plan=plan if whole else one_layer_stages(8), num_microbatch=2)
    estimate = estimate_memory(
        layers, 8, inputs=((words,), {}), loss_fn=loss_fn, announced=True, accumulates=calls > 1, **settings
    )
    assert estimate.asked.configuration.steps == "announced" and "announced" in str(estimate)
    at_rest()
    before = roundpipe.memory_report().host
    wrapped = RoundPipe(layers)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-3)
    for number in range(4 * calls):
        step = optimizer if number % calls == calls - 1 else None
        config = estimate.asked.configuration.run_config()
        wrapped.forward_backward((words,), loss_fn=loss_fn, run_config=config, step=step)
    engines.current().wait_idle()
    report = roundpipe.memory_report().host
    assert estimate.host.gradients_bytes == report.gradients_bytes - before.gradients_bytes > 0
    assert estimate.host.optimizer_bytes == pytest.approx(report.optimizer_bytes - before.optimizer_bytes, rel=0.02)
    exact = estimate_memory(
        layers, 8, inputs=((words,), {}), loss_fn=loss_fn, is_async=False, accumulates=calls > 1, **settings
    )
    assert exact.host.optimizer_bytes == estimate.host.optimizer_bytes
    assert (exact.host.gradients_bytes > estimate.host.gradients_bytes) == (calls == 1)


class Gates:
    """``opened`` of them; a thread may wait for the next."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.opened = 0

    def open(self) -> None:
        with self.changed:
            self.opened += 1
            self.changed.notify_all()

    def __deepcopy__(self, memo: Any) -> Gates:
        return self


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gates: Gates, number: int) -> torch.Tensor:  # type: ignore[override]
        ctx.gates, ctx.number = gates, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        with ctx.gates.changed:
            assert ctx.gates.changed.wait_for(lambda: ctx.gates.opened >= ctx.number, timeout=60)
        return grad, None, None


class Gated(nn.Module):
    """Its backward waits until so many gates are open."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gates, self.number = nn.Linear(256, 256), Gates(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Waits.apply(self.linear(x), self.gates, self.number)  # type: ignore[no-any-return]


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_next_calls_arguments_come_while_backward_still_runs(grain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_devices(1)
    gated = Gated()
    layers = nn.Sequential(nn.Linear(256, 256), gated, *(nn.Linear(256, 256) for _ in range(4)))
    x, label, loss_fn = torch.randn(512, 256), torch.randn(512, 256), nn.functional.mse_loss
    plan = roundpipe.ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(2), range(2, 4)], [range(4, 6), range(2, 4), range(2)]
    estimate = estimate_memory(
        layers, 512, inputs=((x,), {}), label=label, loss_fn=loss_fn, num_microbatch=4, recompute_grain=grain, plan=plan
    )
    wrapped = RoundPipe(layers)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-3)
    dispatch = runs._dispatch

    def opened(*args: Any) -> None:  # the new call's arguments and labels are on the host by now
        gated.gates.open()
        dispatch(*args)

    monkeypatch.setattr(runs, "_dispatch", opened)
    config = estimate.asked.configuration.run_config()
    for number in range(4):
        if number > 0:  # the first step waits for everything: it makes the optimizer's state
            gated.number = number + 2  # the next call's
        wrapped.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)
        wrapped.step(optimizer)
    gated.gates.open()
    wrapped.synchronize()
    assert estimate.host.activations_bytes == pytest.approx(_ops.engine_live(engines.current().handle)[2], rel=0.1)


@pytest.mark.parametrize("calls", [1, 6])
def test_labels_and_inputs_go_with_their_call(calls: int) -> None:
    """Not with the window: what many calls of one step keep does not add up."""
    fresh_devices(2)
    wrapped = RoundPipe(perceptron(64, 4))
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    x, label = torch.randn(512, 64), torch.randn(512, 64)
    config = RoundPipeRunConfig(num_microbatch=4, execute_plan=one_layer_stages(4))
    handle = engines.current().handle
    for _ in range(calls):
        wrapped.forward_backward((x,), label=label, loss_fn=nn.functional.mse_loss, run_config=config)
        engines.current().wait_idle()
        assert _ops.engine_live(handle)[:2] == [0, 0]
    wrapped.step(optimizer.step)
    wrapped.synchronize()


@pytest.mark.parametrize("rows", [8, 12])
def test_microbatches_too_small_for_a_layer_are_not_proposed(rows: int) -> None:
    """BatchNorm wants two rows. 12 rows in 8 pieces have two in some and one in others."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    settings: dict[str, Any] = dict(loss_fn=lambda out, _: out.sum(), device_kind="host", num_devices=1)
    inputs: Any = ((torch.empty(rows, 16),), {})
    most = estimate_memory(layers, rows, inputs=inputs, num_microbatch=1, **settings)
    assert most.fastest is not None
    least = estimate_memory(
        layers, rows, inputs=inputs, num_microbatch=4, plan=most.asked.configuration.plan(), **settings
    )
    limit = int(least.device.total_bytes / 0.9) + 1  # with smaller pieces only
    estimate = estimate_memory(layers, rows, inputs=inputs, num_microbatch=1, device_memory_bytes=limit, **settings)
    assert estimate.fastest is not None and estimate.fastest.configuration.num_microbatch <= 4
    with pytest.raises(ConfigError, match=r"layer 1 \(BatchNorm1d\).*more than 1 value"):
        estimate_memory(layers, rows, inputs=inputs, num_microbatch=rows, **settings)


def test_the_host_decides_on_formats_and_placements() -> None:
    settings: dict[str, Any] = dict(device_kind="cuda", num_devices=1, device_memory_bytes=1 << 30, process_bytes=0)
    wide = estimate_memory(qwen(), 1, 64, host_memory_bytes=1 << 40, optimizer="adamw", **settings)
    assert wide.fits and wide.fastest is not None and wide.fastest.configuration.optimizer == "adamw"
    parameters = wide.parameters
    assert wide.host.total_bytes == pytest.approx((2 + 2 + 4 + 4 + 8) * parameters, rel=0.05)
    for most, optimizer, steps in (
        (17, "compact:split/float32", "async"),
        (15, "compact:split/float32", "exact"),
        (13, "compact:split/bfloat16", "async"),
        (9, "compact:split/int8", "exact"),
    ):
        tight = estimate_memory(qwen(), 1, 64, host_memory_bytes=most * parameters, optimizer="adamw", **settings)
        assert not tight.fits and tight.fastest is not None
        assert (tight.fastest.configuration.optimizer, tight.fastest.configuration.steps) == (optimizer, steps)
    deep = qwen(num_hidden_layers=40)  # of which the pool of announced steps is a small part
    most = 13 * estimate_memory(deep, 1, 64, **settings).parameters
    tight = estimate_memory(deep, 1, 64, host_memory_bytes=most, **settings)
    assert not tight.fits and tight.fastest is not None
    assert tight.fastest.configuration.steps == "announced" and "max_grad_norm" in str(tight)
    assert tight.fastest.configuration.optimizer == "compact:split/float32"
    none = estimate_memory(qwen(), 1, 64, host_memory_bytes=2 * parameters, **settings)
    assert none.fastest is None and "nothing that was tried fits; what comes nearest is above the host's" in str(none)
    assert none.nearest is not None and none.nearest.fits_device and not none.nearest.fits_host
    near = none.nearest.configuration
    assert (near.optimizer, near.steps) == ("compact:split/int8", "announced")
    over = format_bytes(none.nearest.host.total_bytes - 2 * parameters)
    assert f"limit by {over}" in str(none) and none.as_dict()["nearest"]["configuration"]["steps"] == "announced"
    config = llama(vocab_size=200_000)  # frozen weights that outweigh the buffers they go through
    settings |= dict(lora=4, host_memory_bytes=80 * MIB)
    frozen = estimate_memory(config, 1, 64, **settings)
    assert not frozen.fits and frozen.fastest is not None and frozen.fastest.configuration.pin_model == "off"
    assert frozen.fastest.host.mapped_bytes == 2 * (frozen.parameters - frozen.trainable_parameters)
    assert estimate_memory(config, 1, 64, pin_model="auto", **settings).fits


def test_where_no_device_is_large_enough_the_nearest_is_said() -> None:
    settings: dict[str, Any] = dict(device_kind="cuda", num_devices=1, host_memory_bytes=1 << 40)
    fits = estimate_memory(qwen(), 8, 64, device_memory_bytes=1 << 30, num_microbatch=8, **settings)
    assert fits.nearest is None and fits.as_dict()["nearest"] is None
    none = estimate_memory(qwen(), 8, 64, device_memory_bytes=MIB // 4, num_microbatch=1, **settings)
    assert none.fastest is None and none.nearest is not None and none.nearest.fits_host
    assert none.nearest.configuration.num_microbatch == 8
    assert none.nearest.device.total_bytes < none.device.total_bytes
    usable = int(0.9 * (MIB // 4))
    text = f"what can be used of a device (0.22 MiB) by {format_bytes(none.nearest.device.total_bytes - usable)}"
    assert text in str(none) and "nearest" in str(none) and "the host's limit" not in str(none)


@pytest.mark.parametrize("name", COMPACT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("is_async", [False, True])
def test_formats_are_what_optimizers_keep(name: str, dtype: torch.dtype, is_async: bool) -> None:
    roundpipe.use_devices("host:1")
    layers = [nn.Linear(37, 19), nn.Linear(19, 300, bias=False), nn.Linear(300, 2)]
    layers[1].requires_grad_(False)
    model = nn.Sequential(*layers).to(dtype)
    units = unit_sizes(model)
    wrapped = RoundPipe(model)
    assert sorted((u.weight_bytes, u.gradient_bytes) for u in units) == sorted(
        (u.weight_bytes, u.gradient_bytes) for u in wrapped._state.units
    )
    ours = [dataclasses.replace(c, units=c.units[:-1]) for c in layer_costs_of(layers, units)]
    theirs = wrapped._layer_costs("fused")
    assert [(c.weight_bytes, c.gradient_bytes, c.name) for c in ours] == [
        (c.weight_bytes, c.gradient_bytes, c.name) for c in theirs
    ]
    form = OptimizerFormat.parse(name)
    assert form.name == name
    _, _, formats = name.partition(":")
    master, _, state = formats.partition("/")
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-3, master=master, state_dtype=state)
    wrapped.forward_backward((torch.randn(4, 37, dtype=dtype),), loss_fn=lambda out, _: out.float().square().mean())
    wrapped.step(optimizer, is_async=is_async)
    wrapped.synchronize()
    memory = wrapped._state.compact.memory
    assert memory is not None
    kept = [t for slot in memory.slots.values() for t in (slot.low, slot.master, *slot.moments, *slot.scales)]
    shadow = sum(u.gradient_bytes for u in units) if is_async else 0
    assert form.pinned_bytes([u.trainable for u in units], None) == sum(align(t.nbytes) for t in kept if t is not None)
    assert memory.host_bytes == sum(t.nbytes for t in kept if t is not None) + shadow
    assert form.pageable_bytes([u.trainable for u in units], None) == 0


def test_alike_layers_are_run_once_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*perceptron(32, 4), nn.Linear(32, 32), nn.Linear(32, 32, bias=False), *perceptron(32, 2))
    model[7].requires_grad_(False)
    x, loss = torch.empty(16, 32, device="meta"), (lambda out, _: out.sum())
    calls = []
    original = FakeRun._measure
    monkeypatch.setattr(FakeRun, "_measure", lambda self, *a, **k: (calls.append(1), original(self, *a, **k))[1])
    memory, work = LayerRun(list(model), "host").run((x,), {}, None, loss)
    # The first takes arguments and its input needs no gradient; then three alike, two kinds, one more, a frozen one;
    # and the loss.
    assert len(calls) == 1 + 1 + 2 + 1 + 1
    assert memory == FakeRun(list(model), torch.device("cpu")).measure((x,), {}, None, loss)
    assert [w.flops for w in work[:4]] == [2 * 2 * 16 * 32 * 64] * 4


def test_blocks_of_a_language_model_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = list(causal_lm_to_sequential(language_model(qwen(num_hidden_layers=6), torch.bfloat16)))
    tokens = torch.empty(1, 64, dtype=torch.int64, device="meta")
    kwargs = dict(input_ids=tokens, labels=tokens, return_logits=False)
    calls = []
    original = FakeRun._measure
    monkeypatch.setattr(FakeRun, "_measure", lambda self, *a, **k: (calls.append(1), original(self, *a, **k))[1])
    memory, work = LayerRun(layers, "cuda").run((), kwargs, None, lambda out, _: out.loss)
    assert len(calls) <= 5  # prefix, a first block whose input may be unlike the others', a block, head, loss
    assert len(memory.layers) == len(work) == 8


def test_models_of_transformers_build_no_masks_for_tensors_without_values() -> None:
    """Also where a run is measured to say what would need less memory."""
    layers = list(causal_lm_to_sequential(language_model(qwen(), torch.bfloat16)))
    tokens = torch.empty(1, 512, dtype=torch.int64, device="meta")
    kwargs, loss = dict(input_ids=tokens, labels=tokens, return_logits=False), (lambda out, _: out.loss)
    memory = FakeRun(layers, torch.device("cpu")).measure((), kwargs, None, loss)
    assert memory == LayerRun(layers, "host").run((), kwargs, None, loss)[0]
    assert memory.layers[0].output_bytes < 512 * 512


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.sum()) > 0 else x


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (dict(batch=0), ConfigError, "batch"),
    (dict(batch="8"), ConfigTypeError, "batch"),
    (dict(seq=None), ConfigError, "seq"),
    (dict(seq=0), ConfigError, "seq"),
    (dict(num_microbatch=0), ConfigError, "num_microbatch"),
    (dict(recompute_grain="block"), ConfigError, "recompute_grain"),
    (dict(pin_model="yes"), ConfigError, "pin_model"),
    (dict(optimizer="adagrad"), ConfigError, "compact:split/int8"),
    (dict(optimizer="compact:half/int8"), ConfigError, "optimizer"),
    (dict(optimizer="adamw", announced=True), ConfigError, "announced=True: got optimizer='adamw'; expected a compact"),
    (dict(device_kind="tpu"), ConfigError, "device_kind"),
    (dict(num_devices=0), ConfigError, "num_devices"),
    (dict(lora=0), ConfigError, "lora"),
    (dict(model=7), ConfigTypeError, "nn.Module"),
    (dict(model="/no/such/folder"), ConfigError, "no such"),
    (dict(model=nn.Linear(2, 2)), ConfigError, "inputs"),
    (dict(model=nn.Linear(2, 2), lora=2, inputs=((torch.empty(4, 2),), {})), ConfigError, "lora"),
    (dict(model=nn.Sequential(), inputs=((torch.empty(4, 2),), {})), ConfigError, "empty"),
    (dict(model=nn.Linear(2, 2), inputs=torch.empty(4, 2)), ConfigTypeError, "pair"),
    (dict(model=nn.Linear(2, 2).requires_grad_(False), inputs=((torch.empty(4, 2),), {})), ConfigError, "require"),
    (dict(plan=one_layer_stages(3)), ConfigError, "layer"),
    (
        dict(model=nn.Sequential(nn.Linear(2, 2), Chooses()), inputs=((torch.empty(4, 2),), {})),
        ConfigError,
        r"layer 1 \(Chooses\).*depend on values",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "kind", "text"), BAD, ids=lambda x: str(x)[:40] if isinstance(x, dict) else None)
def test_bad_arguments(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    arguments = {"model": qwen(), "batch": 4, "seq": 16, "device_kind": "host", "num_devices": 1, **changes}
    with pytest.raises(kind, match=text):
        estimate_memory(**arguments)


# -- the system's count --------------------------------------------------------------------------------------------
CHILD = """
import ctypes, gc, json, sys
import torch
from torch import nn
import roundpipe
from roundpipe import RoundPipe, engine as engines
from roundpipe.estimate import estimate_memory

def resident(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

def train(width, layers, rows, form):
    model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    x = torch.zeros(rows, width, dtype=torch.bfloat16)
    loss_fn = lambda out, _: out.float().square().mean()
    estimate = estimate_memory(model, rows, inputs=((x,), {}), loss_fn=loss_fn, num_microbatch=4,
                               recompute_grain="layer", optimizer=form, process_bytes=0)
    wrapped = RoundPipe(model)
    del model
    if form.startswith("compact"):
        master, state = form.partition(":")[2].split("/")
        step = roundpipe.optim.AdamW(wrapped, lr=1e-6, master=master, state_dtype=state)
    else:
        wrapped._state.optimizer.dtype = torch.float32
        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-6)
        step = lambda: (optimizer.step(), optimizer.zero_grad())
    for _ in range(2):
        config = estimate.asked.configuration.run_config()
        wrapped.forward_backward((x,), loss_fn=loss_fn, run_config=config)
        wrapped.step(step)
    wrapped.synchronize()
    return wrapped, step, estimate

form = sys.argv[1]
roundpipe.use_devices("host:1@600MiB")
train(64, 2, 8, form)  # libraries, threads
engine = engines.current()
engine.reserve_regions([256 << 20], [256 << 20])
engine.reserve_regions = lambda *_: None  # nor does a first call give any of it back
engine.workers[0].region.zero_()  # a simulated device's memory is the host's too
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = resident("VmRSS:") - roundpipe.memory_report().host.idle_bytes  # which the model will use
wrapped, step, estimate = train(2048, 8, 512, form)
(device,) = roundpipe.memory_report().devices
assert device.region_bytes == 256 << 20
grown = resident("VmHWM:") - before - (device.peak_bytes - device.region_bytes)
print(json.dumps(dict(grown=grown, estimated=estimate.host.total_bytes)))
"""


@pytest.mark.parametrize("form", ["compact:split/float32", "adamw"])
def test_the_host_part_is_what_the_system_counts(form: str) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "ROUNDPIPE_CHECK": "0"}
    command = [sys.executable, "-c", CHILD, form]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=100).stdout
    found = json.loads(printed.splitlines()[-1])
    assert found["estimated"] == pytest.approx(found["grown"], rel=0.1)
