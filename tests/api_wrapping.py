"""Rows of the table: the timer, and models that are wrapped as their authors wrote them."""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe import ModelTimer, RoundPipe, wrap_model_to_roundpipe

from .api_rows import config, net, row, sgd, square_sum

X = torch.linspace(-1, 1, 24).view(6, 4)


# -- timer, wrapping --------------------------------------------------------------------------------------------------
@row
def the_timers_lines() -> None:
    """ModelTimer.VERBOSE = True: a line a layer and phase on stderr after each iteration."""
    text = io.StringIO()
    ModelTimer.VERBOSE = True
    try:
        with contextlib.redirect_stderr(text):
            wrapped = RoundPipe(net())
            wrapped.forward_backward((X,), loss_fn=square_sum)
            wrapped.synchronize()
    finally:
        ModelTimer.VERBOSE = False
    line = r"Layer \d+ (fwd|re|bwd)  new record: \d+\.\d{3} ms  new estimate: \d+\.\d{3} ms"
    lines = text.getvalue().splitlines()
    assert len(lines) >= 6 and all(re.fullmatch(line, one) for one in lines)


def _causal_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


@row
def presets_take_the_models_own_arguments() -> None:
    """A preset takes the model's own arguments, and return_logits=False: the loss without materialised logits."""
    model = _causal_model()
    tokens = torch.randint(32, (4, 6))
    wanted = model(input_ids=tokens, labels=tokens).loss
    wrapped = wrap_model_to_roundpipe(model)
    assert wrapped.num_layers == 4
    with torch.no_grad():
        run_config = config(num_microbatch=1)
        whole = wrapped(input_ids=tokens, labels=tokens, roundpipe_run_config=run_config)
        without = wrapped(input_ids=tokens, labels=tokens, return_logits=False, roundpipe_run_config=run_config)
    assert torch.allclose(whole.loss, wanted, rtol=1e-4) and whole.logits.shape == (4, 6, 32)
    assert torch.allclose(without.loss, wanted, rtol=1e-4) and without.get("logits") is None


@row
def use_sequential_preset() -> None:
    """True forces a preset (NotImplementedError if there is none), False skips it."""
    with pytest.raises(NotImplementedError):
        wrap_model_to_roundpipe(nn.Linear(4, 4), use_sequential_preset=True)
    assert wrap_model_to_roundpipe(_causal_model(), use_sequential_preset=True).num_layers == 4
    assert wrap_model_to_roundpipe(net()).num_layers == 3


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.said += record.getMessage() + "\n"


@contextlib.contextmanager
def _logged() -> Iterator[_Notes]:
    logger, notes = logging.getLogger("roundpipe"), _Notes()
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        yield notes
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)


@row
def what_was_chosen_is_logged() -> None:
    """use_sequential_preset=None tries and logs what it chose; False skips it."""
    with _logged() as notes:
        wrap_model_to_roundpipe(_causal_model())
    assert "preset for causal language models, 4 layers" in notes.said
    with _logged() as notes:
        wrapped = wrap_model_to_roundpipe(_causal_model(), use_sequential_preset=False, upper_threshold=0)
    assert "preset" not in notes.said and "is streamed" in notes.said
    assert type(wrapped) is not RoundPipe


@row
def chunked_loss_function() -> None:
    """models.function.ChunkedCompileLinearForCausalLMLoss exists for scripts that use it."""
    from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss

    assert issubclass(ChunkedCompileLinearForCausalLMLoss, torch.autograd.Function)


# -- models that run their own forward --------------------------------------------------------------------------------
class Branches(nn.Module):
    """Two stacks beside each other and a head, in a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        y = self.left(x)
        for block in self.blocks:
            y = torch.tanh(block(y)) + x
        return -y * self.scale if flip else y * self.scale


def _branches() -> Branches:
    torch.manual_seed(0)
    return Branches()


def _auto(model: nn.Module, **arguments: Any) -> Any:
    return wrap_model_to_roundpipe(model, lower_threshold=8, upper_threshold=0, **arguments)


@row
def a_model_with_its_own_forward_becomes_an_auto_roundpipe() -> None:
    """wrap_model_to_roundpipe walks the tree; an AutoRoundPipe has forward and the optimizer's side."""
    from roundpipe.roundpipe import AutoRoundPipe

    wrapped, plain = _auto(_branches()), _branches()
    assert isinstance(wrapped, AutoRoundPipe)
    optimizer, theirs = sgd(wrapped), torch.optim.SGD(plain.parameters(), lr=0.1)
    for flip in (False, True):
        loss = wrapped(X, flip=flip).square().sum()
        loss.backward()
        wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        theirs.zero_grad()
        wanted = plain(X, flip=flip).square().sum()
        wanted.backward()
        theirs.step()
        assert torch.allclose(loss, wanted, rtol=1e-5)
    state = wrapped.state_dict()
    assert set(state) == set(plain.state_dict())
    assert all(torch.allclose(state[n], v, rtol=1e-4, atol=1e-5) for n, v in plain.state_dict().items())


@row
def an_auto_roundpipe_has_no_forward_backward() -> None:
    """AutoRoundPipe: no forward_backward; the loss comes from its outputs."""
    with pytest.raises((AttributeError, NotImplementedError, RuntimeError), match="backward"):
        _auto(_branches()).forward_backward((X,), loss_fn=square_sum)


def _streamed(wrapped: Any) -> set[str]:
    return set(wrapped._parts)


@row
def rules_of_the_tree_walk() -> None:
    """Sequential: several layers; ModuleList elements one by one; thresholds decide; skip_modules stay."""
    wrapped = _auto(_branches())
    assert {"left", "blocks.0", "blocks.1", "blocks.2"} <= _streamed(wrapped)
    model = _branches()
    assert "left" not in _streamed(_auto(model, skip_modules=[model.left]))
    # As one layer: all of it has no more elements than upper_threshold.
    whole = wrap_model_to_roundpipe(_branches(), upper_threshold=10**6)
    assert isinstance(whole, RoundPipe) and whole.num_layers == 1


@row
def configurations_of_the_parts() -> None:
    """By default upper_threshold is total/(devices+1); a total below lower_threshold runs with one microbatch; elements
    of a ModuleList but the last stay packed."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))  # 72 parameters each

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm, self.pair = blocks, nn.LayerNorm(8), nn.Bilinear(4, 4, 8)  # 16 and 136

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.norm(x) + self.pair(x[:, :4], x[:, 4:])

    wrapped = wrap_model_to_roundpipe(Model(), lower_threshold=50, optim_dtype=torch.float64)  # 2 devices: 368 / 3
    found = {name: (part.num_microbatch, part.merge_output) for name, part in wrapped._parts.items()}
    assert found == {
        "blocks.0": (None, False),
        "blocks.1": (None, False),
        "blocks.2": (None, None),
        "norm": (1, None),
        "pair": (None, None),
    }
    assert {p.dtype for p in wrapped.optim_parameters()} == {torch.float64}  # other arguments are RoundPipe's


@row
def parts_of_one_model_may_share_parameters() -> None:
    """Between the RoundPipes inside one AutoRoundPipe gradients of a shared parameter are summed."""
    model, plain = _branches(), _branches()
    for one in (model, plain):
        one.blocks[2].weight = one.blocks[0].weight
    wrapped = _auto(model)
    wrapped(X).square().sum().backward()
    plain(X).square().sum().backward()
    wrapped.synchronize()
    assert torch.allclose(model.blocks[0].weight.grad, plain.blocks[0].weight.grad, rtol=1e-4, atol=1e-5)


@row
def override_config_is_for_single_modules() -> None:
    """override_config: a run configuration for one module."""
    model = _branches()
    pieces: list[int] = []
    model.left[0].register_forward_pre_hook(lambda module, args: pieces.append(args[0].shape[0]))
    wrapped = _auto(model, override_config={model.left: config(num_microbatch=6)})
    with torch.no_grad():
        wrapped(X)
    assert pieces == [1] * 6


@row
def functions_can_be_wrapped() -> None:
    """A plain function, such as a loss, becomes a layer without weights."""
    wrapped = wrap_model_to_roundpipe(lambda x, y: (x - y).square())
    with torch.no_grad():
        assert torch.equal(wrapped(X, torch.zeros(6, 4)), X.square())


@row
def loss_functions_of_transformers_can_be_wrapped() -> None:
    """A loss function of a transformers model runs on a device."""
    model = _causal_model()
    logits, labels = torch.randn(3, 5, 32), torch.randint(32, (3, 5))
    arguments = dict(logits=logits, labels=labels, vocab_size=32)
    with torch.no_grad():
        got = wrap_model_to_roundpipe(model.loss_function)(**arguments)
    assert torch.allclose(got, model.loss_function(**arguments), rtol=1e-5)
