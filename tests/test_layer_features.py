"""What layers may do and have: hooks, attributes, autocast, data kept for recompute, checkpoints, random numbers."""

from __future__ import annotations

import copy
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import StageError
from roundpipe.replica import LayerReplica

from . import oracle
from .faults import Trapped, five_layer_plan, trapped_model
from .model_zoo import Residual
from .plans import one_layer_stages, random_fused_plan
from .test_model_calls import both, config, four, square


@pytest.fixture(autouse=True, params=["host:1", "host:3"])
def some_devices(request: pytest.FixtureRequest) -> None:
    roundpipe.use_devices(request.param)


# -- hooks and attributes ----------------------------------------------------------------------------------------------
def test_hooks_on_layers_submodules_and_tensors() -> None:
    def install(model: nn.Sequential) -> dict[str, list[Any]]:
        seen: dict[str, list[Any]] = {"pre": [], "post": [], "grads": []}

        def pre(module: nn.Module, args: Any) -> Any:
            assert module.training
            seen["pre"].append(args[0].shape)
            return (args[0] * 2.0,)

        def post(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            seen["post"].append(type(module).__name__)
            if out.requires_grad:
                out.register_hook(lambda grad: (seen["grads"].append(float(grad.sum())), grad * 3.0)[1])
            return out + 1.0

        model[1].register_forward_pre_hook(pre)
        model[1].up.register_forward_hook(post)
        return seen

    wrapped, plain = RoundPipe(four()), four()
    got_seen, want_seen = install(wrapped.model), install(plain)
    got, want = both(wrapped, plain, (torch.randn(8, 6),), loss_fn=square)
    oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)
    # Layer 1 is recomputed, so forward hooks run twice, and those of its backward once.
    assert len(got_seen["pre"]) == 2 * len(want_seen["pre"]) and got_seen["post"] == ["Linear"] * 4
    assert torch.tensor(got_seen["grads"]).allclose(torch.tensor(want_seen["grads"]))
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        for module in wrapped.model.modules():
            getattr(module, name).clear()
    for module in plain.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    got, want = both(wrapped, plain, (torch.randn(8, 6),), loss_fn=square)
    oracle.assert_close_to_scale(got, want, "loss without hooks")
    assert len(got_seen["post"]) == 4


def test_hooks_on_the_wrapper() -> None:
    wrapped, plain = RoundPipe(four()), four()
    seen = []
    wrapped.register_forward_hook(lambda module, args, out: seen.append(module) or out * 2.0)
    wrapped.eval()
    plain.eval()
    x = torch.randn(8, 6)
    with torch.no_grad():
        oracle.assert_close_to_scale(wrapped(x), 2.0 * plain(x), "output")
    assert seen == [wrapped]


class Counts(nn.Module):
    """Assigns in its forward what one may look at afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0
        self.runs = 0
        self.history: list[int] = []
        self.stale = "to be deleted"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        self.runs += 1
        if not roundpipe.doing_recompute():
            self.calls += 1
            self.history.append(len(x))
            self.last = out.detach()
            if hasattr(self, "stale"):
                del self.stale
            self.inner_module = self.linear
        return out


def test_attributes_assigned_in_a_forward_are_seen_on_the_host_module() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Counts(), nn.Tanh(), nn.Linear(8, 4))
    wrapped = RoundPipe(model)
    x = torch.randn(7, 6)
    wrapped.forward_backward((x,), loss_fn=square, run_config=config(3))
    wrapped.synchronize()
    layer = model[1]
    assert layer.calls == 3 and layer.history == [3, 2, 2] and not hasattr(layer, "stale")
    oracle.assert_close_to_scale(layer.last.cpu(), layer.linear(model[0](x[5:])).detach(), "kept activation")
    layer.calls = 10
    wrapped.forward_backward((x,), loss_fn=square, run_config=config(3))
    wrapped.synchronize()
    assert layer.calls == 13 and layer.runs == 12  # with those of recompute


class KeepsWeights(nn.Module):
    """Computes with its weights through plain attributes, as nn.LSTM does with its `_flat_weights`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.full((6,), 1.5))
        self.in_list = [self.inner.weight, "text"]
        self.in_tuple = (self.gain, 3)
        self.in_dict = {"bias": self.inner.bias}
        self.__dict__["alias"] = self.gain
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.in_list[0], self.in_tuple[0], self.in_dict["bias"], self.alias]
        self.seen += [weight.data_ptr() for weight in weights]
        self.assigned = [self.gain, self.inner]
        return nn.functional.linear(x, weights[0], weights[2]) * weights[1] + weights[3]


def test_weights_in_plain_attributes_are_those_of_the_device() -> None:
    torch.manual_seed(0)
    model, plain = (nn.Sequential(KeepsWeights(), nn.Tanh(), KeepsWeights(), nn.Tanh()) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    wrapped = RoundPipe(model)
    got, want = both(wrapped, plain, (torch.randn(8, 6),), loss_fn=square)
    oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(model, plain)
    host = {p.data_ptr() for p in model.parameters()}
    for layer in (model[0], model[2]):
        assert layer.seen and not host & set(layer.seen)
        assert layer.in_list[0] is layer.inner.weight and layer.alias is layer.gain
        assert layer.assigned[0] is layer.gain and layer.assigned[1] is layer.inner


def test_recurrent_layers_compute_with_the_weights_of_the_device() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 4, num_layers=2, bidirectional=True))
    model[1].register_forward_hook(lambda module, *_: seen.extend(w.data_ptr() for w in module._flat_weights))
    wrapped = RoundPipe(model)
    wrapped.forward_backward((torch.randn(8, 6),), loss_fn=lambda out, _: out[0].square().sum())
    wrapped.synchronize()
    host = list(model[1].parameters())
    assert seen and not {p.data_ptr() for p in host} & set(seen)
    assert all(mine is weight for mine, weight in zip(model[1]._flat_weights, host, strict=True))


def test_no_assignment_is_lost_where_the_last_forward_meets_the_first_recompute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The note of the attributes that recompute sees takes long; other devices recompute early microbatches then."""

    def late(self: LayerReplica) -> Any:
        found = note(self)
        time.sleep(0.25 if isinstance(self.layer, Counts) else 0)
        return found

    note = LayerReplica.attributes
    monkeypatch.setattr(LayerReplica, "attributes", late)
    model = nn.Sequential(nn.Linear(6, 8), Counts(), nn.Linear(8, 4))
    wrapped = RoundPipe(model)
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(0, 2)], [range(2, 3), range(0, 2)]
    settings = RoundPipeRunConfig(num_microbatch=6, execute_plan=plan)

    def slow(out: torch.Tensor, label: Any) -> torch.Tensor:
        time.sleep(0.1)  # some recomputes come while the note is taken, some after it
        return square(out, label)

    wrapped.forward_backward((torch.randn(12, 6),), loss_fn=slow, run_config=settings)
    wrapped.synchronize()
    assert model[1].calls == 6 and model[1].runs == 12


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_what_the_caller_changes_after_the_return_is_for_his_next_call(grain: str) -> None:
    """Modes, attributes and requires_grad, while the recompute of the call still sleeps."""

    class Scales(Trapped):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

        def __deepcopy__(self, memo: Any) -> Any:
            twin = Scales(6, 0.0)
            twin.load_state_dict(self.state_dict())
            return twin

    torch.manual_seed(0)
    model = nn.Sequential(*(Scales(6, 0.0) for _ in range(5)))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    for layer in (*model, *plain):
        layer.scale = 2.0
    x = torch.randn(12, 6)
    settings = RoundPipeRunConfig(num_microbatch=3, execute_plan=five_layer_plan(), recompute_grain=grain)
    model[1].trap.arm("recompute", 2, sleep_s=0.4)
    got, want = both(wrapped, plain, (x,), loss_fn=square, settings=settings)
    wrapped.eval()
    for layer in model:
        layer.scale = 5.0
    model[0].linear.weight.requires_grad_(False)
    model[0].linear.weight.requires_grad_(True)
    model[1].linear.weight.requires_grad_(False)
    wrapped.synchronize()
    oracle.assert_close_to_scale(got, want, "loss")
    oracle.assert_same_gradients(wrapped.model, plain)
    plain.eval()
    for layer in plain:
        layer.scale = 5.0
    plain[1].linear.weight.requires_grad_(False)
    both(wrapped, plain, (x,), loss_fn=square, settings=settings)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


# -- autocast, recompute helpers, checkpoint ---------------------------------------------------------------------------
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_autocast_is_that_of_the_caller(grain: str) -> None:
    wrapped, plain = RoundPipe(four()), four()
    x, label = torch.randn(8, 6), torch.randn(8, 4)
    dtypes = []
    wrapped.model[2].register_forward_hook(lambda m, a, out: dtypes.append(m.up(a[0]).dtype))

    def loss_fn(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu") and out.dtype == torch.bfloat16
        return F.mse_loss(out.float(), label)

    with torch.autocast("cpu", torch.bfloat16):
        got, want = both(wrapped, plain, (x,), label=label, loss_fn=loss_fn, settings=config(recompute_grain=grain))
    wrapped.synchronize()
    assert set(dtypes) == {torch.bfloat16}
    oracle.assert_close_to_scale(got, want, "loss")
    oracle.assert_same_gradients(wrapped.model, plain)
    with torch.no_grad():
        assert wrapped(x).dtype == torch.float32


class Chooses(nn.Module):
    """Draws a mask once, in the forward, outside of what recompute could draw again."""

    source = torch.Generator()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if roundpipe.doing_recompute():
            mask, tag, nothing = roundpipe.get_recompute_data()
            assert tag == "tag" and nothing is None
        else:
            mask = torch.rand(x.shape, generator=self.source) > 0.5
            roundpipe.save_for_recompute(mask, "tag", None)
        return self.linear(x) * mask


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_data_saved_for_recompute(grain: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Chooses(), nn.Tanh(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    x = torch.randn(9, 6)
    Chooses.source.manual_seed(1)
    torch.manual_seed(3)
    wrapped.forward_backward((x,), loss_fn=square, run_config=config(3, recompute_grain=grain))
    wrapped.synchronize()
    Chooses.source.manual_seed(1)
    torch.manual_seed(3)
    oracle.forward_backward(list(plain), (x,), loss_fn=square, num_microbatch=3)
    oracle.assert_same_gradients(wrapped.model, plain)


def test_misuse_of_data_saved_for_recompute() -> None:
    assert not roundpipe.doing_recompute()
    roundpipe.save_for_recompute(1)  # outside a layer: nothing
    with pytest.raises(AssertionError, match="outside a recompute"):
        roundpipe.get_recompute_data()

    class Bad(nn.Module):
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.act = act

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not roundpipe.doing_recompute():
                self.act(x)
            else:
                roundpipe.get_recompute_data()
            return x

    def twice(x: torch.Tensor) -> None:
        roundpipe.save_for_recompute(1)
        roundpipe.save_for_recompute(2)

    for act, kind, says in (
        (twice, RuntimeError, "twice"),
        (lambda x: roundpipe.save_for_recompute(x), ValueError, "requires grad"),
        (lambda x: None, AssertionError, "called no save_for_recompute"),
    ):
        wrapped = RoundPipe(nn.Sequential(nn.Linear(6, 8), Bad(act), nn.Tanh(), nn.Linear(8, 4)))
        with pytest.raises(StageError, match=says) as caught:
            wrapped.forward_backward((torch.randn(8, 6),), loss_fn=square, run_config=config())
            wrapped.synchronize()
        assert isinstance(caught.value.__cause__, kind)


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = Residual(8)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_checkpoint_inside_a_layer(grain: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Checkpointed(False), Checkpointed(False), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    for seed in (1, 2):
        got, want = both(
            wrapped, plain, (torch.randn(9, 6),), seed, loss_fn=square, settings=config(3, recompute_grain=grain)
        )
        oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_a_reentrant_checkpoint_is_right_or_refused(grain: str) -> None:
    """Its parameters get gradients from a backward inside the backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Checkpointed(True), Checkpointed(True), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    try:
        both(wrapped, plain, (torch.randn(9, 6),), loss_fn=square, settings=config(3, recompute_grain=grain))
        wrapped.synchronize()
    except StageError as error:
        refusal = str(error)
        assert "use_reentrant=False" in refusal
        return
    oracle.assert_same_gradients(wrapped.model, plain)


def test_grad_mode_inside_layers_is_the_layers_own() -> None:
    class Peeks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch.is_grad_enabled()
            with torch.no_grad():
                norm = self.linear(x).norm()
            return self.linear(x) / norm

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Peeks(), Peeks(), nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    got, want = both(wrapped, plain, (torch.randn(8, 6),), loss_fn=square)
    oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


def test_a_model_is_called_from_another_thread_with_its_own_modes() -> None:
    """no_grad and autocast of the calling thread count, not those of the thread that made the model."""
    wrapped, plain = RoundPipe(four().eval()), four().eval()
    x = torch.randn(8, 6)
    results: list[torch.Tensor] = []

    def infer() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            results.append(wrapped(x))

    thread = threading.Thread(target=infer)
    thread.start()
    thread.join()
    with torch.no_grad():
        assert results[0].dtype == torch.bfloat16
        oracle.assert_close_to_scale(wrapped(x), plain(x), "output")


def test_random_layers_in_training_after_inference() -> None:
    """A layer that drew nothing in eval mode draws the same numbers in forward and recompute of training."""
    wrapped, plain = RoundPipe(trapped_model(4, dropout=0.5)), trapped_model(4, dropout=0.5)
    x = torch.randn(9, 6)
    with torch.no_grad():
        wrapped.eval()(x)
    wrapped.train()
    got, want = both(wrapped, plain, (x,), loss_fn=square, settings=config(3))
    oracle.assert_close_to_scale(got, want, "loss")
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, plain)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.scale


def test_host_memory_of_buffers_does_not_grow_with_the_devices_that_have_seen_them() -> None:
    """One stage a call: the next device's turn every time, and the host's value is another one in every call."""
    wrapped = RoundPipe(nn.Sequential(Scaled()))

    def live_after_a_call() -> int:
        wrapped.model[0].scale.add_(1.0)
        settings = RoundPipeRunConfig(num_microbatch=1)
        loss = wrapped.forward_backward((torch.ones(2, 4),), loss_fn=square, run_config=settings)
        assert loss == square(torch.ones(2, 4) * wrapped.model[0].scale, None)
        wrapped.synchronize()
        engine = engines.current()
        engine.wait_idle()
        return _ops.engine_live(engine.handle)[0]

    first = live_after_a_call()
    assert [live_after_a_call() for _ in range(6)] == [first] * 6


class UsesTorchFunc(nn.Module):
    """Takes a gradient by torch.func inside its forward, after a buffer was written and random numbers were drawn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(self.linear(x)) * torch.rand(x.shape[-1])
        return x + torch.func.grad(lambda y: y.tanh().square().sum())(x)


@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_torch_func_inside_a_layer(grain: str, seed: int) -> None:
    """torch.func refuses hooks of saved tensors, by which forwards keep nothing and are measured."""
    torch.manual_seed(0)
    model = nn.Sequential(UsesTorchFunc(8), nn.Linear(8, 8), UsesTorchFunc(8), UsesTorchFunc(8))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)

    def loss_fn(out: torch.Tensor, label: object) -> torch.Tensor:
        return torch.func.grad(lambda y: y.pow(3).sum())(out).mean()

    for _ in range(2):
        args = (torch.randn(6, 8),)
        state = torch.get_rng_state()
        config = RoundPipeRunConfig(
            num_microbatch=2, recompute_grain=grain, execute_plan=random_fused_plan(4, seed) if seed else None
        )
        loss = wrapped.forward_backward(args, loss_fn=loss_fn, run_config=config)
        torch.set_rng_state(state)
        wanted = oracle.forward_backward(list(plain), args, loss_fn=loss_fn, num_microbatch=2)
        oracle.assert_close_to_scale(loss, wanted, "loss", 1e-5)
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, plain, 1e-5)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        oracle.assert_close_to_scale(got.grad, want.grad, "gradient", 1e-4)


# -- gradients and losses ----------------------------------------------------------------------------------------------
def test_sparse_gradients_become_dense() -> None:
    """Of calls and microbatches that meet other rows; rows that no call met have zeros."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    wrapped = RoundPipe(model)
    for tokens in (torch.tensor([[0, 1], [1, 1], [5, 0]]), torch.tensor([[2, 1], [2, 2], [3, 3]])):
        wrapped.forward_backward(
            (tokens,), loss_fn=lambda out, _: out.square().sum(), run_config=RoundPipeRunConfig(num_microbatch=3)
        )
        plain(tokens).square().sum().backward()
    wrapped.synchronize()
    got, want = model[0].weight.grad, plain[0].weight.grad
    assert got is not None and want is not None and want.is_sparse and not got.is_sparse
    torch.testing.assert_close(got, want.to_dense())
    assert (got[[4, 6]] == 0).all()


def test_a_loss_may_use_some_outputs_and_the_callers_own_tensors() -> None:
    class Two(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x * self.bias.sum()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Two(4, 4))
    plain = copy.deepcopy(model)
    x, scale = torch.randn(6, 4), torch.randn(4)
    wrapped = RoundPipe(model)
    wrapped.forward_backward((x,), loss_fn=lambda out, _: (out[0] * scale.to(out[0].device)).square().sum())
    (plain(x)[0] * scale).square().sum().backward()
    wrapped.synchronize()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_a_loss_from_what_a_layer_left_in_an_attribute_says_what_to_do() -> None:
    class Leaves(nn.Linear):
        aux: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.aux = out.square().mean()
            return out

    layers = [Leaves(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    model = RoundPipe(nn.Sequential(*layers))
    one_each = RoundPipeRunConfig(num_microbatch=1, execute_plan=one_layer_stages(3))
    with pytest.raises(StageError, match=r"tensor that the layer left in an attribute.*return that with its output"):
        model.forward_backward(
            (torch.ones(2, 4),), loss_fn=lambda out, _: out.sum() + layers[0].aux, run_config=one_each
        )
        model.synchronize()
