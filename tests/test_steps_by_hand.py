"""A step that is taken by hand is refused where it would train nothing, and nowhere else."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, training_state
from roundpipe.errors import ConfigError
from roundpipe.roundpipe import AutoRoundPipe

X = torch.ones(4, 4)
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch_adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "torch_sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: roundpipe.optim.AdamW(p, lr=0.1),
    "sgd": lambda p: roundpipe.optim.SGD(p, lr=0.1),
}


def loss_fn(output: torch.Tensor, label: Any) -> torch.Tensor:
    return output.square().sum()


def wrapped(name: str = "hand") -> RoundPipe:
    roundpipe.use_devices("host:2")
    return RoundPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), name=name)


def weights(model: RoundPipe) -> list[torch.Tensor]:
    model.synchronize()
    return [p.detach().clone() for p in model.model.parameters()]


def changed(model: RoundPipe, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(p, q) for p, q in zip(weights(model), before, strict=True))


@pytest.mark.parametrize("maker", MAKERS)
def test_on_optimizer_parameters(maker: str) -> None:
    model = wrapped()
    with OptimizerCtx():
        optimizer = MAKERS[maker](model.parameters())
    before = weights(model)
    model.forward_backward((X,), loss_fn=loss_fn)
    with pytest.raises(ConfigError, match=r"by hand, where the wrapped model 'hand'.*model.step\(optimizer.step\)"):
        optimizer.step()
    with pytest.raises(ConfigError, match="by hand"), OptimizerCtx():
        optimizer.step()
    model.step(optimizer.step, is_async=False)  # nothing was lost
    assert changed(model, before)


@pytest.mark.parametrize("maker", MAKERS)
def test_on_host_weights(maker: str) -> None:
    model = wrapped()
    optimizer = MAKERS[maker](model.model.parameters())
    before = weights(model)
    model.forward_backward((X,), loss_fn=loss_fn)
    with pytest.raises(ConfigError, match=r"OptimizerCtx\(\):` from model.parameters\(\)"):
        optimizer.step()
    model.synchronize()
    optimizer.step()  # with the gradients that are shown now
    optimizer.zero_grad()
    optimizer.step()
    assert changed(model, before)


def test_after_backward_of_autograd() -> None:
    model = wrapped()
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X).sum().backward()
    with pytest.raises(ConfigError, match="by hand"):
        optimizer.step()
    model.zero_grad()
    optimizer.step()  # no gradients wait any more


def test_of_a_module_around_a_wrapper() -> None:
    body = wrapped("body")
    scale = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([scale, *body.model.parameters()], lr=0.1)
    (body(X) * scale).sum().backward()
    assert scale.grad is not None
    with pytest.raises(ConfigError, match="'body'"):
        optimizer.step()


def test_of_an_optimizer_that_has_frozen_weights_too() -> None:
    """As one over all parameters of a larger model, of which a frozen part is wrapped."""
    first, head = nn.Linear(4, 4), nn.Linear(2, 1)
    body = wrapped("body").requires_grad_(False)
    optimizer = torch.optim.SGD([*first.parameters(), *body.model.parameters(), *head.parameters()], lr=0.1)
    before = [p.detach().clone() for p in (first.weight, head.weight)]
    head(body(first(X))).sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip((first.weight, head.weight), before, strict=True))
    partly = wrapped("partly")
    partly.model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*partly.model[0].parameters(), *head.parameters()], lr=0.1)
    head(partly(X)).sum().backward()
    optimizer.step()
    optimizer.add_param_group({"params": list(partly.model[1].parameters())})
    with pytest.raises(ConfigError, match="'partly'"):
        optimizer.zero_grad()
        optimizer.step()


def test_of_a_model_with_parts_on_the_host() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 2))
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x) * self.scale

    roundpipe.use_devices("host:2")
    net = Scaled()
    model = roundpipe.wrap_model_to_roundpipe(net, lower_threshold=8, upper_threshold=0, name="parts")
    assert isinstance(model, AutoRoundPipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model(X).sum().backward()
    assert net.scale.grad is not None
    with pytest.raises(ConfigError, match="'parts'"):
        optimizer.step()
    model.zero_grad()


def test_where_it_is_the_right_thing() -> None:
    model = wrapped()
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(4, 2)
    unrelated = torch.optim.SGD(other.parameters(), lr=0.1)
    compact_model = wrapped("compact")
    compact = roundpipe.optim.AdamW(compact_model, lr=0.1)
    before, compact_before = weights(model), weights(compact_model)
    optimizer.step()  # before there are gradients: as in plain PyTorch, nothing
    model.forward_backward((X,), loss_fn=loss_fn)
    compact_model.forward_backward((X,), loss_fn=loss_fn)
    other(X).sum().backward()
    unrelated.step()
    compact.step()  # its step is the model's

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    model.step(update)
    optimizer.step()  # superfluous, and harmless
    model.forward_backward((X,), loss_fn=loss_fn)
    model.step(update, is_async=False)
    assert changed(model, before)
    assert changed(compact_model, compact_before)


def test_where_gradients_were_put_by_hand() -> None:
    model = wrapped()
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.forward_backward((X,), loss_fn=loss_fn)
    for parameter in model.optim_parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    model.zero_grad()


def test_of_an_optimizer_whose_step_is_the_models() -> None:
    """For a loop that calls ``optimizer.step()`` and knows nothing of the model."""
    model = wrapped()

    class Streamed(torch.optim.SGD):
        by_hand = False

        def step(self, closure: Any = None) -> None:
            if self.by_hand:
                super().step()
            else:
                model.step(super().step, is_async=False)

    with OptimizerCtx():
        optimizer = Streamed(model.parameters(), lr=0.1)
    before = weights(model)
    model.forward_backward((X,), loss_fn=loss_fn)
    optimizer.step()
    assert changed(model, before)
    optimizer.zero_grad()
    optimizer.by_hand = True
    model.forward_backward((X,), loss_fn=loss_fn)
    with pytest.raises(ConfigError, match=r"Streamed.step\(\) was called by hand"):
        optimizer.step()
    model.zero_grad()


def test_states_are_found_while_another_thread_makes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every step of any optimizer looks for them."""

    class State:
        pass

    monkeypatch.setattr(training_state, "_living", weakref.WeakSet())
    kept = [State() for _ in range(30)]
    for state in kept:
        training_state._living.add(state)  # type: ignore[arg-type]
    ended = threading.Event()

    def make() -> None:
        while not ended.is_set():
            more = [State() for _ in range(20)]
            for state in more:
                training_state._living.add(state)  # type: ignore[arg-type]

    maker = threading.Thread(target=make)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        maker.start()
        for _ in range(2000):
            assert len(training_state.living_states()) >= len(kept)
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        maker.join()
