"""What layers hand on unchanged goes down once and comes up once a device; what is written is never seen by others."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe import passed_on as passed_on_module
from roundpipe.boundary import Traffic

from .oracle import assert_same_gradients, forward_backward, twin
from .plans import one_layer_stages, random_fused_plan
from .test_traffic import Key, measured

MICROBATCHES = 3
ROWS = 6
FLOAT = 4


@pytest.fixture(autouse=True)
def restore_devices():
    yield
    roundpipe.use_devices(None)


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# -- models of transformers ----------------------------------------------------------------------------------------
def constants_of(sequential: nn.Sequential, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """(bytes of a hidden state, bytes of all constants that are no arguments) of a batch, microbatch by microbatch."""
    hidden = constants = 0
    for m in range(MICROBATCHES):
        piece = {name: tensor.tensor_split(MICROBATCHES)[m] for name, tensor in batch.items()}
        state = sequential[0](**piece)
        given = {id(tensor) for tensor in piece.values()}
        hidden += nbytes([state[0]])
        constants += nbytes([tensor for tensor in state[1] if id(tensor) not in given])
    return hidden, constants


def expected(batch: dict[str, torch.Tensor], hidden: int, constants: int, layers: int, devices: int, start: int):
    """By device, the bytes of one call whose layers are stages of their own, without weights and buffers."""
    moved: list[Counter[Key]] = [Counter() for _ in range(devices)]
    jobs = [("forward", i) for i in range(layers - 1)] + [("fused", layers - 1)]
    jobs += [("backward", i) for i in reversed(range(layers - 1))]
    labelled: set[int] = set()
    supplied: set[int] = set()
    for number, (kind, layer) in enumerate(jobs):
        device = (start + number) % devices
        count = moved[device]
        if layer == 0:  # its input is the call's own; only the labels are handed on
            count["up", Traffic.INPUTS] += nbytes(t for name, t in batch.items() if name != "labels")
        else:
            count["up", Traffic.ACTIVATIONS] += hidden
            if device not in supplied:
                supplied.add(device)
                count["up", Traffic.ACTIVATIONS] += constants
        if device not in labelled:
            labelled.add(device)
            count["up", Traffic.INPUTS] += nbytes([batch["labels"]])
        if kind == "forward":
            count["down", Traffic.ACTIVATIONS] += hidden + (constants if layer == 0 else 0)
        elif kind == "fused":
            count["down", Traffic.ACTIVATIONS] += MICROBATCHES * FLOAT + hidden  # losses; the gradient of its input
        else:
            count["up", Traffic.ACTIVATIONS] += hidden  # gradient of the output
            count["down", Traffic.ACTIVATIONS] += hidden if layer else 0
    return moved


def without_weights(counters: list[Counter[Key]]) -> list[Counter[Key]]:
    kinds = (Traffic.ACTIVATIONS, Traffic.INPUTS)
    return [Counter({key: n for key, n in counter.items() if key[1] in kinds}) for counter in counters]


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_constants_of_a_language_model_come_up_once_a_device(devices: int, grain: str) -> None:
    from .causal_models import make_batch, make_model

    roundpipe.use_devices(f"host:{devices}")
    model = make_model("gemma2", "eager", tied=True)  # two masks, of [B, 1, S, S], since attention is eager
    batch = make_batch(rows=ROWS, padding="left")
    wrapped = roundpipe.wrap_model_to_roundpipe(model, use_sequential_preset=True)
    with torch.no_grad():
        hidden, constants = constants_of(wrapped.model, batch)
    assert constants > hidden / 4
    plan = one_layer_stages(wrapped.num_layers)
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, recompute_grain=grain, execute_plan=plan)
    engine = engines.current()
    for _ in range(2):
        start = engine.peek(0)
        _ops.engine_reset_bytes(engine.handle)
        wrapped.forward_backward(
            input_kwargs=dict(batch, return_logits=False),
            loss_fn=lambda output, _: output.loss,
            run_config=config,
        )
        wrapped.synchronize()
        want = expected(batch, hidden, constants, wrapped.num_layers, devices, start)
        assert without_weights(measured()) == [+counter for counter in want]


def test_inference_and_a_backward_of_ones_own_bring_constants_up_once_each() -> None:
    from .causal_models import make_batch, make_model

    roundpipe.use_devices("host:1")
    batch = make_batch(rows=ROWS, padding="left")
    wrapped = roundpipe.wrap_model_to_roundpipe(make_model("llama", "eager"))
    with torch.no_grad():
        hidden, constants = constants_of(wrapped.model, batch)
    plan = one_layer_stages(wrapped.num_layers)
    plan.fwd_plan.append(range(wrapped.num_layers - 1, wrapped.num_layers))
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    engine = engines.current()

    def activations_up() -> int:
        found = measured()[0]["up", Traffic.ACTIVATIONS]
        _ops.engine_reset_bytes(engine.handle)
        return found

    layers = wrapped.num_layers
    _ops.engine_reset_bytes(engine.handle)
    with torch.no_grad():
        wrapped(**batch, roundpipe_run_config=config)
    assert activations_up() == (layers - 1) * hidden + constants
    output = wrapped(**batch, roundpipe_run_config=config)
    assert activations_up() == (layers - 1) * hidden + constants
    output.loss.backward()
    wrapped.synchronize()
    # The gradient of the logits is none, that of the loss comes up, and the other stages' gradients and inputs.
    assert activations_up() == MICROBATCHES * FLOAT + 2 * (layers - 1) * hidden + constants


# -- any model -----------------------------------------------------------------------------------------------------
WIDTH = 8


class First(nn.Module):
    """x [B, W] -> (x, bias [W] that needs gradients, mask [B, W] of ones)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.linear(x), torch.sin(self.bias), torch.ones_like(x)


class Middle(nn.Module):
    """Uses both, hands both on; `writes`: after the mask's use in this layer, others see another one."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writes = writes

    def forward(self, state):
        x, bias, mask = state
        if self.writes:
            mask.mul_(0.5)
        return torch.tanh(self.linear(x) * mask.clone() + bias), bias, mask


class Last(nn.Module):
    def forward(self, state):
        x, bias, mask = state
        return (x * bias * mask.clone()).sum(1), mask


def make(writes: tuple[int, ...] = ()) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(First(), *(Middle(i in writes) for i in range(5)), Last())


def loss_fn(out, label):
    return ((out[0] - label) ** 2).mean()


def loss_that_writes(out, label):
    loss = ((out[0] - label) ** 2).mean()
    out[1].fill_(float("nan"))  # a mask that earlier layers still need in their recompute
    return loss


def compare(model: nn.Sequential, loss=loss_fn, **config) -> None:
    torch.manual_seed(1)
    x, label = torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    plain = twin(model)
    wanted = forward_backward(list(plain), (x,), label=label, loss_fn=loss, num_microbatch=MICROBATCHES)
    wrapped = RoundPipe(model)
    run_config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, **config)
    got = wrapped.forward_backward((x,), label=label, loss_fn=loss, run_config=run_config)
    wrapped.synchronize()
    assert torch.equal(got, wanted)
    assert_same_gradients(model, plain)


PLANS = {"single": one_layer_stages(7), **{f"random {seed}": random_fused_plan(7, seed) for seed in (1, 2)}}


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("writes", [(), (1, 3)], ids=["read only", "written"])
def test_gradients_through_them_and_writes_to_them_are_those_of_the_plain_model(plan, devices, grain, writes) -> None:
    roundpipe.use_devices(f"host:{devices}")
    compare(make(writes), recompute_grain=grain, execute_plan=PLANS[plan])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_that_writes_them_does_not_reach_the_recompute(devices: int) -> None:
    roundpipe.use_devices(f"host:{devices}")
    compare(make(), loss_that_writes, execute_plan=PLANS["single"])


def mask_uploads(model: nn.Sequential) -> int:
    """Bytes of activations that went up on one device in an inference without the hidden states."""
    wrapped = RoundPipe(model)
    plan = one_layer_stages(7)
    plan.fwd_plan.append(range(6, 7))
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    engine = engines.current()
    _ops.engine_reset_bytes(engine.handle)
    with torch.no_grad():
        wrapped(torch.randn(ROWS, WIDTH), roundpipe_run_config=config)
    return measured()[0]["up", Traffic.ACTIVATIONS] - 6 * ROWS * WIDTH * FLOAT


def test_what_does_not_fit_its_share_of_the_device_comes_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    once = (MICROBATCHES * WIDTH + ROWS * WIDTH) * FLOAT  # the bias of each microbatch, and the masks
    roundpipe.use_devices("host:1@64KiB")
    assert mask_uploads(make()) == once
    monkeypatch.setattr(passed_on_module, "KEPT_SHARE", 0.0)
    assert mask_uploads(make()) == 6 * once
    compare(make((2,)), execute_plan=PLANS["single"])


def test_a_written_one_comes_up_again() -> None:
    roundpipe.use_devices("host:1")
    bias, masks = MICROBATCHES * WIDTH * FLOAT, ROWS * WIDTH * FLOAT
    # Layers 2 and 4 write the mask: there it becomes another tensor, which later stages get.
    assert mask_uploads(make((1, 3))) == bias + 3 * masks


def test_the_copies_go_with_the_call() -> None:
    roundpipe.use_devices("host:2")
    wrapped = RoundPipe(make())
    config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=PLANS["single"])
    seen = []

    def spying_loss(out, label):
        seen.extend(stored.kept_bytes for call in wrapped._state._calls for stored in call.passed_on)
        return loss_fn(out, label)

    x, label = torch.randn(ROWS, WIDTH), torch.randn(ROWS)
    wrapped.forward_backward((x,), label=label, loss_fn=spying_loss, run_config=config)
    calls = list(wrapped._state._calls)
    wrapped.synchronize()
    assert max(seen) >= ROWS * WIDTH * FLOAT
    assert calls and all(stored.kept_bytes == 0 for call in calls for stored in call.passed_on)
