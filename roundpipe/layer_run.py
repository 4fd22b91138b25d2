"""A model's layers run once on tensors without values: their memory, and how much they compute.

Layers that are alike are run once: blocks of a language model differ in their weights only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .errors import ConfigError
from .gpu_kernels import kernels_of
from .hf.assumed_values import assumed_values
from .layer_memory import FakeRun, LayerMemory, Measured, _caller, _shapes, _tree_bytes

__all__ = ["LayerRun", "Work"]


@dataclass(frozen=True)
class Work:
    """Of one layer's forward for one microbatch: floating-point operations of its products, and operators launched."""

    flops: int
    operators: int


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Both products. torch's own formula refuses groups of query heads before 2.12."""
    batch, heads, rows, dim = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (dim + value.shape[-1])


_FORMULAS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention: _attention_flops,
    torch.ops.aten._scaled_dot_product_efficient_attention: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.operators += not func.is_view
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
        return out


class LayerRun(FakeRun):
    """
    Args:
        layers: with or without values.
        kind: "cuda" or "host": whose kernels count, see gpu_kernels.py. Neither needs a GPU.
    """

    def __init__(self, layers: Sequence[nn.Module], kind: str) -> None:
        super().__init__(layers, torch.device("cpu"))
        self._kind = kind
        self._layers = list(layers)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any, loss_fn: Callable[[Any, Any], Any] | None
    ) -> tuple[Measured, tuple[Work, ...]]:
        """Memory and work of every layer (the loss belongs to the last) for a microbatch of these arguments.

        Raises ConfigError for a layer whose course depends on values.
        """
        found: list[LayerMemory] = []
        work: list[Work] = []
        known: dict[Any, tuple[LayerMemory, Work, Any]] = {}
        what = "the model's input"
        try:
            with assumed_values(), kernels_of(self._kind):
                tree: Any = self._faked((args, kwargs))
                for index, replica in enumerate(self._replicas):
                    what = f"layer {index} ({type(self._layers[index]).__name__})"
                    key = (index == 0, self._kinds[index], _shapes(tree))
                    if key not in known:
                        known[key] = self._run_one(_caller(replica, index == 0), tree)
                    memory, done, tree = known[key]
                    found.append(memory)
                    work.append(done)
                label = self._faked(label)
                loss = None
                if loss_fn is not None:
                    what, function = "loss_fn", loss_fn
                    loss, done, _ = self._run_one(lambda out: _losses(function(out, label)), tree, is_loss=True)
                    work[-1] = Work(work[-1].flops + done.flops, work[-1].operators + done.operators)
        except Exception as error:
            if isinstance(error, ConfigError):
                raise
            reason = next(iter(str(error).strip().splitlines()), "")
            raise ConfigError(
                f"{what} cannot be estimated: {type(error).__name__}: {reason}. Its course may depend on values; take "
                "the memory from a first iteration (roundpipe.memory_report()) instead"
            ) from error
        return Measured(tuple(found), loss, _tree_bytes(label)), tuple(work)

    def _run_one(
        self, function: Callable[[Any], Any], tree: Any, is_loss: bool = False
    ) -> tuple[LayerMemory, Work, Any]:
        counter = _Counter()

        def counted(value: Any) -> Any:
            if counter.operators:  # in the first run already
                return function(value)
            with counter:
                return function(value)

        memory, out = self._measure(counted, tree, True, is_loss)
        return memory, Work(counter.flops, counter.operators), out


def _losses(value: Any) -> Any:
    for loss in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {got}; expected a one-element tensor, or several of them in a list.")
    return value
