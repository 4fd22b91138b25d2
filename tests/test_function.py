"""Chunked linear cross entropy against the same loss over whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundpipe.models.function import ChunkedCompileLinearForCausalLMLoss, causal_lm_loss, default_chunk_tokens

V, H = 53, 16


def make_inputs(dtype=torch.float32, rows=3, length=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(V, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (rows, length), generator=generator)
    labels[0, 2:6] = -100
    return hidden, weight, bias, labels


def whole(hidden, weight, labels, bias=None, items=None, ignore_index=-100):
    logits = F.linear(hidden, weight, bias)[:, :-1].reshape(-1, V)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(logits, labels[:, 1:].reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss if items is None else loss / items


@pytest.mark.parametrize("items", [None, 5, torch.tensor(7)])
@pytest.mark.parametrize("chunk", [1, 4, 27, 1000])
def test_equals_whole_logits(chunk, items):
    hidden, weight, bias, labels = make_inputs(torch.float64)
    wanted = torch.autograd.grad(whole(hidden, weight, labels, bias, items) * 3, (hidden, weight, bias))
    loss = causal_lm_loss(hidden, weight, labels, bias=bias, num_items_in_batch=items, chunk_tokens=chunk)
    torch.testing.assert_close(loss, whole(hidden, weight, labels, bias, items))
    torch.testing.assert_close(torch.autograd.grad(loss * 3, (hidden, weight, bias)), wanted)


def test_gradients_are_those_of_the_function():
    hidden, weight, bias, labels = make_inputs(torch.float64, rows=2, length=4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: ChunkedCompileLinearForCausalLMLoss.apply(h, w, labels, b, None, -100, None, 3),
        (hidden, weight, bias),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_is_summed_in_fp32(dtype):
    hidden, weight, _, labels = make_inputs(dtype, rows=8, length=65)
    exact = torch.autograd.grad(whole(hidden.double(), weight.double(), labels), weight)[0].double()
    (one_by_one,) = torch.autograd.grad(causal_lm_loss(hidden, weight, labels, chunk_tokens=1), weight)
    (at_once,) = torch.autograd.grad(whole(hidden, weight, labels), weight)

    def error(got):
        return (got.double() - exact).norm() / exact.norm()

    assert one_by_one.dtype == dtype
    # Summed in the weights' dtype, 520 chunks would lose far more than rounding the result once does.
    assert error(one_by_one) <= 1.5 * error(at_once)


def test_small_gradients_survive_fp16():
    hidden, weight, _, labels = make_inputs(torch.float16)
    loss = causal_lm_loss(hidden, weight, labels, num_items_in_batch=1e9) * 1e9
    (got,) = torch.autograd.grad(loss, hidden)
    (wanted,) = torch.autograd.grad(whole(hidden, weight, labels, items=1), hidden)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


def test_shifted_labels_ignore_index_and_no_grad():
    hidden, weight, _, labels = make_inputs()
    wanted = whole(hidden, weight, labels)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(causal_lm_loss(hidden, weight, None, shift_labels=shifted), wanted)
    sevens = labels.masked_fill(labels == -100, 7)
    torch.testing.assert_close(
        causal_lm_loss(hidden, weight, sevens, ignore_index=7), whole(hidden, weight, sevens, ignore_index=7)
    )
    with torch.no_grad():
        torch.testing.assert_close(causal_lm_loss(hidden, weight, labels, chunk_tokens=5), wanted)


def test_frozen_weight_gets_no_gradient_and_autocast_is_followed():
    hidden, weight, _, labels = make_inputs()
    loss = causal_lm_loss(hidden, weight.detach(), labels)
    loss.backward()
    assert hidden.grad is not None and weight.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = causal_lm_loss(hidden, weight, labels)
        wanted = whole(hidden, weight, labels)
    torch.testing.assert_close(under_autocast, wanted)
    assert not torch.equal(under_autocast, loss)


def test_labels_of_another_shape_are_named():
    hidden, weight, _, labels = make_inputs()
    with pytest.raises(ValueError, match=r"labels have shape \(3, 8\), expected \(3, 9\)"):
        causal_lm_loss(hidden, weight, labels[:, :-1])


def test_logits_of_one_chunk_bound_the_memory():
    # Saved tensors seen by autograd, and the widest matrix made on the way, stay one chunk wide.
    hidden, weight, _, labels = make_inputs(rows=8, length=64)
    widest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal widest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[1] == V:
                widest = max(widest, result.shape[0])
            return result

    with Watch():
        causal_lm_loss(hidden, weight, labels, chunk_tokens=32).backward()
    assert widest == 32
    assert default_chunk_tokens(151_936, torch.device("cuda")) * 151_936 <= 1 << 28


@pytest.mark.needs_cuda
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_agrees_with_cpu(dtype, compiled, monkeypatch):
    monkeypatch.setenv("RPP_DISABLE_TORCH_COMPILE", "0" if compiled else "1")
    hidden, weight, bias, labels = (tensor.detach() for tensor in make_inputs(dtype, rows=8, length=65))
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.to(device).requires_grad_() for tensor in (hidden, weight, bias)]
        loss = causal_lm_loss(leaves[0], leaves[1], labels.to(device), bias=leaves[2], chunk_tokens=100)
        results.append([loss.detach().cpu(), *(grad.cpu() for grad in torch.autograd.grad(loss, leaves))])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, wanted in zip(results[1], results[0], strict=True):
        assert ((got - wanted).float().norm() / wanted.float().norm()).item() < tolerance
