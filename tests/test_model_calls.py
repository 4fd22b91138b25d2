"""What goes into a call and comes out of it: arguments, labels, losses, hooks, attributes, autocast, checkpoints."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, RoundPipeRunConfig
from roundpipe.errors import StageError

from . import oracle
from .faults import plan_of
from .model_zoo import Residual
from .test_model import mlp

STAGES = plan_of([(0, 1), (1, 2)], [(2, 4), (1, 2), (0, 1)])  # of a model of four layers


@pytest.fixture(autouse=True, params=["host:1", "host:3"])
def some_devices(request: pytest.FixtureRequest) -> None:
    roundpipe.use_devices(request.param)


def four(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), Residual(8), Residual(8), nn.Linear(8, 4))


def config(microbatches: int = 2, **more: Any) -> RoundPipeRunConfig:
    return RoundPipeRunConfig(num_microbatch=microbatches, execute_plan=STAGES, **more)


def both(wrapped: RoundPipe, plain: nn.Sequential, args: Any, seed: int = 3, **more: Any) -> tuple[Any, Any]:
    """The same call on both, with the same random numbers."""
    settings = more.pop("settings", config())
    torch.manual_seed(seed)
    got = wrapped.forward_backward(args, run_config=settings, **more)
    torch.manual_seed(seed)
    want = oracle.forward_backward(
        list(plain), args, more.get("input_kwargs"), more.get("label"), more["loss_fn"], settings.num_microbatch or 1
    )
    return got, want


def square(out: torch.Tensor, _: Any) -> torch.Tensor:
    return out.square().mean()


# -- inputs that require grad ------------------------------------------------------------------------------------------
def test_gradients_of_inputs() -> None:
    wrapped, plain = RoundPipe(four()), four()
    x = torch.randn(8, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for _ in range(2):  # they accumulate, as always
        both(wrapped, plain, (x,), loss_fn=square)
        torch.manual_seed(3)
        oracle.forward_backward(list(copy.deepcopy(plain)), (y,), loss_fn=square, num_microbatch=2)
        x_grad, y_grad = x.grad, y.grad
    assert x_grad is not None and y_grad is not None
    # `x` went through both models, so it holds the sum of two equal gradients.
    oracle.assert_close_to_scale(x_grad, 2 * y_grad, "gradient of the input")


def test_gradients_go_on_into_the_callers_graph() -> None:
    wrapped, plain = RoundPipe(four()), four()
    torch.manual_seed(1)
    embed = nn.Embedding(5, 6)
    other = copy.deepcopy(embed)
    ids = torch.randint(0, 5, (8,))
    torch.manual_seed(3)
    wrapped.forward_backward((embed(ids),), loss_fn=square, run_config=config())
    torch.manual_seed(3)
    leaf = other(ids).detach().requires_grad_()
    oracle.forward_backward(list(plain), (leaf,), loss_fn=square, num_microbatch=2)
    other(ids).backward(leaf.grad)
    oracle.assert_close_to_scale(embed.weight.grad, other.weight.grad, "gradient of the embedding")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


def test_only_inputs_are_trained() -> None:
    wrapped, plain = RoundPipe(four()), four()
    wrapped.requires_grad_(False)
    plain.requires_grad_(False)
    x = torch.randn(8, 6, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    wrapped.forward_backward((x,), loss_fn=square, run_config=config())
    torch.manual_seed(3)
    oracle.forward_backward(list(plain), (y,), loss_fn=square, num_microbatch=2)
    oracle.assert_close_to_scale(x.grad, y.grad, "gradient of the input")
    with pytest.raises(StageError, match="does not depend on any parameter"):
        wrapped.forward_backward((x.detach(),), loss_fn=square, run_config=config())


# -- losses, outputs, labels, trees ------------------------------------------------------------------------------------
def test_several_losses_come_back_as_a_list_of_sums() -> None:
    wrapped, plain = RoundPipe(four()), four()
    x = torch.randn(7, 6)

    def two(out: torch.Tensor, _: Any) -> list[torch.Tensor]:
        return [out.square().mean(), out.abs().mean()]

    torch.manual_seed(3)
    got = wrapped.forward_backward((x,), loss_fn=two, run_config=config())
    torch.manual_seed(3)
    total = oracle.forward_backward(list(plain), (x,), loss_fn=lambda o, y: sum(two(o, y)), num_microbatch=2)
    assert isinstance(got, list) and len(got) == 2 and all(loss.shape == () for loss in got)
    oracle.assert_close_to_scale(got[0] + got[1], total, "sum of the losses")
    assert not any(loss.requires_grad for loss in got)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


@pytest.mark.parametrize("bad", [lambda out, _: out, lambda out, _: 1.0, lambda out, _: out.detach().sum()])
def test_losses_that_cannot_be_used(bad: Any) -> None:
    wrapped = RoundPipe(four())
    with pytest.raises(StageError, match=r"loss_fn returned|does not depend"):
        wrapped.forward_backward((torch.randn(8, 6),), loss_fn=bad, run_config=config())


def test_outputs_are_returned_beside_the_loss() -> None:
    wrapped, plain = RoundPipe(four()), four()
    wrapped.eval()
    plain.eval()
    x = torch.randn(7, 6)
    loss, out = wrapped.forward_backward((x,), loss_fn=square, return_outputs=True, run_config=config())
    want = plain(x).detach()
    oracle.assert_close_to_scale(out, want, "outputs")
    assert loss.shape == () and not out.requires_grad


class Routes(nn.Module):
    """Takes tensors, flags and None by position and keyword; gives a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Any, mask: Any = None, *, scale: float = 1.0, mode: str = "plain", extra: Any = None) -> Any:
        assert mode in ("plain", "masked") and extra in (None, {"a": (1, "b")})
        out = self.linear(x["data"]) * scale
        return {"out": out * mask if mask is not None else out, "ids": x["ids"], "mode": mode}


class Ends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, state: dict[str, Any]) -> Any:
        assert state["ids"].dtype == torch.int64 and isinstance(state["mode"], str)
        return self.linear(state["out"]), state["ids"]


def test_keyword_arguments_label_trees_and_leaves_that_are_no_tensors() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Routes(), Ends())
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    rows = 7
    args = ({"data": torch.randn(rows, 6), "ids": torch.arange(rows)},)
    kwargs = {"mask": torch.rand(rows, 6), "scale": 0.5, "mode": "masked", "extra": {"a": (1, "b")}}
    label = {"target": torch.randn(rows, 4), "weights": [torch.rand(rows), "kept"], "none": None}

    def loss_fn(out: Any, label: Any) -> torch.Tensor:
        value, ids = out
        assert label["none"] is None and label["weights"][1] == "kept" and len(ids) == len(value)
        return ((value - label["target"]).square().mean(1) * label["weights"][0] * (ids + 1)).mean()

    settings = RoundPipeRunConfig(num_microbatch=3)
    got, want = both(wrapped, plain, args, input_kwargs=kwargs, label=label, loss_fn=loss_fn, settings=settings)
    oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


# -- inference ---------------------------------------------------------------------------------------------------------
def test_inference_between_and_after_steps() -> None:
    wrapped, plain = RoundPipe(mlp()), mlp()
    with OptimizerCtx():
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    for is_async in (True, False):
        torch.manual_seed(1)
        wrapped.forward_backward((x,), loss_fn=square, run_config=RoundPipeRunConfig(num_microbatch=2))
        torch.manual_seed(1)
        oracle.forward_backward(list(plain), (x,), loss_fn=square, num_microbatch=2)
        wrapped.step(lambda: (time.sleep(0.1), optimizer.step(), optimizer.zero_grad()), is_async=is_async)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        wrapped.eval()
        plain.eval()
        with torch.no_grad():
            wrapped(x)  # may use older weights
            wrapped.synchronize()
            oracle.assert_close_to_scale(wrapped(x), plain(x), "output")
        wrapped.train()
        plain.train()
    with torch.inference_mode():
        oracle.assert_close_to_scale(wrapped.eval()(x).clone(), plain.eval()(x).clone(), "output in inference mode")


def test_inference_leaves_the_gradients_that_are_shown() -> None:
    wrapped, plain = RoundPipe(four()), four()
    x = torch.randn(8, 6)

    def shown() -> list[torch.Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in wrapped.model.parameters()]

    both(wrapped, plain, (x,), loss_fn=square)
    wrapped.synchronize()
    before = shown()
    with torch.no_grad():
        wrapped(x)
    with torch.inference_mode():
        wrapped(x)
    wrapped(x, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False))
    oracle.assert_same_gradients(wrapped.model, plain)
    assert all(torch.equal(a, b) for a, b in zip(shown(), before, strict=True))
    for model in (wrapped.model, plain):  # what is done with them there counts
        model[0].weight.grad.mul_(3)
        model[1].zero_grad()
        model[2].requires_grad_(False)
    with torch.no_grad():
        wrapped(x)
    both(wrapped, plain, (x,), loss_fn=square)
    with torch.no_grad():
        wrapped(x)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


def test_a_label_that_requires_grad_is_not_silent() -> None:
    teacher, wrapped, plain = RoundPipe(four(1), name="teacher"), RoundPipe(four(), name="student"), four()
    x = torch.randn(8, 6)

    def distance(out: torch.Tensor, label: Any) -> torch.Tensor:
        return (out - label["wanted"]).square().mean()

    packed = RoundPipeRunConfig(num_microbatch=2, merge_output=False)
    for label in (teacher(x), torch.randn(8, 4, requires_grad=True), teacher(x, roundpipe_run_config=packed)):
        with pytest.warns(UserWarning, match="label\\['wanted'\\] requires grad") as said:
            wrapped.forward_backward((x,), label={"wanted": label}, loss_fn=distance, run_config=config())
        assert said[0].filename == __file__
    wrapped.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(wrapped, plain, (x,), label={"wanted": teacher(x).detach()}, loss_fn=distance)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)
