"""The chunked cross entropy as an operator: registration, values against whole logits, compilation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from roundpipe.errors import ConfigError
from roundpipe.models.function import causal_lm_loss, linear_cross_entropy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]
TOKENS, VOCABULARY, WIDTH = 21, 37, 12
op = torch.ops.roundpipe.linear_cross_entropy.default


def inputs(dtype: torch.dtype = torch.float64, device: str = "cpu", grad: bool = True) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(*size, generator=generator) for size in ((TOKENS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))]
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[4:9] = -100
    hidden, weight, bias = (tensor.to(device, dtype).requires_grad_(grad) for tensor in made)
    return hidden, weight, bias, targets.to(device)


def whole(hidden, weight, bias, targets, softcap=0.0, ignore_index=-100, reduction="mean") -> Tensor:
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize(("chunk", "with_bias"), [(1, True), (8, False), (100, True)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_whole_logits(reduction: str, chunk: int, with_bias: bool, softcap: float) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = (hidden, weight, bias) if with_bias else (hidden, weight)
    used = bias if with_bias else None
    plain = whole(hidden, weight, used, targets, softcap, reduction=reduction)
    loss = linear_cross_entropy(hidden, weight, targets, used, softcap=softcap, reduction=reduction, chunk_tokens=chunk)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, leaves), torch.autograd.grad(3 * plain, leaves))
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, targets, used, softcap=softcap, reduction=reduction), plain
        )


def test_gradients_are_those_of_the_function() -> None:
    hidden, weight, bias, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, targets, b, softcap=2.0, chunk_tokens=4),
        (hidden, weight, bias),
        fast_mode=True,
    )


@pytest.mark.parametrize("items", [7, torch.tensor(7)])
def test_items_in_batch_and_leading_dimensions(items) -> None:
    hidden, weight, bias, targets = inputs()
    targets = targets.masked_fill(targets == -100, 5)
    loss = linear_cross_entropy(
        hidden.view(3, 7, WIDTH), weight, targets.view(3, 7), bias, ignore_index=5, num_items_in_batch=items
    )
    torch.testing.assert_close(loss, whole(hidden, weight, bias, targets, ignore_index=5, reduction="sum") / 7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_errs_no_more_than_whole_logits(dtype: torch.dtype, device: str) -> None:
    exact_leaves = inputs(torch.float64)
    leaves = inputs(dtype, device)
    exact_inputs = [leaf.detach().double().cpu().requires_grad_() for leaf in leaves[:3]]
    exact = torch.autograd.grad(whole(*exact_inputs, exact_leaves[3]), exact_inputs)
    plain = torch.autograd.grad(whole(*leaves), leaves[:3])
    hidden, weight, bias, targets = leaves
    loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=4)
    assert loss.dtype == torch.float32
    got = torch.autograd.grad(loss, leaves[:3])
    for ours, torchs, truth, leaf in zip(got, plain, exact, leaves, strict=False):
        assert ours.dtype == dtype and ours.shape == leaf.shape
        error, error_of_whole = ((g.double().cpu() - truth).norm() / truth.norm() for g in (ours, torchs))
        assert error <= 1.5 * error_of_whole + 1e-7


def test_a_factor_is_not_rounded_to_sixteen_bits() -> None:
    hidden, weight, bias, targets = inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, bias, reduction="sum")
    (once,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 1.001, hidden)  # 1.001 is 1 in bfloat16
    exact = once.float() * 1.001
    torch.testing.assert_close(scaled, exact.to(torch.bfloat16), rtol=0, atol=0)


def test_ignored_tokens_that_overflow_count_nowhere() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    with torch.no_grad():
        hidden[4:9] = float("inf")
    loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_tokens=8)
    (grad_bias,) = torch.autograd.grad(loss, bias)
    assert loss.isfinite() and grad_bias.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", ["none", "all", "weight"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_opcheck(layout: str, needs: str, dtype: torch.dtype, device: str) -> None:
    hidden, weight, bias, targets = (tensor.detach() for tensor in inputs(dtype, device))
    if layout == "strided":
        hidden = hidden.t().contiguous().t()
        weight = torch.cat([weight, weight], 1)[:, :WIDTH]
    if needs == "all":
        hidden.requires_grad_(), bias.requires_grad_()
    weight.requires_grad_(needs != "none")
    flags = {"needs_hidden": needs == "all", "needs_weight": needs != "none", "needs_bias": needs == "all"}
    torch.library.opcheck(op, (hidden, weight, targets, bias), {**flags, "chunk_tokens": 8, "softcap": 3.0})
    if needs != "all":
        torch.library.opcheck(op, (hidden, weight, targets, None), flags)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("loss_fn", ["operator", "causal"])
def test_compiles_as_one_graph(loss_fn: str, device: str) -> None:
    hidden, weight, bias, targets = inputs(torch.float32, device)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        mixed = hidden.tanh()
        if loss_fn == "operator":
            return linear_cross_entropy(mixed, weight, targets, bias, softcap=2.0, chunk_tokens=8) * 2
        return causal_lm_loss(mixed[None], weight, targets[None], bias=bias, chunk_tokens=8) * 2

    leaves = (hidden, weight, bias)
    plain = run(*leaves)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(torch.autograd.grad(compiled, leaves), torch.autograd.grad(plain, leaves))


def test_second_derivatives_are_refused() -> None:
    hidden, weight, bias, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets, bias)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.sum().backward()


def test_misuse_is_explained() -> None:
    hidden, weight, bias, targets = inputs(torch.float32)
    cases = [
        (dict(hidden=hidden.long()), "'hidden'.*floating-point matrix"),
        (dict(weight=weight[:, 1:]), r"'weight'.*\[classes, 12\].*got torch.float32 \[37, 11\]"),
        (dict(weight=weight.double()), "'weight'.*got torch.float64"),
        (dict(targets=targets[1:]), r"'targets'.*\[21\].*got torch.int64 \[20\]"),
        (dict(targets=targets.int()), "'targets'.*got torch.int32"),
        (dict(bias=bias[1:]), r"'bias'.*\[37\].*got torch.float32 \[36\]"),
        (dict(chunk_tokens=-1), "'chunk_tokens'.*got -1"),
        (dict(), "'needs_hidden' requires grad, but needs_hidden is False"),
    ]
    for change, message in cases:
        arguments = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, **change}
        positional = [arguments.pop(name) for name in ("hidden", "weight", "targets", "bias")]
        with pytest.raises(ConfigError, match=message):
            op(*positional, **arguments)
    with pytest.raises(ConfigError, match="'reduction': expected 'mean' or 'sum', got 'none'"):
        linear_cross_entropy(hidden, weight, targets, bias, reduction="none")
