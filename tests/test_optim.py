"""Drop-in optimizers against those of torch.optim: every option, shape and dtype."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import _ops, optim
from tests.optim_twins import ATOL, PAIRS, RTOL, assert_same_state, set_gradients, shapes_of_trouble, twins


def options_of(**choices: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


ADAM = list(
    options_of(weight_decay=(0, 0.1), amsgrad=(False, True), maximize=(False, True), betas=((0.9, 0.999), (0.0, 0.5)))
)
EVERY_OPTION = [
    *[("Adam", dict(lr=1e-2, decoupled_weight_decay=d, **o)) for o in ADAM for d in (False, True)],
    *[("AdamW", dict(lr=1e-2, **o)) for o in ADAM],
    ("Adam", dict(lr=1e-2, eps=1e-3)), ("Adam", {}), ("AdamW", {}), ("SGD", {}), ("Lion", {}),
    *[("SGD", dict(lr=1e-2, **o)) for o in options_of(momentum=(0, 0.9), dampening=(0, 0.5), weight_decay=(0, 0.1),
                                                     maximize=(False, True))],
    *[("SGD", dict(lr=1e-2, momentum=0.8, nesterov=True, **o)) for o in options_of(weight_decay=(0, 0.1))],
    *[("Lion", dict(lr=1e-3, **o)) for o in options_of(weight_decay=(0, 0.1), maximize=(False, True),
                                                      betas=((0.9, 0.99), (0.0, 0.5)))],
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), EVERY_OPTION, ids=lambda x: str(x).replace(" ", ""))
def test_hundred_steps_as_torch(name: str, options: dict[str, Any]) -> None:
    ours_class, theirs_class = PAIRS[name]
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(n)) for n in (1, 7, 16, 130)]
    theirs = twins(ours)
    a, b = ours_class(ours, **options), theirs_class(theirs, **options)
    for step in range(100):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    assert_same_state(a, b, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("isa", _ops.isa_names())
@pytest.mark.parametrize("name", PAIRS)
def test_any_memory_layout(name: str, isa: str) -> None:
    ours_class, theirs_class = PAIRS[name]
    ours = shapes_of_trouble()
    theirs = twins(ours)
    options: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1)
    options.update({"SGD": dict(momentum=0.9), "Adam": dict(amsgrad=True)}.get(name, {}))
    a, b = ours_class(ours, **options), theirs_class(theirs, **options)
    _ops.isa_force(isa)
    try:
        for step in range(5):
            set_gradients(step, ours, theirs)
            a.step()
            b.step()
    finally:
        _ops.isa_force("")
    assert_same_state(a, b, rtol=RTOL, atol=ATOL)
    for p, q in zip(ours, theirs, strict=True):
        assert p.stride() == q.stride()
        for key, value in a.state[p].items():
            assert key in ("step", "momentum_buffer") or value.stride() == b.state[q][key].stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", PAIRS)
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    ours_class, theirs_class = PAIRS[name]
    ours = shapes_of_trouble(dtype)
    theirs = twins(ours)
    options: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1)
    options.update({"SGD": dict(momentum=0.9), "Adam": dict(amsgrad=True)}.get(name, {}))
    a, b = ours_class(ours, **options), theirs_class(theirs, **options)
    for step in range(8):
        set_gradients(step, ours, theirs)
        a.step()
        b.step()
    exact = dtype in (torch.float64, torch.complex128)
    assert_same_state(a, b, rtol=1e-12 if exact else RTOL, atol=1e-14 if exact else ATOL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_low_precision_parameters_are_rounded_once_a_step(name: str, dtype: torch.dtype) -> None:
    """Each step is float32's step from the same low-precision numbers, rounded."""
    ours_class, theirs_class = PAIRS[name]
    options: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1)
    options.update({"SGD": dict(momentum=0.9), "AdamW": dict(amsgrad=True, eps=1e-4)}.get(name, {}))
    if name == "Lion":  # products that float32 holds exactly, so that the sign never hangs on a rounding
        options["betas"] = (0.875, 0.96875)
    ours = shapes_of_trouble(dtype)
    a = ours_class(ours, **options)
    for step in range(10):
        wide = [nn.Parameter(p.detach().float()) for p in ours]
        b = theirs_class(wide, **options)
        if a.state:
            before = copy.deepcopy(a.state_dict())
            before["param_groups"] = b.state_dict()["param_groups"]
            b.load_state_dict(before)
        set_gradients(step, ours)
        for p, q in zip(ours, wide, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        a.step()
        b.step()
        for p, q in zip(ours, wide, strict=True):
            pairs = [(p.detach(), q.detach())]
            pairs += [(v, b.state[q][k]) for k, v in a.state[p].items() if k != "step"]
            for low, exact in pairs:
                assert low.dtype == dtype
                info = torch.finfo(dtype)
                atol = max(0.51 * info.tiny * info.eps, 1e-5 * info.eps)  # the distance of subnormal numbers counts too
                torch.testing.assert_close(low.float(), exact, rtol=0.51 * info.eps, atol=atol)


def test_a_gradient_may_have_another_dtype() -> None:
    if not hasattr(nn.Parameter, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    ours = nn.Parameter(torch.randn(100))
    theirs = nn.Parameter(ours.detach().clone())
    ours.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
    gradient = torch.randn(100).bfloat16()
    ours.grad, theirs.grad = gradient, gradient.float()
    optim.AdamW([ours]).step()
    torch.optim.AdamW([theirs]).step()
    torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", PAIRS)
def test_numbers_may_be_tensors_and_schedulers_change_them(name: str) -> None:
    ours_class, theirs_class = PAIRS[name]
    ours = [nn.Parameter(torch.randn(20))]
    theirs = twins(ours)
    options: dict[str, Any] = {} if name == "SGD" else dict(betas=(torch.tensor(0.8), torch.tensor([0.95])))
    a = ours_class(ours, lr=torch.tensor(0.1), **options)
    b = theirs_class(theirs, lr=torch.tensor(0.1), **options)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (a, b)]
    for step in range(9):
        set_gradients(step, ours, theirs)
        for optimizer, scheduler in zip((a, b), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert isinstance(a.param_groups[0]["lr"], Tensor)
    assert float(a.param_groups[0]["lr"]) == pytest.approx(0.1 / 16)
    assert_same_state(a, b, rtol=RTOL, atol=ATOL)


def test_a_scheduler_may_cycle_betas_and_momentum() -> None:
    for name in ("Adam", "SGD"):
        ours_class, theirs_class = PAIRS[name]
        options: dict[str, Any] = dict(momentum=0.9) if name == "SGD" else {}
        ours = [nn.Parameter(torch.randn(20))]
        theirs = twins(ours)
        a, b = ours_class(ours, **options), theirs_class(theirs, **options)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20) for o in (a, b)]
        for step in range(19):
            set_gradients(step, ours, theirs)
            for optimizer, scheduler in zip((a, b), schedulers, strict=True):
                optimizer.step()
                scheduler.step()
        assert_same_state(a, b, rtol=RTOL, atol=ATOL)


def test_parameters_without_gradient_are_left_alone_and_count_their_own_steps() -> None:
    ours = [nn.Parameter(torch.randn(9)) for _ in range(3)]
    theirs = twins(ours)
    a, b = optim.Adam(ours, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    for step in range(6):
        set_gradients(step, ours, theirs)
        for index in range(3):
            if step % (index + 1):
                ours[index].grad = theirs[index].grad = None
        a.step()
        b.step()
    assert [float(a.state[p]["step"]) for p in ours] == [6, 3, 2]
    assert_same_state(a, b, rtol=RTOL, atol=ATOL)
    a.zero_grad()
    assert all(p.grad is None for p in ours)
    before = [p.detach().clone() for p in ours]
    a.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.5)])
def test_infinities_and_nan_spread_as_in_torch(name: str, betas: tuple[float, float]) -> None:
    special = [float("inf"), float("-inf"), float("nan"), 0.0, 1e-42, -1e25, 3e38, 1.0]
    grid = torch.tensor(list(itertools.product(special, special)))
    ours = [nn.Parameter(grid[:, 0].clone())]
    theirs = twins(ours)
    options: list[dict[str, Any]] = [dict(momentum=0.9, weight_decay=w) for w in (0, 0.1)]
    if name != "SGD":
        options = [dict(betas=betas, amsgrad=s, weight_decay=w) for s in (False, True) for w in (0, 0.1)]
    for option in options:
        a, b = PAIRS[name][0](ours, lr=0.1, **option), PAIRS[name][1](theirs, lr=0.1, foreach=False, **option)
        for _ in range(3):
            ours[0].grad, theirs[0].grad = grid[:, 1].clone(), grid[:, 1].clone()
            a.step()
            b.step()
            assert_same_state(a, b, rtol=RTOL, atol=ATOL, equal_nan=True)


def test_a_gradient_may_be_a_lazy_negation_or_conjugate() -> None:
    values = torch.randn(40, dtype=torch.complex64)
    lazy = [values.conj().imag, values.conj()]
    assert lazy[0].is_neg() and lazy[1].is_conj()
    for gradient in lazy:
        ours, theirs = (nn.Parameter(torch.ones_like(gradient)) for _ in range(2))
        ours.grad, theirs.grad = gradient, gradient.resolve_conj().resolve_neg()
        optim.AdamW([ours], lr=0.1).step()
        torch.optim.AdamW([theirs], lr=0.1).step()
        torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=ATOL)


def test_lion_shows_a_gradient_that_is_nan() -> None:
    for dtype in (torch.float32, torch.float64):
        parameter = nn.Parameter(torch.ones(40, dtype=dtype))
        parameter.grad = torch.ones(40, dtype=dtype)
        parameter.grad[7] = float("nan")
        optim.Lion([parameter], lr=0.5).step()
        assert parameter.isnan().nonzero().tolist() == [[7]]
        assert parameter[8] == 0.5


def test_an_update_is_seen_by_autograd() -> None:
    for memory in (torch.randn(4, 4), torch.randn(4, 4).t(), torch.randn(4, 8)[:, ::2]):
        weight = nn.Parameter(memory)
        loss = (weight * weight).sum()
        loss.backward(retain_graph=True)
        before = weight._version
        optim.AdamW([weight]).step()
        assert weight._version > before
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_wrapped_model_trains_with_them() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(8, 6), torch.randn(8, 3)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    roundpipe.use_devices("host:2")
    wrapped = roundpipe.RoundPipe(copy.deepcopy(plain))
    with roundpipe.OptimizerCtx():
        ours = optim.AdamW(wrapped.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for _ in range(5):
        wrapped.forward_backward(
            (inputs,), label=labels, loss_fn=lambda out, label: nn.functional.mse_loss(out, label, reduction="sum") / 24
        )
        wrapped.step(lambda: (ours.step(), ours.zero_grad()), is_async=False)
        theirs.zero_grad()
        nn.functional.mse_loss(plain(inputs), labels).backward()
        theirs.step()
    for p, q in zip(wrapped.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
