"""Drop-in optimizers as torch.optim.Optimizers: states, groups, hooks, copies, what they refuse."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe import errors, optim
from tests.optim_twins import ATOL, PAIRS, RTOL, assert_same_state, set_gradients, shapes_of_trouble, twins


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("direction", ["torch to ours", "ours to torch", "ours to ours"])
@pytest.mark.parametrize(("name", "options"), [
    ("Adam", dict(amsgrad=True)), ("AdamW", {}), ("SGD", dict(momentum=0.9)), ("SGD", {}), ("Lion", {}),
])  # fmt: skip
def test_states_pass_between_torch_and_ours(name: str, options: dict[str, Any], direction: str) -> None:
    ours_class, theirs_class = PAIRS[name]
    source_class = theirs_class if direction.startswith("torch") else ours_class
    target_class = theirs_class if direction.endswith("torch") else ours_class
    first = shapes_of_trouble()
    source = source_class(first, lr=1e-2, **options)
    for step in range(5):
        set_gradients(step, first)
        source.step()
    second = twins(first)
    target = target_class(second, lr=1.0, **options)
    target.load_state_dict(through_file(source.state_dict()))
    assert target.param_groups[0]["lr"] == 1e-2
    for step in range(5, 10):
        set_gradients(step, first, second)
        source.step()
        target.step()
    assert_same_state(target, source, rtol=RTOL, atol=ATOL)


def test_a_state_of_another_implementation_or_of_old_times_is_taken_over() -> None:
    parameter = nn.Parameter(torch.randn(6))
    for options in (dict(fused=True), dict(foreach=True)):
        theirs = torch.optim.AdamW([parameter], **options)
        parameter.grad = torch.randn(6)
        theirs.step()
        ours = optim.AdamW([parameter])
        ours.load_state_dict(theirs.state_dict())
        assert ours.param_groups[0]["fused"] is None and ours.param_groups[0]["foreach"] is None
        ours.step()
    old = theirs.state_dict()
    old["state"][0]["step"] = 3
    del old["param_groups"][0]["decoupled_weight_decay"], old["param_groups"][0]["maximize"]
    ours = optim.AdamW([parameter])
    ours.load_state_dict(old)
    assert ours.param_groups[0]["decoupled_weight_decay"] and not ours.param_groups[0]["maximize"]
    ours.step()
    assert ours.state[parameter]["step"] == 4


def test_groups_closures_and_hooks() -> None:
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([{"params": [first], "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": [second]})
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (first + 2 * second).sum()
        loss.backward()
        calls.append("closure")
        return loss

    assert optimizer.step(closure).item() == 9
    assert calls == ["before", "closure", "after"]
    assert first.tolist() == [0.5] * 3 and second.tolist() == pytest.approx([0.8] * 3)
    assert not first.grad.requires_grad  # type: ignore[union-attr]


def test_copies_and_pickles_go_on_by_themselves() -> None:
    model = nn.Linear(3, 2)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    both = copy.deepcopy((model, optimizer))
    for a_model, an_optimizer in ((model, optimizer), both):
        an_optimizer.zero_grad()
        a_model(torch.ones(1, 3)).sum().backward()
        an_optimizer.step()
    torch.testing.assert_close(model.weight, both[0].weight, rtol=0, atol=0)
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_options_that_choose_an_implementation() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    for make in (optim.Adam, optim.AdamW, optim.SGD):
        for option in (dict(foreach=True), dict(fused=True), dict(foreach=False)):
            with pytest.warns(UserWarning, match="ignores f") as caught:
                make([parameter], **option)  # type: ignore[operator]
            assert caught[0].filename == __file__
        with pytest.raises(errors.ConfigError, match="differentiable"):
            make([parameter], differentiable=True)  # type: ignore[operator]
    for make in (optim.Adam, optim.AdamW):
        with pytest.raises(errors.ConfigError, match=r"capturable.*torch\.optim"):
            make([parameter], capturable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.Adam([parameter], capturable=False, differentiable=False, foreach=None, fused=None)


@pytest.mark.parametrize(("make", "text"), [
    (lambda p: optim.Adam(p, lr=-1), "lr: -1"),
    (lambda p: optim.Adam(p, lr=float("nan")), "lr: nan"),
    (lambda p: optim.Adam(p, lr=torch.ones(2)), "2 elements"),
    (lambda p: optim.Adam(p, betas=(1.0, 0.9)), r"betas\[0\]: 1"),
    (lambda p: optim.Adam(p, betas=(0.9, -0.1)), r"betas\[1\]"),
    (lambda p: optim.Adam(p, betas=(0.9, torch.tensor(0.9))), "two numbers or two tensors"),
    (lambda p: optim.Adam(p, betas=(torch.ones(2), torch.ones(1))), "2 elements"),
    (lambda p: optim.AdamW(p, eps=-1), "eps"),
    (lambda p: optim.AdamW(p, weight_decay=-1), "weight_decay"),
    (lambda p: optim.SGD(p, momentum=-1), "momentum"),
    (lambda p: optim.SGD(p, nesterov=True), "nesterov"),
    (lambda p: optim.SGD(p, momentum=0.9, dampening=0.1, nesterov=True), "nesterov"),
    (lambda p: optim.Lion(p, betas=(0.9, 1.0)), r"betas\[1\]"),
])  # fmt: skip
def test_options_out_of_range(make: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text) as caught:
        make([nn.Parameter(torch.zeros(1))])
    assert isinstance(caught.value, ValueError)


def test_sparse_gradients() -> None:
    for make in (optim.Adam, optim.AdamW, optim.Lion):
        other, table = nn.Parameter(torch.ones(3)), nn.Embedding(5, 2, sparse=True)
        table(torch.tensor([1, 3])).sum().backward()
        other.grad = torch.ones(3)
        with pytest.raises(RuntimeError, match="does not support sparse gradients"):
            make([other, table.weight]).step()
        assert torch.equal(other, torch.ones(3)), "nothing was updated"
    table = nn.Embedding(5, 2, sparse=True)
    twin = copy.deepcopy(table)
    for each, make_sgd in ((table, optim.SGD), (twin, torch.optim.SGD)):
        each(torch.tensor([1, 3])).sum().backward()
        make_sgd([each.weight], lr=0.1).step()  # type: ignore[operator]
    assert torch.equal(table.weight, twin.weight)


def test_an_expanded_parameter_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1).expand(4))
    parameter.grad = torch.ones(4)
    with pytest.raises(errors.ConfigError, match="several elements at one place"):
        optim.AdamW([parameter]).step()


def test_a_compiled_training_step_breaks_its_graph_at_the_optimizer() -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    ours, theirs = optim.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(twin.parameters(), lr=0.1)
    compiled = torch.compile(train, backend="eager")
    for _ in range(3):
        compiled(model, ours)
        train(twin, theirs)
    torch.testing.assert_close(model.weight, twin.weight, rtol=RTOL, atol=ATOL)


def test_a_scaler_of_torch_scales_and_skips() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = optim.SGD([weight], lr=0.5), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor, want in ((1.0, [0.5] * 3), (float("inf"), [0.5] * 3)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.tolist() == want
    assert scaler.get_scale() == 512
