"""Packed outputs from one model to the next: nobody copies them, nobody waits for them, gradients flow through."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.batch import RoundPipePackedData
from roundpipe.errors import RoundPipeError, SplitError

from . import oracle

PACKED = RoundPipeRunConfig(num_microbatch=3, merge_output=False)


class Pair(nn.Module):
    """A dictionary with a tensor at two leaves, an integer tensor and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = torch.tanh(self.linear(x))
        return {"y": y, "again": (y, "tag"), "row": torch.arange(x.shape[0], device=x.device)}


class FromPair(nn.Module):
    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        y, (again, tag) = given["y"], given["again"]
        assert again is y and tag == "tag"
        return y * again + given["row"][:, None]


def first() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), Pair())


def second() -> nn.Sequential:
    return nn.Sequential(FromPair(), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Identity())


def third() -> nn.Sequential:
    return nn.Sequential(nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that are called, in order."""
    names: list[str] = []
    call = _ops._call

    def noting(name: str, *args: Any) -> Any:
        names.append(name)
        return call(name, *args)

    monkeypatch.setattr(_ops, "_call", noting)
    return names


def chain(devices: int) -> tuple[list[RoundPipe], nn.ModuleList]:
    roundpipe.use_devices(f"host:{devices}")
    torch.manual_seed(0)
    models = [first(), second(), third()]
    plain = copy.deepcopy(nn.ModuleList(models))
    return [RoundPipe(model) for model in models], plain


def plain_chain(plain: nn.ModuleList, x: torch.Tensor, pieces: int = 3) -> torch.Tensor:
    return torch.cat([plain[2](plain[1](plain[0](piece))) for piece in x.tensor_split(pieces)])


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_three_models_in_a_chain(devices: int, grain: str) -> None:
    (one, two, three), plain = chain(devices)
    _ops.engine_inject(engines.current().handle, "delay", devices, 300)
    config = RoundPipeRunConfig(num_microbatch=3, merge_output=False, recompute_grain=grain)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(7, 4, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        middle = two(one(x, roundpipe_run_config=config), roundpipe_run_config=config)
        out = three(middle)
        want = plain_chain(plain, other)
        oracle.assert_close_to_scale(out.detach(), want.detach(), "output")
        out.square().sum().backward()
        want.square().sum().backward()
        oracle.assert_close_to_scale(x.grad, other.grad, "input gradient")
    _ops.engine_inject(engines.current().handle, "delay", 0, 0)
    for wrapped, one_plain in zip((one, two, three), plain, strict=True):
        wrapped.synchronize()
        oracle.assert_same_gradients(wrapped.model, one_plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_neither_a_copy_nor_a_wait(called: list[str], mode: Any) -> None:
    (one, two, _), plain = chain(2)
    x = torch.randn(6, 4)
    with mode():
        one(x)  # buffers and facts about the layers are there afterwards
        called.clear()
        packed = one(x, roundpipe_run_config=PACKED)
        assert called.count("stash_host") == 3, "the pieces of x"
        called.clear()
        out = two(packed, roundpipe_run_config=PACKED)
        assert called.count("stash_host") == 0, "packed inputs are taken from where they are"
        waits = {"record_wait", "record_host"} & set(called)
        # The last layer hands its input on, which recompute needs: only then there is a copy for the caller.
        assert not waits or (mode is torch.enable_grad and called.count("record_host") <= 3)
    out.synchronize()
    want = torch.cat([plain[1](plain[0](piece)) for piece in x.tensor_split(3)])
    oracle.assert_close_to_scale(torch.cat(list(out)).detach(), want.detach(), "output")


def test_the_gradient_between_two_models_is_not_copied(called: list[str]) -> None:
    (one, two, _), _ = chain(2)
    packed = one(torch.randn(6, 4), roundpipe_run_config=PACKED)
    out = two(packed)
    called.clear()
    out.sum().backward()
    assert called.count("stash_host") == 3, "the gradients of the merged output alone, not those between the models"


def test_events_and_values() -> None:
    (one, _, _), plain = chain(2)
    x = torch.randn(7, 4)
    with torch.no_grad():
        packed = one(x, roundpipe_run_config=PACKED)
    assert list(packed) == ["y", "again", "row"] and packed["again"][1] == ["tag"] * 3
    leaf = packed["y"]
    assert isinstance(leaf, RoundPipePackedData) and [len(piece) for piece in leaf] == [3, 2, 2]
    for event in leaf.transfer_event:
        event.wait()
        assert event.query()
    leaf.synchronize()
    oracle.assert_close_to_scale(torch.cat(list(leaf)), plain[0](x)["y"].detach(), "value")
    twin = copy.deepcopy(packed)
    assert twin["y"] is not leaf and torch.equal(twin["y"][0], leaf[0])


def test_what_the_caller_changed_is_what_the_next_model_sees() -> None:
    """Also where the next model would have read the engine's own memory, or where recompute still will."""
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    head, tail = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Identity()), nn.Sequential(nn.Linear(8, 2))
    plain_head, plain_tail = copy.deepcopy(head), copy.deepcopy(tail)
    one, two = RoundPipe(head), RoundPipe(tail)
    x = torch.randn(6, 4)
    packed = one(x, roundpipe_run_config=PACKED)
    packed.synchronize()
    packed[1].mul_(2.0)
    two(packed).square().sum().backward()
    pieces = [plain_head(piece) for piece in x.tensor_split(3)]
    pieces[1] = pieces[1] * 2.0
    torch.cat([plain_tail(piece) for piece in pieces]).square().sum().backward()
    for wrapped, plain in ((one, plain_head), (two, plain_tail)):
        wrapped.synchronize()
        oracle.assert_same_gradients(wrapped.model, plain)


def test_the_shortest_sets_the_number_and_the_rest_gets_no_gradient() -> None:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    plain = copy.deepcopy(model)
    one = RoundPipe(model)
    both = RoundPipe(Sum())
    x = torch.randn(6, 4)
    three = one(x, roundpipe_run_config=PACKED)
    two = one(x[:4], roundpipe_run_config=RoundPipeRunConfig(num_microbatch=2, merge_output=False))
    with pytest.warns(UserWarning, match="different numbers of microbatches"):
        out = both(three, two)
    oracle.assert_close_to_scale(out.detach(), 2 * plain(x[:4]).detach(), "output")
    out.sum().backward()
    (2 * plain(x[:4])).sum().backward()
    one.synchronize()
    oracle.assert_same_gradients(model, plain)


class Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def test_packed_inputs_and_labels_of_forward_backward() -> None:
    """The head trains by forward_backward; input gradients go on through the trunk; the label comes packed too."""
    roundpipe.use_devices("host:3")
    torch.manual_seed(0)
    trunk, head, teacher = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(4, 2)
    plain_trunk, plain_head = copy.deepcopy(trunk), copy.deepcopy(head)
    one, two, other = RoundPipe(trunk), RoundPipe(head), RoundPipe(teacher)
    x = torch.randn(7, 4)
    with torch.no_grad():
        label = other(x, roundpipe_run_config=PACKED)
    loss, outputs = two.forward_backward(
        (one(x, roundpipe_run_config=PACKED),),
        label=label,
        loss_fn=lambda out, want: (out - want).square().sum(),
        return_outputs=True,
        run_config=PACKED,
    )
    want = plain_head(plain_trunk(x))
    plain_loss = (want - teacher(x).detach()).square().sum()
    plain_loss.backward()
    outputs.synchronize()
    oracle.assert_close_to_scale(loss, plain_loss.detach(), "loss")
    oracle.assert_close_to_scale(torch.cat(list(outputs)), want.detach(), "outputs")
    for wrapped, plain in ((one, plain_trunk), (two, plain_head)):
        wrapped.synchronize()
        oracle.assert_same_gradients(wrapped.model, plain)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_label_packed_differently_than_the_inputs_is_refused(pieces: int) -> None:
    roundpipe.use_devices("host:2")
    model = RoundPipe(nn.Linear(4, 4))
    label = RoundPipePackedData([torch.randn(2, 4)] * 3)
    with pytest.raises(SplitError, match=f"packed in 3 microbatches, the inputs in {pieces}"):
        model.forward_backward(
            (torch.randn(4, 4),),
            label=label,
            loss_fn=lambda out, want: (out - want).sum(),
            run_config=RoundPipeRunConfig(num_microbatch=pieces),
        )


class Late:
    """An event that brings the values, as a user's own transfer would."""

    def __init__(self, target: torch.Tensor, value: torch.Tensor) -> None:
        self.target, self.value = target, value

    def synchronize(self) -> None:
        self.target.copy_(self.value)


def test_packed_data_made_by_hand_waits_for_its_events() -> None:
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    wrapped = RoundPipe(model)
    x = torch.randn(6, 4)
    values = [torch.zeros(2, 4) for _ in range(3)]
    events = [Late(value, piece) for value, piece in zip(values, x.tensor_split(3), strict=True)]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        oracle.assert_close_to_scale(wrapped(RoundPipePackedData(values, events)), model(x), "output")


def test_other_devices_between_two_models() -> None:
    """The engine that held the values is gone, the values are not."""
    (one, two, three), plain = chain(2)
    x = torch.randn(6, 4)
    with torch.no_grad():
        middle = two(one(x, roundpipe_run_config=PACKED), roundpipe_run_config=PACKED)
        roundpipe.use_devices("host:3")
        oracle.assert_close_to_scale(three(middle), plain_chain(plain, x), "output")


def test_a_copy_that_fails_is_told_by_its_event_and_by_the_next_model() -> None:
    roundpipe.use_devices("host:1")
    torch.manual_seed(0)
    one, two = RoundPipe(nn.Linear(4, 4)), RoundPipe(nn.Linear(4, 4))
    x = torch.randn(4, 4)
    handle = engines.current().handle
    failed = 0
    with torch.no_grad():
        for n in range(8):
            _ops.engine_inject(handle, "fail_copy", n, 0)
            try:
                packed = one(x, roundpipe_run_config=PACKED)
            except RoundPipeError:
                continue
            finally:
                engines.current().wait_idle()
                _ops.engine_inject(handle, "fail_copy", -1, 0)
            try:
                packed.synchronize()
            except RoundPipeError:
                failed += 1
                with pytest.raises(RoundPipeError):
                    two(packed)
        assert failed, "no copy of an output was hit"
        oracle.assert_close_to_scale(two(one(x, roundpipe_run_config=PACKED)), two.model(one.model(x)), "output")
