"""The operators of fused optimizer steps: formats, rounding, versions, threads, and misuse of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe import _ops, errors

X = torch.zeros(4)


def adam(**changed: Any) -> None:
    lists: dict[str, Any] = {n: [X.clone()] for n in ("masters", "gradients", "exp_avgs", "exp_avg_sqs")}
    numbers = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=False)
    _ops.adam_update(**{**lists, "published": [], "max_exp_avg_sqs": [], "steps": [1.0], **numbers, **changed})


def sgd(**changed: Any) -> None:
    lists: dict[str, Any] = {n: [X.clone()] for n in ("masters", "gradients", "momentum_buffers")}
    numbers = dict(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)
    _ops.sgd_update(**{**lists, "published": [], "first": [1], **numbers, **changed})


def lion(**changed: Any) -> None:
    lists: dict[str, Any] = {n: [X.clone()] for n in ("masters", "gradients", "exp_avgs")}
    numbers = dict(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
    _ops.lion_update(**{**lists, "published": [], **numbers, **changed})


NAN, GAPS = float("nan"), torch.zeros(8)[::2]
CASES: list[tuple[Any, dict[str, Any], str]] = [
    (adam, dict(gradients=[]), "'gradients'.*1 elements.*got 0"),
    (adam, dict(exp_avgs=[]), "'exp_avgs'.*1 elements"),
    (adam, dict(exp_avg_sqs=[X, X]), "'exp_avg_sqs'.*got 2"),
    (adam, dict(max_exp_avg_sqs=[X, X]), "'max_exp_avg_sqs'.*got 2"),
    (adam, dict(published=[X, X]), "'published'.*got 2"),
    (adam, dict(steps=[]), "'steps'.*got 0"),
    (adam, dict(steps=[0.0]), r"'steps\[0\]'.*1 or more.*got 0"),
    (adam, dict(masters=[X.double()]), r"'masters\[0\]'.*got Double"),
    (adam, dict(masters=[GAPS]), r"'masters\[0\]'.*non-contiguous"),
    (adam, dict(masters=[X.short()]), r"'published'.*for the split master masters\[0\].*no tensors"),
    (adam, dict(masters=[X.short()], published=[X]), r"'published\[0\]'.*bfloat16.*got Float"),
    (adam, dict(published=[X.int()]), r"'published\[0\]'.*got Int"),
    (adam, dict(gradients=[torch.zeros(5)]), r"'gradients\[0\]'.*4 elements.*got Float\[5\]"),
    (adam, dict(gradients=[X.to("meta")]), r"'gradients\[0\]'.*on meta"),
    (adam, dict(exp_avg_sqs=[X.int()]), r"'exp_avg_sqs\[0\]'.*float32, bfloat16 or float16.*got Int"),
    (adam, dict(seeds=[1, 2]), "'seeds'.*got 2"),
    (adam, dict(beta1=1.0), "'beta1'.*got 1"),
    (adam, dict(beta2=-0.5), "'beta2'"),
    (adam, dict(lr=float("inf")), "'lr'.*a finite number, got inf"),
    (adam, dict(eps=NAN), "'eps'"),
    (adam, dict(weight_decay=NAN), "'weight_decay'"),
    (sgd, dict(momentum_buffers=[]), "'momentum_buffers'.*1 elements"),
    (sgd, dict(first=[]), "'first'.*1 elements"),
    (sgd, dict(momentum=0.0), "'momentum_buffers'.*got 1"),
    (sgd, dict(seeds=[1]), "'steps'.*1 elements"),
    (sgd, dict(seeds=[1], steps=[-1.0]), r"'steps\[0\]'.*a count of steps"),
    (sgd, dict(momentum_buffers=[torch.zeros(3)]), r"'momentum_buffers\[0\]'.*4 elements"),
    *[(sgd, {name: NAN}, f"'{name}'") for name in ("lr", "momentum", "dampening", "weight_decay")],
    (lion, dict(exp_avgs=[]), "'exp_avgs'.*1 elements"),
    (lion, dict(beta1=1.0), "'beta1'"),
    (lion, dict(beta2=2.0), "'beta2'"),
    *[(lion, {name: NAN}, f"'{name}'") for name in ("lr", "weight_decay")],
    (_ops.split_master, dict(source=X, upper=X, low=X.short()), "'upper'.*bfloat16, got Float"),
    (_ops.split_master, dict(source=X, upper=X.bfloat16(), low=X.int()), "'low'.*int16, got Int"),
    (_ops.split_master, dict(source=X.double(), upper=X.bfloat16(), low=X.short()), "'source'.*float32"),
    (_ops.split_master, dict(source=X, upper=X.bfloat16()[:3], low=X.short()), "'upper'.*4 elements, as 'source'"),
    (_ops.split_master, dict(source=GAPS, upper=X.bfloat16(), low=X.short()), "'source'.*non-contiguous"),
    (_ops.join_master, dict(upper=X.bfloat16(), low=X.short(), target=X.double()), "'target'.*float32"),
    (_ops.join_master, dict(upper=X.bfloat16(), low=X.short()[1:], target=X), "'low'.*4 elements, as 'target'"),
]
OPERATOR = {adam: "adam_update", sgd: "sgd_update", lion: "lion_update"}
MISUSES = {OPERATOR.get(call, call.__name__) for call, _, _ in CASES}


@pytest.mark.parametrize(
    ("call", "arguments", "text"), CASES, ids=[f"{c.__name__}-{i}" for i, (c, *_) in enumerate(CASES)]
)
def test_misuse(call: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.ConfigError, match=text) as caught:
        call(**arguments)
    assert str(caught.value).startswith(f"roundpipe::{OPERATOR.get(call, call.__name__)}")


def test_a_refused_call_changes_nothing() -> None:
    first, second = torch.ones(100), torch.ones(100)
    with pytest.raises(errors.ConfigError, match=r"gradients\[1\]"):
        _ops.lion_update(
            [first, second], [], [first.clone(), torch.ones(99)], [torch.zeros(100), torch.zeros(100)],
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0,
        )  # fmt: skip
    assert torch.equal(first, torch.ones(100))


def test_a_split_master_is_the_float32_master() -> None:
    torch.manual_seed(0)
    sizes = (1, 63, 64, 65, 5000, 0, 100_001)
    whole = [torch.randn(n) for n in sizes]
    uppers = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    lows = [torch.empty(n, dtype=torch.int16) for n in sizes]
    for master, upper, low in zip(whole, uppers, lows, strict=True):
        _ops.split_master(master, upper, low)
    published = [torch.empty(n, dtype=torch.bfloat16) for n in sizes]
    moments = [[torch.zeros(n) for n in sizes] for _ in range(4)]
    for step in range(1, 6):
        gradients = [torch.randn(n).bfloat16() for n in sizes]
        options: dict[str, Any] = dict(
            lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, factor=0.5
        )
        steps = [float(step)] * len(sizes)
        _ops.adam_update(whole, published, gradients, moments[0], moments[1], [], steps, **options)
        _ops.adam_update(lows, uppers, gradients, moments[2], moments[3], [], steps, **options)
        for master, rounded, upper, low in zip(whole, published, uppers, lows, strict=True):
            joined = torch.empty_like(master)
            _ops.join_master(upper, low, joined)
            assert torch.equal(joined, master)
            assert torch.equal(rounded, master.bfloat16())
            bits = (upper.view(torch.int16).int() << 16) + low.int()
            assert torch.equal(bits, master.view(torch.int32))
            # Nearest; from torch's rounding it differs in ties alone, and then by the same distance.
            assert torch.equal((upper.float() - master).abs(), (rounded.float() - master).abs())


def test_published_weights_of_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        master, published = torch.randn(1000), torch.zeros(1000, dtype=dtype)
        adam(masters=[master], published=[published], gradients=[torch.randn(1000)], exp_avgs=[torch.zeros(1000)],
             exp_avg_sqs=[torch.zeros(1000)])  # fmt: skip
        assert torch.equal(published, master.to(dtype))


def stochastic_step(seed: int, step: float, average: Tensor, gradient: Tensor) -> Tensor:
    moment = average.clone()
    _ops.lion_update(
        [torch.zeros(len(gradient))], [], [gradient], [moment], lr=0.1, beta1=0.9, beta2=0.5, weight_decay=0.0,
        seeds=[seed], steps=[step],
    )  # fmt: skip
    return moment


def test_stochastic_rounding_does_not_depend_on_threads() -> None:
    torch.manual_seed(0)
    average, gradient = torch.randn(300_001).bfloat16(), torch.randn(300_001)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(stochastic_step(5, 2.0, average, gradient))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(results[0], stochastic_step(6, 2.0, average, gradient))
    assert not torch.equal(results[0], stochastic_step(5, 3.0, average, gradient))
    exact = 0.5 * average.float() + 0.5 * gradient
    assert not torch.equal(results[0], exact.bfloat16())
    assert ((results[0].float() - exact).abs() <= exact.abs() * torch.finfo(torch.bfloat16).eps).all()
    error = (results[0].float() - exact).double().mean().item()
    assert abs(error) < 5e-5  # rounding down everywhere would give some 1e-3


def test_the_same_tensors_in_other_lists_are_rounded_alike() -> None:
    torch.manual_seed(0)
    averages = [torch.randn(n).bfloat16() for n in (70, 1, 4000)]
    gradients = [torch.randn(n) for n in (70, 1, 4000)]
    together = [a.clone() for a in averages]
    _ops.lion_update(
        [torch.zeros(len(g)) for g in gradients], [], gradients, together, lr=0.1, beta1=0.9, beta2=0.5,
        weight_decay=0.0, seeds=[7, 8, 9], steps=[1.0, 2.0, 3.0],
    )  # fmt: skip
    for i in range(3):
        assert torch.equal(together[i], stochastic_step(7 + i, 1.0 + i, averages[i], gradients[i]))


def test_versions_of_all_that_is_written_are_bumped() -> None:
    lists = {n: [torch.zeros(4)] for n in ("masters", "published", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")}
    gradient = torch.ones(4)
    before = {name: tensors[0]._version for name, tensors in lists.items()}
    untouched = gradient._version
    adam(gradients=[gradient], **lists)
    assert {name: tensors[0]._version - 1 for name, tensors in lists.items()} == before
    assert gradient._version == untouched


@pytest.mark.parametrize("maximize", [False, True])
def test_the_factor_scales_gradients(maximize: bool) -> None:
    scaled, plain = [torch.ones(50)], [torch.ones(50)]
    gradient = torch.linspace(-1, 1, 50)
    sgd(masters=plain, gradients=[gradient], momentum_buffers=[torch.zeros(50)], maximize=maximize)
    sgd(masters=scaled, gradients=[(gradient * 1024).half()], momentum_buffers=[torch.zeros(50)], maximize=maximize,
        factor=1 / 1024)  # fmt: skip
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-4)
    assert scaled[0][0] == (0.9 if maximize else 1.1)
