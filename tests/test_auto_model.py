"""Models that run their own forward, with parts streamed: outputs, gradients and steps of the plain model."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, OptimizerCtx, RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError, ConfigTypeError, SplitError, StageError
from roundpipe.roundpipe import AutoRoundPipe

from . import oracle
from .auto_models import CASES, AutoCase, Trunk

LR = 0.05


def wrap(case: AutoCase, model: nn.Module, **settings: Any) -> RoundPipe:
    settings = {"lower_threshold": case.lower, "model_run_config": RoundPipeRunConfig(num_microbatch=2), **settings}
    return wrap_model_to_roundpipe(
        model, use_sequential_preset=False, override_config=case.overrides(model), **settings
    )


def twins(name: str, **settings: Any) -> tuple[AutoCase, RoundPipe, nn.Module]:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    plain = copy.deepcopy(model)
    return case, wrap(case, model, **settings), plain


def loss_and_logits(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out = model(**batch)
    return out["loss"], out["logits"]


def optimizer_of(wrapped: RoundPipe) -> torch.optim.Optimizer:
    with OptimizerCtx():
        return torch.optim.SGD(wrapped.parameters(), lr=LR, momentum=0.9)


def update(optimizer: torch.optim.Optimizer) -> Any:
    return lambda: (optimizer.step(), optimizer.zero_grad())


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_steps_equal_the_plain_model(name: str, devices: int) -> None:
    if name == "bart":
        from .transformers_version import skip_before

        skip_before(5, 10, reason="it gives its embeddings of positions something that has no batch")
    roundpipe.use_devices(f"host:{devices}")
    case, wrapped, plain = twins(name)
    assert isinstance(wrapped, AutoRoundPipe) and len(wrapped.parts) > 4
    optimizer = optimizer_of(wrapped)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    for step in range(5):
        torch.manual_seed(step)
        batch = case.batch()
        loss, logits = loss_and_logits(wrapped, batch)
        want, plain_logits = loss_and_logits(plain, batch)
        oracle.assert_close_to_scale(logits.detach(), plain_logits.detach(), f"logits of step {step}", 1e-5)
        loss.backward()
        want.backward()
        if step in (0, 4):
            wrapped.synchronize()
            oracle.assert_same_gradients_within(wrapped.model, plain, 1e-5)
        wrapped.step(update(optimizer), is_async=False)
        update(plain_optimizer)()
    oracle.assert_same_state_within(wrapped.model, plain, 1e-5)
    with torch.no_grad():
        got, want = wrapped.eval()(**batch)["logits"], plain.eval()(**batch)["logits"]
    oracle.assert_close_to_scale(got, want, "logits in inference", 1e-5)


def test_asynchronous_steps_are_one_step_old_everywhere() -> None:
    """Also for the parameters that stay on the host, which the next forward reads while the step still runs."""
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    optimizer = optimizer_of(wrapped)
    newest = copy.deepcopy(plain)
    plain_optimizer = torch.optim.SGD(newest.parameters(), lr=LR, momentum=0.9)
    previous = copy.deepcopy(plain.state_dict())
    for step in range(5):
        torch.manual_seed(step)
        batch = case.batch()
        loss, _ = loss_and_logits(wrapped, batch)
        loss.backward()
        wrapped.step(update(optimizer))
        # The weights of this iteration: those from before the newest step.
        plain.load_state_dict(previous)
        previous = copy.deepcopy(newest.state_dict())
        want, _ = loss_and_logits(plain, batch)
        oracle.assert_close_to_scale(loss.detach(), want.detach(), f"loss of step {step}")
        want.backward()
        for mine, other in zip(newest.parameters(), plain.parameters(), strict=True):
            mine.grad, other.grad = other.grad, None
        update(plain_optimizer)()
    wrapped.synchronize()
    oracle.assert_same_state(wrapped.model, newest, 1e-5)


@pytest.mark.parametrize("is_async", [False, True])
def test_compact_optimizers_train_every_parameter(is_async: bool) -> None:
    """Those that stay on the host too: the forward that reads them waits for updates that nobody else waits for."""
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    optimizer = roundpipe.optim.SGD(wrapped, lr=LR, momentum=0.9)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=LR, momentum=0.9)
    for step in range(4):
        torch.manual_seed(step)
        batch = case.batch()
        for model in (wrapped, plain):
            loss_and_logits(model, batch)[0].backward()
        wrapped.step(optimizer, is_async=is_async)
        if is_async:
            wrapped.synchronize()
        update(plain_optimizer)()
    wrapped.synchronize()
    oracle.assert_same_state_within(wrapped.model, plain, 1e-5)


def test_gradients_accumulate_and_are_cleared() -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    for seed in range(3):
        torch.manual_seed(seed)
        batch = case.batch()
        for model in (wrapped, plain):
            loss_and_logits(model, batch)[0].backward()
        if seed == 1:
            wrapped.synchronize()
    wrapped.synchronize()
    oracle.assert_same_gradients_within(wrapped.model, plain, 1e-5)
    wrapped.zero_grad()
    assert all(parameter.grad is None for parameter in wrapped.model.parameters())


def test_verbs() -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    model = wrapped.model
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    with OptimizerCtx():
        assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert not hasattr(wrapped, "forward_backward")
    with pytest.raises(AttributeError, match=r"runs its own forward.*loss\.backward"):
        wrapped.forward_backward((1,))
    batch = case.batch()
    loss_and_logits(wrapped, batch)
    assert (model.calls, wrapped.calls) == (1, 1), "an attribute that the forward writes"
    wrapped.scale.fill_(0.25)
    plain.scale.fill_(0.25)
    oracle.assert_close_to_scale(loss_and_logits(wrapped, batch)[0], loss_and_logits(plain, batch)[0], "other buffer")
    values = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    wrapped.load_state_dict(values)
    plain.load_state_dict(values)
    oracle.assert_close_to_scale(loss_and_logits(wrapped, batch)[0], loss_and_logits(plain, batch)[0], "loaded")
    wrapped.eval()
    assert not model.training and not model.blocks[0].up.training
    wrapped.train()
    hits = []
    handle = model.register_forward_hook(lambda *_: hits.append(1))
    loss_and_logits(wrapped, batch)
    handle.remove()
    assert hits == [1]
    twin = twins("trunk")[1].bfloat16()
    assert loss_and_logits(twin, batch)[1].dtype == torch.bfloat16
    assert "4 x Residual" in repr(wrapped)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))])
def test_copies_train_on_their_own(how: Any) -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    twin = how(wrapped)
    assert isinstance(twin, AutoRoundPipe) and list(twin.parts) == list(wrapped.parts)
    batch = case.batch()
    loss_and_logits(twin, batch)[0].backward()
    loss_and_logits(plain, batch)[0].backward()
    twin.synchronize()
    wrapped.synchronize()
    oracle.assert_same_gradients_within(twin.model, plain, 1e-5)
    assert all(parameter.grad is None for parameter in wrapped.model.parameters())


def test_wrapping_again_takes_over() -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    again = wrap(case, wrapped.model)
    batch = case.batch()
    with pytest.raises(ConfigError, match="was replaced"):
        wrapped(**batch)
    oracle.assert_close_to_scale(loss_and_logits(again, batch)[0], loss_and_logits(plain, batch)[0], "loss")
    with pytest.raises(ConfigError, match="already belongs to the living wrapper"):
        RoundPipe(again.model.blocks[1])
    with pytest.raises(ConfigError, match="already wrapped"):
        wrap_model_to_roundpipe(again)


def test_a_failing_part_says_where_and_the_next_call_works() -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("trunk")
    batch = case.batch()

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    handle = wrapped.model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(StageError, match="on purpose"):
        wrapped(**batch)
    handle.remove()
    loss_and_logits(wrapped, batch)[0].backward()
    loss_and_logits(plain, batch)[0].backward()
    wrapped.synchronize()
    oracle.assert_same_gradients_within(wrapped.model, plain, 1e-5)


def test_what_changes_the_tree_afterwards_is_refused() -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, _ = twins("trunk")
    batch = case.batch()
    model = wrapped.model
    kept, model.norm = model.norm, nn.Identity()
    with pytest.raises(ConfigError, match=r"other parameters|added, exchanged or removed"):
        wrapped(**batch)
    model.norm = kept
    wrapped(**batch)
    position = model.position
    model.position = nn.Parameter(torch.zeros(5, 8))
    with pytest.raises(ConfigError, match="'position' of Trunk is another one"):
        wrapped(**batch)
    model.position = position
    wrapped(**batch)


def test_configurations() -> None:
    roundpipe.use_devices("host:2")
    case = CASES["trunk"]
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(1)], [range(1)]
    with pytest.raises(ConfigError, match=r"execute_plan is for one list.*override_config"):
        wrap(case, case.make(), model_run_config=RoundPipeRunConfig(execute_plan=plan))
    _, wrapped, plain = twins("trunk")
    batch = case.batch()
    with pytest.raises(ConfigError, match="execute_plan"):
        wrapped(**batch, roundpipe_run_config=RoundPipeRunConfig(execute_plan=plan))
    got = wrapped(**batch, roundpipe_run_config=RoundPipeRunConfig(requires_grad=False))
    assert got["logits"].requires_grad, "the host's own parameters are plain autograd"
    pieces: list[int] = []
    wrapped.model.blocks[1].register_forward_hook(lambda module, args, out: pieces.append(len(args[0])))
    with torch.no_grad():
        wrapped(**batch, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=3))
        assert sorted(pieces) == [2, 2, 3]
        pieces.clear()
        wrapped(**batch)
        assert sorted(pieces) == [3, 4]
        oracle.assert_close_to_scale(wrapped(**batch)["logits"], plain(**batch)["logits"], "logits")


def parts_of(model: nn.Module, **settings: Any) -> dict[str, tuple[int | None, bool | None]]:
    wrapped = wrap_model_to_roundpipe(model, **settings)
    return {name: (c.num_microbatch, c.merge_output) for name, c in wrapped._parts.items()}


def test_rules_of_the_walk(caplog: pytest.LogCaptureFixture) -> None:
    """Elements: embedding and head 88 (tied), position 40, a block 296 of which none its own, norm 16."""
    roundpipe.use_devices("host:1")
    one, packed = 1, False
    blocks = {f"blocks.{i}": (None, packed if i < 3 else None) for i in range(4)}
    with caplog.at_level(logging.INFO, "roundpipe"):
        found = parts_of(Trunk(), lower_threshold=64)
    assert found == {"embed": (None, None), **blocks, "norm": (one, None), "head": (None, None)}
    assert "blocks.3 (Residual, 296 parameters) is streamed: small enough for one layer" in caplog.text
    assert "norm (LayerNorm, 16 parameters) is streamed, with one microbatch" in caplog.text
    inner = {f"blocks.{i}.{name}" for i in range(4) for name in ("norm", "up", "down", "drop")}
    found = parts_of(Trunk(), lower_threshold=64, upper_threshold=200)
    assert found.keys() == {"embed", "norm", "head"} | inner
    assert found["blocks.0.up"] == (None, None) and found["blocks.0.drop"] == (one, None)
    model = Trunk()
    config = RoundPipeRunConfig(num_microbatch=5, merge_output=True)
    found = parts_of(
        model,
        lower_threshold=64,
        skip_modules=[model.norm, model.blocks[3].up],
        override_config={model.blocks[1]: config},
    )
    assert found["blocks.1"] == (5, True) and "norm" not in found and "blocks.3" not in found
    assert {"blocks.3.down", "blocks.3.drop"} <= found.keys() and "blocks.3.up" not in found
    for settings in (dict(lower_threshold=40), dict(upper_threshold=10**6)):  # the position is enough; all is small
        wrapped = wrap_model_to_roundpipe(Trunk(), **settings)
        assert type(wrapped) is RoundPipe and wrapped.num_layers == 1


def test_misuse_of_the_walk() -> None:
    roundpipe.use_devices("host:1")
    model = Trunk()
    for settings, kind, message in (
        (dict(skip_modules=[model]), ConfigError, "nothing of Trunk is left to stream"),
        (dict(skip_modules=["norm"]), ConfigTypeError, "skip_modules: got str"),
        (dict(override_config={"norm": RoundPipeRunConfig()}), ConfigTypeError, "override_config: got str"),
        (dict(override_config={model.norm: 3}), ConfigTypeError, "override_config: got int"),
        (dict(model_run_config=3), ConfigTypeError, "model_run_config: got int"),
    ):
        with pytest.raises(kind, match=message):
            wrap_model_to_roundpipe(model, lower_threshold=64, **settings)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"no effect on 'blocks.0.up', 'a Linear of another model'.*'blocks.0'"):
        overrides = {model.blocks[0].up: RoundPipeRunConfig(), nn.Linear(1, 1): RoundPipeRunConfig()}
        wrap_model_to_roundpipe(model, lower_threshold=64, override_config=overrides)


def test_functions_are_wrapped() -> None:
    roundpipe.use_devices("host:2")
    seen: list[int] = []

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(len(logits))
        return F.cross_entropy(logits, target)

    logits = torch.randn(6, 4, requires_grad=True)
    other = logits.detach().clone().requires_grad_()
    target = torch.tensor([0, 1, -100, -100, -100, 3])
    streamed = wrap_model_to_roundpipe(loss)
    got = streamed(logits, target)
    got.backward()
    F.cross_entropy(other, target).backward()
    oracle.assert_close_to_scale(logits.grad, other.grad, "gradient")
    assert set(seen) == {6}, "one microbatch: the mean over what counts is not a mean of means"


def test_the_loss_of_a_transformers_model_runs_on_a_device() -> None:
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("llava")
    assert "loss_function" in wrapped.parts
    batch = case.batch()
    stages: list[str] = []
    original = type(wrapped.model).loss_function.fget(plain)
    import threading

    def noting(*args: Any, **kwargs: Any) -> Any:
        stages.append(threading.current_thread().name)
        return original(*args, **kwargs)

    wrapped.model.loss_function = noting
    oracle.assert_close_to_scale(loss_and_logits(wrapped, batch)[0], loss_and_logits(plain, batch)[0], "loss")
    assert stages and all(name.startswith("roundpipe-host") for name in stages)


def test_collected_outputs_are_there_or_refused() -> None:
    """transformers collects hidden states at the blocks, which are parts, and attention weights inside them."""
    from .transformers_version import skip_before

    skip_before(5, 24, reason="T5 collects its outputs by itself")
    roundpipe.use_devices("host:2")
    case, wrapped, plain = twins("t5")
    batch = case.batch()
    with torch.no_grad():
        got = wrapped(**batch, output_hidden_states=True)
        want = plain(**batch, output_hidden_states=True)
        for side in ("encoder_hidden_states", "decoder_hidden_states"):
            for mine, other in zip(got[side], want[side], strict=True):
                assert isinstance(mine, torch.Tensor)
                oracle.assert_close_to_scale(mine, other, side)
        with pytest.raises(ConfigError, match=r"attentions' is empty.*upper_threshold"):
            wrapped(**batch, output_attentions=True)


class ByThreshold(nn.Module):
    """Kinds of modules that a walk must not take apart, or must follow into."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(nn.Linear(8, 8), backend="eager")
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.named = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.listed = nn.ModuleList([self.named["a"], nn.Linear(8, 8)])
        self.gains = nn.ParameterList([torch.randn(8) for _ in range(2)])
        self.mixed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.compiled(x)) * self.gains[0] + self.gains[1]
        for module in (*self.listed, self.named["b"], self.frozen):
            x = torch.tanh(module(x))
        x = self.mixed(x)
        rows = x[None].expand(3, -1, -1).transpose(0, 1)
        return x + self.attention(rows, rows, rows, need_weights=False)[0].mean(1)


@pytest.mark.parametrize("upper", [0, 100])
def test_kinds_of_modules(upper: int) -> None:
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    torch.manual_seed(0)
    model = ByThreshold()
    plain = ByThreshold()
    plain.load_state_dict(model.state_dict())
    wrapped = wrap_model_to_roundpipe(
        model,
        lower_threshold=300,
        upper_threshold=upper,
        skip_modules=[model.mixed[1]],
        model_run_config=RoundPipeRunConfig(num_microbatch=2),
    )
    assert {
        "compiled",
        "attention.out_proj",
        "normed",
        "mixed.0",
        "mixed.2",
        "named.a",
        "listed.1",
    } <= wrapped.parts.keys()
    assert not {"mixed.1", "mixed", "listed.0", "compiled._orig_mod", "attention"} & wrapped.parts.keys()
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(6, 8)
        got, want = wrapped(x), plain(x)
        oracle.assert_close_to_scale(got.detach(), want.detach(), "output", 1e-5)
        got.square().sum().backward()
        want.square().sum().backward()
    wrapped.synchronize()
    oracle.assert_same_gradients_within(model, plain, 1e-5)
    oracle.assert_same_state_within(model, plain, 1e-6)


def test_a_cache_is_refused_with_the_remedy() -> None:
    roundpipe.use_devices("host:1")
    case, wrapped, _ = twins("t5")
    with pytest.raises(SplitError, match="use_cache=False"):
        wrapped(**{**case.batch(), "use_cache": True})
