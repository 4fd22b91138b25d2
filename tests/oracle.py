"""The oracle: the same layers in a plain loop over the same microbatches with the same random numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe import random_state


def split(tree: Any, pieces: int) -> list[Any]:
    """Every tensor with dimensions on dim 0, as torch.tensor_split."""
    leaves, spec = pytree.tree_flatten(tree)
    columns = [
        list(torch.tensor_split(leaf, pieces)) if isinstance(leaf, torch.Tensor) and leaf.dim() else [leaf] * pieces
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([column[i] for column in columns], spec) for i in range(pieces)]


@contextlib.contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """The generators a layer may draw from: the CPU's, and the device's own."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_state.seeded(seed))
        if device != "cpu":
            stack.enter_context(random_state.seeded(seed, device))
        yield


def forward_backward(
    layers: list[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    label: Any = None,
    loss_fn: Callable[[Any, Any], Any] = lambda out, _: out,
    num_microbatch: int = 1,
    device: str = "cpu",
) -> torch.Tensor:
    """Sum of the losses; gradients accumulate in the layers' parameters. Draws one call seed, as RoundPipe does."""
    call_seed = random_state.draw_call_seed()
    pieces = split((args, kwargs or {}), num_microbatch)
    labels = split(label, num_microbatch)
    total = None
    for m, (piece, piece_kwargs) in enumerate(pieces):
        value: Any = None
        for index, layer in enumerate(layers):
            with seeded(random_state.layer_seed(call_seed, m, index), device):
                value = layer(*piece, **piece_kwargs) if index == 0 else layer(value)
        with seeded(random_state.layer_seed(call_seed, m, len(layers)), device):
            loss = loss_fn(value, labels[m])
        loss.backward()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None
    return total


def twin(model: nn.Module) -> nn.Module:
    """An independent copy with the same values, for the oracle."""
    return copy.deepcopy(model)


def assert_close_to_scale(
    got: torch.Tensor | None, want: torch.Tensor | None, what: str, tolerance: float = 1e-6
) -> None:
    """Within ``tolerance`` of the tensor's largest magnitude; None only where the other is None."""
    assert (got is None) == (want is None), f"{what}: got {got is not None}, want {want is not None}"
    if got is None or want is None:
        return
    assert got.shape == want.shape and got.dtype == want.dtype, what
    scale = max(float(want.abs().max()), 1e-30) if want.numel() else 1.0
    error = float((got - want).abs().max()) / scale if want.numel() else 0.0
    assert error <= tolerance, f"{what}: off by {error:.2e} of its scale"


def assert_same_gradients(got: nn.Module, want: nn.Module, bitwise: bool = False) -> None:
    others = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        other = others[name]
        if bitwise:
            assert (parameter.grad is None) == (other.grad is None), name
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, other.grad), f"{name} differs in some bit"
        else:
            assert_close_to_scale(parameter.grad, other.grad, f"gradient of {name}")


def assert_same_gradients_within(got: nn.Module, want: nn.Module, tolerance: float) -> None:
    """Of the model's largest gradient: some are zero by symmetry, and only rounding is left of them."""
    others = dict(want.named_parameters())
    for name, parameter in got.named_parameters():
        assert (parameter.grad is None) == (others[name].grad is None), name
    _assert_within(
        {n: p.grad for n, p in got.named_parameters() if p.grad is not None},
        {n: p.grad for n, p in others.items() if p.grad is not None},
        tolerance,
        "gradient of ",
    )


def assert_same_state_within(got: nn.Module, want: nn.Module, tolerance: float) -> None:
    """Of the model's largest weight or buffer, for the same reason."""
    mine, others = (
        {n: value.double() for n, value in one.state_dict().items() if value.numel()} for one in (got, want)
    )
    _assert_within(mine, others, tolerance, "")


def _assert_within(
    got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> None:
    largest = max(float(tensor.detach().abs().max()) for tensor in want.values() if tensor.numel())
    for name, tensor in got.items():
        error = float((tensor - want[name]).detach().abs().max()) / largest
        assert error <= tolerance, f"{what}{name}: off by {error:.2e} of the largest"


def assert_same_state(got: nn.Module, want: nn.Module, tolerance: float = 1e-6) -> None:
    others = want.state_dict()
    for name, value in got.state_dict().items():
        if value.is_floating_point():
            assert_close_to_scale(value, others[name], name, tolerance)
        else:
            assert torch.equal(value, others[name]), name
