"""on_oom="adapt": what comes out is what the settings that it ends with give when they are asked for at once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig
from roundpipe.errors import ConfigError, DeviceOutOfMemory

from . import memory_models as zoo
from . import oracle


class Difficult(nn.Module):
    """Draws, counts its calls, and keeps running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 4 * width),
            nn.BatchNorm1d(4 * width),
            nn.Linear(4 * width, width),
        )
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(nn.functional.dropout(torch.relu(self.norm(self.up(x))), 0.1))
        if roundpipe.doing_recompute():
            (mask,) = roundpipe.get_recompute_data()
        else:
            self.calls += 1
            mask = torch.rand_like(x) > 0.2
            roundpipe.save_for_recompute(mask)
        return x * mask + y


def _model() -> RoundPipe:
    torch.manual_seed(0)
    return RoundPipe(nn.Sequential(nn.Linear(32, 32), *(Difficult(32) for _ in range(5)), nn.Linear(32, 32)))


def _loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (nn.functional.dropout(output, 0.1) - label).square().sum()


def _train(
    model: RoundPipe, config: RoundPipeRunConfig, calls: int
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
    """Losses, state and gradients, the generator afterwards, the gradient of the input."""
    torch.manual_seed(7)
    x = torch.randn(512, 32, requires_grad=True)
    label = torch.randn(512, 32)
    losses = [model.forward_backward((x,), label=label, loss_fn=_loss, run_config=config) for _ in range(calls)]
    state = torch.get_rng_state()
    model.synchronize()
    found = {name: value.clone() for name, value in model.model.state_dict().items()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    found |= {f"{i}.calls": torch.tensor(getattr(layer, "calls", 0)) for i, layer in enumerate(model.layers)}
    return losses, found, state, x.grad


def _settings(model: RoundPipe) -> RoundPipeRunConfig:
    """Those that the model's one kind of call has come to."""
    ((_, chosen),) = model._state.adapted.items()
    return RoundPipeRunConfig(
        num_microbatch=chosen.num_microbatch,
        recompute_grain=chosen.recompute_grain,
        execute_plan=chosen.execute_plan,
    )


def _assert_same(got: object, want: object) -> None:
    if isinstance(got, torch.Tensor):
        assert isinstance(want, torch.Tensor) and torch.equal(got, want)
    elif isinstance(got, dict):
        assert isinstance(want, dict) and got.keys() == want.keys()
        for key, value in got.items():
            assert torch.equal(value, want[key]), key
    else:
        for one, other in zip(got, want, strict=True):  # type: ignore[call-overload]
            _assert_same(one, other)


@pytest.mark.parametrize(("devices", "calls", "plan"), [(1, 2, None), (2, 2, 2), (3, 1, 7), (4, 3, 1)])
def test_the_result_is_that_of_the_settings_it_ends_with_bit_for_bit(
    devices: int, calls: int, plan: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    roundpipe.use_devices(f"host:{devices}@1.1MiB")
    given = None if plan is None else zoo.stages_of(plan, 7)
    asked = RoundPipeRunConfig(num_microbatch=1, execute_plan=given, on_oom="adapt")
    model = _model()
    with caplog.at_level(logging.WARNING, logger="roundpipe"):
        got = _train(model, asked, calls)
    said = [record.message for record in caplog.records if "made again" in record.message]
    assert said and all("RoundPipeRunConfig(" in message for message in said)
    ((_, chosen),) = model._state.adapted.items()
    assert (chosen.num_microbatch, chosen.recompute_grain) != (1, "stage") or chosen.execute_plan is not given
    caplog.clear()
    model.zero_grad()
    _train(model, asked, 1)  # the change is kept, and said once
    assert not [record for record in caplog.records if "made again" in record.message]

    settings = _settings(model)
    roundpipe.use_devices(f"host:{devices}")
    want = _train(_model(), settings, calls)
    _assert_same(got, want)


def test_earlier_calls_of_the_window_stay_and_a_step_follows() -> None:
    """The first call is small enough as it is, the second one is not."""

    def run(devices: str, config: RoundPipeRunConfig) -> tuple[RoundPipe, dict[str, torch.Tensor]]:
        roundpipe.use_devices(devices)
        model = _model()
        optimizer = roundpipe.optim.AdamW(model, lr=1e-2)
        torch.manual_seed(1)
        for rows, settings in ((32, RoundPipeRunConfig(num_microbatch=2)), (512, config)):
            x = torch.randn(rows, 32)
            model.forward_backward((x,), label=x, loss_fn=_loss, run_config=settings)
        model.step(optimizer, is_async=False)
        model.synchronize()
        return model, {name: value.clone() for name, value in model.model.state_dict().items()}

    model, got = run("host:1@1.1MiB", RoundPipeRunConfig(num_microbatch=1, on_oom="adapt"))
    _, want = run("host:1", _settings(model))
    _assert_same(got, want)


def _bursts(model: RoundPipe, want_bytes: int) -> Callable[[], None]:
    """Every forward of layer 1 wants so much, however small its input is."""

    def burst(*_: object) -> None:
        torch.empty(want_bytes, dtype=torch.uint8)

    return model.layers[1].register_forward_pre_hook(burst).remove


def test_attributes_that_the_failed_attempt_assigned_are_taken_back() -> None:
    """Layer 5 has too little memory for a whole batch, when the layers below have run already."""
    roundpipe.use_devices("host:1@4MiB")
    model = _model()

    def burst(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if len(inputs[0]) > 32:
            torch.empty(8 << 20, dtype=torch.uint8)

    handle = model.layers[5].register_forward_pre_hook(burst)
    x = torch.randn(64, 32)
    model.forward_backward(
        (x,), label=x, loss_fn=_loss, run_config=RoundPipeRunConfig(num_microbatch=1, on_oom="adapt")
    )
    model.synchronize()
    handle.remove()
    assert _settings(model).num_microbatch == 2
    assert [layer.calls for layer in model.layers[1:6]] == [2] * 5


def test_when_nothing_is_left_it_raises_and_everything_is_as_before() -> None:
    roundpipe.use_devices("host:1@1.1MiB")
    config = RoundPipeRunConfig(num_microbatch=1, on_oom="adapt")
    model = _model()
    x = torch.randn(32, 32)
    model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    model.synchronize()
    before = {name: value.clone() for name, value in model.model.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    stop = _bursts(model, 4 << 20)
    with pytest.raises(DeviceOutOfMemory, match="CUDA out of memory"):
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    stop()
    assert not model._state.adapted
    model.synchronize()
    _assert_same(dict(model.model.state_dict()), before)
    _assert_same({name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}, grads)
    gc.collect()
    model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    model.synchronize()


def test_inference_and_forward_with_autograd_adapt_too() -> None:
    roundpipe.use_devices("host:1@1.1MiB")
    model = _model().eval()
    x = torch.randn(1024, 32)
    asked = RoundPipeRunConfig(num_microbatch=1, on_oom="adapt")
    plain = RoundPipeRunConfig(num_microbatch=1)
    with torch.no_grad(), pytest.raises(DeviceOutOfMemory, match="num_microbatch"):
        model(x, roundpipe_run_config=plain)
    torch.manual_seed(2)
    with torch.no_grad():
        got = model(x, roundpipe_run_config=asked)
    model.train()
    torch.manual_seed(2)
    out = model(x, roundpipe_run_config=asked)
    state = torch.get_rng_state()
    out.square().sum().backward()
    model.synchronize()
    grads = {name: p.grad.clone() for name, p in model.model.named_parameters() if p.grad is not None}
    kept = {key[0]: settings for key, settings in model._state.adapted.items()}
    assert kept.keys() == {"infer", "train"}
    roundpipe.use_devices("host:1")
    other = _model().eval()
    counts = {
        kind: RoundPipeRunConfig(num_microbatch=s.num_microbatch, recompute_grain=s.recompute_grain)
        for kind, s in kept.items()
    }
    torch.manual_seed(2)
    with torch.no_grad():
        assert torch.equal(got, other(x, roundpipe_run_config=counts["infer"]))
    other.train()
    torch.manual_seed(2)
    again = other(x, roundpipe_run_config=counts["train"])
    assert torch.equal(out, again) and torch.equal(state, torch.get_rng_state())
    again.square().sum().backward()
    other.synchronize()
    _assert_same(grads, {name: p.grad for name, p in other.model.named_parameters() if p.grad is not None})


class TwoParts(nn.Module):
    """A forward of its own around two chains; the second one's activations are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))
        self.second = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y) + y


def test_a_part_of_a_model_with_its_own_forward_adapts_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="roundpipe")
    torch.manual_seed(0)
    plain = TwoParts()
    roundpipe.use_devices("host:1@1.1MiB")
    model = roundpipe.wrap_model_to_roundpipe(
        oracle.twin(plain),
        use_sequential_preset=False,
        lower_threshold=1024,
        model_run_config=RoundPipeRunConfig(num_microbatch=1, on_oom="adapt"),
    )
    x = torch.randn(512, 32)
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    model.synchronize()
    said = [record.message for record in caplog.records if "made again" in record.message]
    assert len(said) == 1  # of the second part, in the first of the two iterations
    named = dict(plain.named_parameters())
    for name, parameter in model.model.named_parameters():
        oracle.assert_close_to_scale(parameter.grad, named[name].grad, name, 1e-5)


def test_a_failure_of_an_earlier_call_is_not_this_ones_to_repair() -> None:
    roundpipe.use_devices("host:1@1.1MiB")
    model = _model()
    x = torch.randn(512, 32)
    small = x[:32]
    with pytest.raises(DeviceOutOfMemory):
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=RoundPipeRunConfig(num_microbatch=1))
        model.forward_backward((small,), label=small, loss_fn=_loss, run_config=RoundPipeRunConfig(on_oom="adapt"))
    assert not model._state.adapted
    model.forward_backward((small,), label=small, loss_fn=_loss, run_config=RoundPipeRunConfig(on_oom="adapt"))
    model.synchronize()


def test_it_is_refused_with_an_announced_step() -> None:
    roundpipe.use_devices("host:1")
    model = _model()
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    x = torch.randn(8, 32)
    config = RoundPipeRunConfig(on_oom="adapt")
    with pytest.raises(ConfigError, match=r"step=.*rolled back"):
        model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config, step=optimizer)
    model.forward_backward((x,), label=x, loss_fn=_loss, run_config=config)
    model.step(optimizer)
    model.synchronize()
