"""The compact optimizers as objects: groups, schedulers, states, edits of weights, and what they refuse."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, _ops, errors, optim
from roundpipe import engine as engines

from . import by_hand


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def wrap(dtype: torch.dtype = torch.bfloat16, case: str = "mlp", seed: int = 0) -> RoundPipe:
    return RoundPipe(by_hand.make(case, dtype, seed))


def call(wrapped: RoundPipe, number: int, case: str = "mlp") -> float:
    dtype = next(iter(wrapped.model.parameters())).dtype
    return by_hand.run_call(wrapped, case, number, dtype)


def train(wrapped: RoundPipe, optimizer: Any, numbers: range, is_async: bool = False) -> list[float]:
    losses = []
    for number in numbers:
        losses.append(call(wrapped, number))
        wrapped.step(optimizer, is_async)
    return losses


def values(wrapped: RoundPipe) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in wrapped.state_dict().items()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in got if not torch.equal(got[name], want[name])] == []


EVERY_OPTION: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, dict(lr=1e-2, weight_decay=0.1)),
    (optim.AdamW, dict(lr=torch.tensor(1e-2), betas=(0.7, 0.9), eps=1e-4, amsgrad=True)),
    (optim.Adam, dict(lr=1e-2, weight_decay=0.1, maximize=True)),
    (optim.Adam, dict(lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1)),
    (optim.SGD, dict(lr=0.1)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01)),
    (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True)),
    (optim.Lion, dict(lr=1e-3, weight_decay=0.1)),
]


@pytest.mark.parametrize(("kind", "options"), EVERY_OPTION, ids=lambda v: "-".join(v) if isinstance(v, dict) else None)
def test_every_option_means_what_it_means_to_the_drop_in(kind: Any, options: dict[str, Any]) -> None:
    """On float32 weights both have the same bits and states of the same names."""
    compact, plain = wrap(torch.float32), wrap(torch.float32)
    optimizer = kind(compact, **options)
    assert isinstance(optimizer, kind) and isinstance(optimizer, torch.optim.Optimizer)
    with OptimizerCtx():
        other = kind(plain.parameters(), **options)
    for number in range(4):
        assert call(compact, number) == call(plain, number)
        compact.step(optimizer, False)
        plain.step(lambda: (other.step(), other.zero_grad()), False)
    assert_equal(values(compact), values(plain))
    ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    for key, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[key][name], value), name


def test_groups_by_pattern_function_and_list() -> None:
    wrapped = wrap()
    first = wrapped.model[0].weight
    optimizer = optim.AdamW(
        wrapped,
        lr=0.0,
        groups=[
            {"params": "*norm*", "lr": 1e-2, "weight_decay": 0.0},
            {"params": lambda name, p: p.dim() == 1 and name.startswith("2."), "lr": 1e-3},
            {"params": [first, "3.up.weight"], "lr": 1e-4},
        ],
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 1e-2, 1e-3, 1e-4]
    names = {id(p): name for name, p in wrapped.model.named_parameters()}
    chosen = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    assert chosen[1] == {"2.norm.weight", "2.norm.bias", "3.norm.weight", "3.norm.bias"}
    assert chosen[2] == {"2.up.bias", "2.down.bias"} and chosen[3] == {"0.weight", "3.up.weight"}
    assert sum(map(len, chosen)) == len(names)
    before = values(wrapped)
    train(wrapped, optimizer, range(3))
    after = values(wrapped)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == chosen[1] | chosen[2] | chosen[3]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


def test_lists_of_the_models_parameters_are_a_compact_optimizer() -> None:
    wrapped = wrap()
    half = [p for n, p in wrapped.model.named_parameters() if n.endswith("weight")]
    rest = [p for n, p in wrapped.model.named_parameters() if not n.endswith("weight")]
    optimizer = optim.SGD([{"params": half}, {"params": rest, "lr": 0.0}], lr=0.1)
    assert isinstance(optimizer, optim.CompactSGD) and optimizer.param_groups[1]["lr"] == 0.0
    train(wrapped, optimizer, range(2))
    assert type(optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)) is optim.SGD


def test_a_step_has_read_every_hyperparameter_when_it_returns() -> None:
    """Schedulers and anything else may change groups on the next line, however late the updates run."""
    results = []
    for late in (False, True):
        wrapped = wrap()
        optimizer = optim.AdamW(wrapped, lr=1e-2, max_grad_norm=0.3, groups=[{"params": "*bias", "lr": 1e-3}])
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        _ops.engine_inject(engines.current().handle, "delay", 5, 3000 if late else 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(5):
                call(wrapped, number)
                wrapped.step(optimizer, is_async=number % 2 == 0)
                if not late:
                    wrapped.synchronize()
                kept = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
                for group in optimizer.param_groups:
                    group.update(lr=1e9, betas=(0.0, 0.0), eps=1.0, weight_decay=1e9, maximize=True)
                optimizer.max_grad_norm = 1e-9
                wrapped.synchronize()
                optimizer.max_grad_norm = 0.3
                for group, options in zip(optimizer.param_groups, kept, strict=True):
                    group.update(options)
                scheduler.step()
        results.append(values(wrapped))
    _ops.engine_inject(engines.current().handle, "delay", 5, 0)
    assert_equal(*results)


@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
@pytest.mark.parametrize("formats", [("split", "float32"), ("float32", "bfloat16"), ("split", "int8")], ids="-".join)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(formats: tuple[str, str], is_async: bool) -> None:
    master, state_dtype = formats
    make = lambda wrapped: optim.AdamW(wrapped, lr=1e-2, master=master, state_dtype=state_dtype)  # noqa: E731
    wrapped = wrap()
    optimizer = make(wrapped)
    train(wrapped, optimizer, range(4), is_async)
    saved = pickle.loads(pickle.dumps((wrapped.state_dict(), optimizer.state_dict())))
    other = wrap(seed=7)
    other.load_state_dict(saved[0])
    resumed = make(other)
    resumed.load_state_dict(saved[1])
    # The first call after a synchronisation sees the newest weights, on both sides.
    assert train(other, resumed, range(4, 8), is_async) == train(wrapped, optimizer, range(4, 8), is_async)
    assert_equal(values(other), values(wrapped))
    assert_equal(dict(resumed.named_masters()), dict(optimizer.named_masters()))


def test_a_state_goes_from_format_to_format() -> None:
    wrapped = wrap()
    optimizer = optim.AdamW(wrapped, lr=1e-2, master="float32")
    train(wrapped, optimizer, range(4))
    other = wrap(seed=3)
    other.load_state_dict(wrapped.state_dict())
    resumed = optim.AdamW(other, lr=1e-2, master="split")
    resumed.load_state_dict(optimizer.state_dict())
    train(wrapped, optimizer, range(4, 7))
    train(other, resumed, range(4, 7))
    assert_equal(dict(resumed.named_masters()), dict(optimizer.named_masters()))


def test_eight_bit_moments_come_from_and_go_to_floats() -> None:
    wrapped = wrap()
    optimizer = optim.AdamW(wrapped, lr=1e-2)
    train(wrapped, optimizer, range(4))
    coded = optim.AdamW(other := wrap(), state_dtype="int8")
    coded.load_state_dict(optimizer.state_dict())
    weight = other.model[2].up.weight
    state, exact = coded.state[weight], optimizer.state[wrapped.model[2].up.weight]
    assert state["exp_avg"].dtype == torch.uint8 and state["exp_avg"].shape == weight.shape
    assert state["exp_avg_scale"].shape == (-(-weight.numel() // 256),)
    back = optim.AdamW(third := wrap())
    back.load_state_dict(coded.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        value, largest = back.state[third.model[2].up.weight][name], exact[name].abs().max()
        torch.testing.assert_close(value, exact[name], rtol=0, atol=float(largest) * 0.008)
    bad = copy.deepcopy(coded.state_dict())
    bad["state"][0]["exp_avg_scale"] = torch.zeros(9)
    with pytest.raises(ValueError, match="'exp_avg_scale'"):
        coded.load_state_dict(bad)


def test_a_state_of_torch_is_taken_over() -> None:
    plain = by_hand.make("mlp", torch.float32)
    theirs = torch.optim.AdamW(plain.parameters(), lr=3e-3, betas=(0.8, 0.95), foreach=True)
    for number in range(3):
        args, label = by_hand.batch_of("mlp", 6, number, torch.float32)
        by_hand.loss_of("mlp")(plain(*args), label).backward()
        theirs.step()
        theirs.zero_grad()
    wrapped = RoundPipe(copy.deepcopy(plain).bfloat16())
    optimizer = optim.AdamW(wrapped, state_dtype="float32")
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["lr"] == 3e-3 and optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    for ours, other in zip(wrapped.model.parameters(), plain.parameters(), strict=True):
        state = optimizer.state[ours]
        assert state["step"] == 3
        assert torch.equal(state["exp_avg"], theirs.state[other]["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], theirs.state[other]["exp_avg_sq"])
    train(wrapped, optimizer, range(2))


def test_torch_takes_over_our_state() -> None:
    wrapped = wrap(torch.float32)
    optimizer = optim.AdamW(wrapped, lr=1e-2)
    train(wrapped, optimizer, range(3))
    plain = by_hand.make("mlp", torch.float32)
    plain.load_state_dict(wrapped.state_dict())
    theirs = torch.optim.AdamW(plain.parameters())
    theirs.load_state_dict(optimizer.state_dict())
    assert theirs.param_groups[0]["lr"] == 1e-2
    plain[0].weight.grad = torch.ones_like(plain[0].weight)
    theirs.step()


@pytest.mark.parametrize("master", ["split", "float32"])
@pytest.mark.parametrize("is_async", [False, True], ids=["exact", "async"])
def test_edited_and_loaded_weights_are_never_reverted(is_async: bool, master: str) -> None:
    wrapped = wrap()
    optimizer = optim.SGD(wrapped, lr=0.0, master=master)  # steps that change nothing show what they would revert
    stale = copy.deepcopy(optimizer.state_dict())
    train(wrapped, optimizer, range(2), is_async)
    by_hand_weight = wrapped.model[0].weight
    with torch.no_grad():
        by_hand_weight.fill_(0.3)  # not synchronised: an asynchronous result may be pending
    train(wrapped, optimizer, range(2, 4), is_async)
    wrapped.synchronize()
    assert torch.equal(by_hand_weight, torch.full_like(by_hand_weight, 0.3))
    assert torch.equal(dict(optimizer.named_masters())["0.weight"], by_hand_weight.float())
    loaded = {name: torch.randn_like(value) for name, value in wrapped.state_dict().items()}
    wrapped.load_state_dict(loaded)
    train(wrapped, optimizer, range(4, 6), is_async)
    assert_equal(values(wrapped), loaded)
    optimizer.load_state_dict(stale)  # its masters are of weights that are gone
    train(wrapped, optimizer, range(6, 8), is_async)
    assert_equal(values(wrapped), loaded)


def test_a_weight_loaded_with_its_own_value_keeps_its_master() -> None:
    wrapped = wrap()
    optimizer = optim.AdamW(wrapped, lr=1e-3)
    train(wrapped, optimizer, range(3))
    before = dict(optimizer.named_masters())
    changed = wrapped.state_dict() | {"0.weight": torch.zeros_like(wrapped.model[0].weight)}
    wrapped.load_state_dict(changed)
    after = dict(optimizer.named_masters())
    assert (after.pop("0.weight") == 0).all() and (before.pop("0.weight") != 0).any()
    assert_equal(after, before)


def test_bfloat16_moments_are_seeded() -> None:
    results = []
    for seed in (1, 1, 2):
        wrapped = wrap()
        optimizer = optim.AdamW(wrapped, lr=1e-2, state_dtype="bfloat16", seed=seed)
        train(wrapped, optimizer, range(6))
        assert optimizer.state[wrapped.model[0].weight]["exp_avg"].dtype == torch.bfloat16
        results.append(dict(optimizer.named_masters()))
    assert_equal(results[0], results[1])
    assert any(not torch.equal(results[0][name], results[2][name]) for name in results[0])


def test_weights_asked_for_through_the_model_are_complete() -> None:
    wrapped, twin = wrap(), wrap()
    optimizer, other = optim.SGD(wrapped, lr=0.1), optim.SGD(twin, lr=0.1)
    _ops.engine_inject(engines.current().handle, "delay", 5, 20000)
    call(wrapped, 0)
    wrapped.step(optimizer, is_async=False)
    seen = wrapped.model[0].weight.clone()
    _ops.engine_inject(engines.current().handle, "delay", 5, 0)
    call(twin, 0)
    twin.step(other, is_async=False)
    twin.synchronize()
    assert torch.equal(seen, twin.model[0].weight)


def test_zero_grad_drops_the_window() -> None:
    wrapped = wrap()
    optimizer = optim.SGD(wrapped, lr=0.1)
    before = values(wrapped)
    call(wrapped, 0)
    optimizer.zero_grad()
    wrapped.step(optimizer, False)
    assert_equal(values(wrapped), before)
    loss = optimizer.step(lambda: call(wrapped, 1))
    assert isinstance(loss, float)
    after = values(wrapped)
    assert any(not torch.equal(after[name], before[name]) for name in after)


def test_freezing_unfreezing_and_added_groups() -> None:
    wrapped = wrap()
    layer = wrapped.model[3]
    layer.requires_grad_(False)
    optimizer = optim.AdamW(wrapped, lr=1e-2)
    before = values(wrapped)
    train(wrapped, optimizer, range(2))
    layer.up.requires_grad_(True)
    with pytest.raises(errors.ConfigError, match=r"'3\.up\.weight'.*add_param_group"):
        train(wrapped, optimizer, range(2, 3))
    optimizer.zero_grad()  # or the next step would take them, of what is frozen below too
    optimizer.add_param_group({"params": "3.up.*", "lr": 1e-3})
    optimizer.add_param_group({"params": list(layer.down.parameters()), "lr": 1e-3})  # frozen still
    wrapped.model[0].requires_grad_(False)
    middle = values(wrapped)
    train(wrapped, optimizer, range(3, 5))
    after = values(wrapped)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert {"3.up.weight", "3.up.bias"} <= moved
    assert not moved & {"3.down.weight", "3.down.bias", "3.norm.weight"}
    assert torch.equal(after["0.weight"], middle["0.weight"]) and torch.equal(after["0.bias"], middle["0.bias"])
    assert layer.down.weight not in optimizer.state
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [layer.up.weight]})
    with pytest.raises(errors.ConfigError, match="is not one of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    train(wrapped, optimizer, range(5, 6))


def test_one_optimizer_at_a_time() -> None:
    wrapped = wrap()
    with OptimizerCtx():
        plain = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    call(wrapped, 0)
    wrapped.step(plain.step)
    old = optim.SGD(wrapped, lr=0.1)
    train(wrapped, old, range(1, 3), is_async=True)
    before = values(wrapped)
    optimizer = optim.SGD(wrapped, lr=0.1)
    assert_equal(values(wrapped), before)
    call(wrapped, 3)
    with pytest.raises(errors.ConfigError, match="only the newest"):
        wrapped.step(old)
    with pytest.raises(errors.ConfigError, match="compact optimizer"):
        wrapped.step(plain.step)
    with pytest.raises(errors.ConfigError, match="no optimizer parameters"):
        list(wrapped.optim_parameters())
    wrapped.step(optimizer)
    del optimizer, old
    gc.collect()
    with OptimizerCtx():
        again = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    call(wrapped, 4)
    wrapped.step(again.step, False)


BAD: list[tuple[Any, str]] = [
    (lambda w: optim.AdamW(w, master="bfloat16"), "master='bfloat16'.*'split', 'float32'"),
    (lambda w: optim.AdamW(w, state_dtype="float16"), "state_dtype='float16'"),
    (lambda w: optim.AdamW(w, max_grad_norm=0.0), "max_grad_norm=0.0"),
    (lambda w: optim.AdamW(w, lr=-1.0), "lr"),
    (lambda w: optim.AdamW(w, groups=[{"params": "nothing*"}]), "'nothing\\*'.*selects no parameter"),
    (lambda w: optim.AdamW(w, groups=[{"lr": 0.1}]), "groups.0.: got a dict with ..lr.., expected .*'params'"),
    (lambda w: optim.AdamW(w, groups=[{"params": "*bias"}, "*weight"]), "groups.1.: got str, expected a dict"),
    (lambda w: optim.AdamW(w).load_state_dict({}), "no 'param_groups' but nothing"),
    (lambda w: optim.AdamW(w).load_state_dict(w.state_dict()), "no 'param_groups' but '.*state_dict.. of an optimizer"),
    (lambda w: optim.AdamW(nn.Linear(2, 2)), r"got Linear, a module that is not wrapped.*model.parameters\(\)"),
    (lambda w: optim.SGD(nn.Sequential(nn.Linear(2, 2)), lr=0.1), "optim.SGD.*got Sequential.*RoundPipe model"),
    (lambda w: optim.AdamW([nn.Parameter(torch.ones(2))], master="split"), "master=.*compact path"),
    (lambda w: optim.AdamW(list(w.model.parameters()), groups=[{"params": "*"}]), "pass the model"),
    (lambda w: RoundPipe(nn.Linear(2, 2)).step(optim.AdamW(w)), "was made for the model"),
    (lambda w: w.step(optim.AdamW(w), True, 3), "a compact optimizer takes only scaler="),
    (lambda w: copy.deepcopy(optim.AdamW(w)), "neither copied nor pickled"),
    (lambda w: optim.AdamW(RoundPipe(nn.Linear(2, 2).double())), "float64.*OptimizerCtx"),
    (lambda w: optim.AdamW(RoundPipe(nn.Linear(2, 2).requires_grad_(False))), "nothing to train"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_refusals_say_what_to_do(number: int) -> None:
    wrapped = wrap()
    action, message = BAD[number]
    with pytest.raises(errors.ConfigError, match=message):
        action(wrapped)
    train(wrapped, optim.AdamW(wrapped), range(1))
    wrapped.synchronize()


def test_states_that_do_not_fit_change_nothing() -> None:
    wrapped = wrap()
    optimizer = optim.AdamW(wrapped, lr=1e-2)
    train(wrapped, optimizer, range(2))
    good = copy.deepcopy(optimizer.state_dict())
    few, short, shape = copy.deepcopy(good), copy.deepcopy(good), copy.deepcopy(good)
    few["param_groups"].append({"params": []})
    short["param_groups"][0]["params"].pop()
    shape["state"][3]["exp_avg"] = torch.zeros(3, 5)
    for bad, message in ((few, "2 parameter groups"), (short, "parameters, the"), (shape, "'exp_avg'.*shape")):
        bad["param_groups"][0]["lr"] = 7.0
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for key, state in optimizer.state_dict()["state"].items():
        assert_equal(state, good["state"][key])
