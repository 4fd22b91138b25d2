"""Drop-in optimizers against those of torch.optim: every option, shape, dtype and way in and out of a state."""

from __future__ import annotations

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import roundpipe
from roundpipe import _ops, errors, optim

RTOL, ATOL = 1e-5, 1e-6
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = {"Adam": (optim.Adam, torch.optim.Adam), "AdamW": (optim.AdamW, torch.optim.AdamW),
         "SGD": (optim.SGD, torch.optim.SGD)}  # fmt: skip


class PlainLion(torch.optim.Optimizer):
    """The paper's three lines in torch operators."""

    def __init__(self, params: Any, lr: Any = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0, **rest: Any):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, maximize=rest.get("maximize")))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = average * beta1 + grad * (1 - beta1)
                if p.is_complex():
                    sign = torch.view_as_complex(torch.view_as_real(direction).sign())
                else:
                    sign = direction.sign()
                p.mul_(1 - lr * group["weight_decay"]).add_(sign, alpha=-lr)
                average.mul_(beta2).add_(grad, alpha=1 - beta2)


PAIRS["Lion"] = (optim.Lion, PlainLion)  # type: ignore[assignment]


def shapes_of_trouble(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Odd sizes, and memory in other orders than the elements'."""
    torch.manual_seed(1)
    tensors = [
        torch.randn((), dtype=dtype),
        torch.randn(0, 3, dtype=dtype),
        torch.randn(5, 7, dtype=dtype),
        torch.randn(33, 65, dtype=dtype).t(),
        torch.randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
        torch.randn(6, 10, dtype=dtype)[:, ::2],
        torch.randn(1, 9, 1, dtype=dtype).transpose(0, 1),
        torch.randn(70_001, dtype=dtype)[1:],
    ]
    return [nn.Parameter(t) for t in tensors]


def twins(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Equal parameters in other memory of the same strides."""
    made = []
    for p in parameters:
        # Stretched storage for tensors with gaps.
        other = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype)
        other.copy_(p.detach())
        made.append(nn.Parameter(other))
    return made


def set_gradients(step: int, *lists: list[nn.Parameter], scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for row in zip(*lists, strict=True):
        shape = row[0].shape
        gradient = torch.randn(shape, dtype=row[0].dtype, generator=generator) * scale
        if len(shape) == 2 and step % 2:  # in an order that is not the parameter's
            gradient = gradient.t().contiguous().t()
        for p in row:
            p.grad = gradient.clone()


def assert_same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, **tolerance: float) -> None:
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, **tolerance)
            a, b = ours.state[p], theirs.state[q]
            assert {k for k, v in a.items() if v is not None} == {k for k, v in b.items() if v is not None}
            for name, value in a.items():
                if value is None:
                    continue
                assert value.dtype == b[name].dtype and value.shape == b[name].shape
                torch.testing.assert_close(value, b[name], **tolerance)


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
