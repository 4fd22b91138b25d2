"""Bytes of activations: what calls measure, against sums written down by hand and against a plain forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe.activation_sizes import ActivationSizes

from .model_zoo import CASES
from .plans import one_layer_stages

ROWS, WIDTH = 6, 8


def all_in_one(num_layers: int) -> ModelExecutePlan:
    plan = ModelExecutePlan()
    plan.bwd_plan = [range(num_layers)]
    return plan


def measured(model: nn.Sequential, args: tuple[Any, ...], **config: Any) -> list[tuple[int, int] | None]:
    wrapped = RoundPipe(model)
    wrapped.forward_backward(args, loss_fn=_sum, run_config=RoundPipeRunConfig(**config))
    wrapped.synchronize()
    return [wrapped._state.measurements.sizes.of_layer(i) for i in range(len(model))]


def _sum(out: torch.Tensor, label: Any) -> torch.Tensor:
    return out.sum()


@pytest.mark.parametrize("make_plan", [one_layer_stages, all_in_one], ids=["stages", "fused"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_sizes_written_down_by_hand(make_plan: Callable[[int], ModelExecutePlan], grain: str) -> None:
    """The same whether a forward keeps its graph or not, however the layers are cut into stages."""
    roundpipe.use_devices("host:2")
    model = nn.Sequential(
        nn.Linear(WIDTH, 32),  # saves its input alone; its output counts for it
        nn.Tanh(),  # saves its output
        nn.Sequential(nn.Linear(32, 16), nn.GELU(), nn.Linear(16, WIDTH)),  # saves both values on the way
        nn.ReLU(inplace=True),  # in the memory of its input
        nn.Dropout(0.5),  # a mask of its own, and its output
    )
    rows = ROWS // 2  # of a microbatch
    sizes = measured(model, (torch.randn(ROWS, WIDTH),), num_microbatch=2, recompute_grain=grain,
                     execute_plan=make_plan(5))  # fmt: skip
    one = rows * 4
    assert sizes[0] == (one * WIDTH, one * 32)
    assert sizes[1] == (one * 32, one * 32)
    assert sizes[2] == (one * 32, one * (16 + 16 + WIDTH))
    assert sizes[3] == (one * WIDTH, 0)
    assert sizes[4] is not None and sizes[4][0] == one * WIDTH
    mask = sizes[4][1] - one * WIDTH - 4  # besides the output, and the loss
    assert mask in (rows * WIDTH, one * WIDTH)  # bytes or floats, as torch likes


def plain_inner_bytes(layer: nn.Module, x: Any, requires_grad: bool) -> tuple[int, Any]:
    """What a layer's graph keeps beside its input and its weights, in a forward outside RoundPipe."""
    kept: list[torch.Tensor] = []
    leaves = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), x)
    for leaf in torch.utils._pytree.tree_leaves(leaves) if requires_grad else ():
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaf.requires_grad_(True)
    # An in-place layer may not write a leaf.
    entered = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t * 1 if t.requires_grad else t, leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t.detach(), lambda t: t):
        out = layer(entered)
    known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(entered) if torch.is_tensor(t)}
    known |= {p.untyped_storage().data_ptr() for p in layer.parameters()}
    tensors = kept + [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(size for pointer, size in found.items() if pointer not in known), out


@pytest.mark.parametrize("name", ["mlp", "odd_outputs", "tuples", "weight_norm", "cnn"])
def test_as_much_as_a_plain_forward_keeps(name: str) -> None:
    roundpipe.use_devices("host:1")
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make().eval()  # no random masks: the plain forward draws others
    args, label = case.batch(4)
    wrapped = RoundPipe(model)
    wrapped.eval()
    wrapped.forward_backward(args, label=label, loss_fn=case.loss_fn, run_config=RoundPipeRunConfig(num_microbatch=1))
    wrapped.synchronize()
    sizes = wrapped._state.measurements.sizes
    value: Any = args[0]
    for i, layer in enumerate(model[:-1]):  # the last one's includes the loss
        expected, value = plain_inner_bytes(layer, value, requires_grad=i > 0)
        got = sizes.of_layer(i)
        assert got is not None
        # Constants of a layer (buffers, lifted scalars) may count or not.
        assert abs(got[1] - expected) <= 0.1 * expected + 200, (i, type(layer).__name__, got, expected)


def test_a_larger_batch_is_measured_again_a_smaller_one_is_not() -> None:
    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 4)))
    sizes = wrapped._state.measurements.sizes
    seen = []
    for rows in (4, 2, 8, 4):
        revision = sizes.revision
        wrapped.forward_backward((torch.randn(rows, WIDTH),), loss_fn=_sum, run_config=RoundPipeRunConfig(
            num_microbatch=1))  # fmt: skip
        wrapped.synchronize()
        seen.append((sizes.of_layer(1), sizes.revision > revision))
    assert seen == [((256, 256), True), ((256, 256), False), ((512, 512), True), ((512, 512), False)]


def test_sizes_in_proportion_until_a_larger_batch_was_measured() -> None:
    sizes = ActivationSizes(1)
    assert sizes.begin(100) and not sizes.known
    sizes.note(0, 100, 40, 600)
    assert sizes.known and not sizes.begin(100)
    assert sizes.begin(250)
    assert sizes.of_layer(0) == (100, 1500)
    sizes.note(0, 250, 90, 1000)
    assert sizes.of_layer(0) == (90, 1000)
    sizes.note(0, 250, 0, 50, more=True)
    assert sizes.of_layer(0) == (90, 1050)
    sizes.note(0, 100, 1, 1)  # a smaller call that ended late
    assert sizes.of_layer(0) == (90, 1050)
    sizes.forget()
    assert sizes.begin(100)
    sizes.note(0, 100, 10, 20)
    assert sizes.of_layer(0) == (25, 50)  # the larger batch may come again


def test_unfrozen_layers_are_measured_again() -> None:
    """A frozen layer below everything that is trained keeps nothing but its output."""
    roundpipe.use_devices("host:1")
    inside = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
    wrapped = RoundPipe(nn.Sequential(inside.requires_grad_(False), nn.Linear(WIDTH, 4)))
    sizes = wrapped._state.measurements.sizes
    inner = []
    for _ in range(2):
        wrapped.forward_backward((torch.randn(4, WIDTH),), loss_fn=_sum, run_config=RoundPipeRunConfig(
            num_microbatch=1))  # fmt: skip
        wrapped.synchronize()
        inner.append((sizes.of_layer(0) or (0, 0))[1])
        inside.requires_grad_(True)
    assert inner == [4 * WIDTH * 4, 4 * (WIDTH + 16) * 4]


@pytest.mark.parametrize("plan", [one_layer_stages, all_in_one])
def test_measuring_does_not_hide_a_tensor_that_was_overwritten(plan: Callable[[int], ModelExecutePlan]) -> None:
    class Overwrites(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.exp(super().forward(x))
            return y.add_(1.0)

    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 4), Overwrites(4, 4)))
    for _ in range(2):
        with pytest.raises(roundpipe.errors.StageError, match="modified by an inplace operation"):
            wrapped.forward_backward(
                (torch.randn(2, 4),), loss_fn=_sum, run_config=RoundPipeRunConfig(execute_plan=plan(2))
            )
