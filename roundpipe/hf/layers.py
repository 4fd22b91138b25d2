"""The layers of a converted causal language model: prefix, blocks, head.

They hand one tuple to each other, `(hidden_states, constants, plan)`: the hidden state [B, S, H], the tensors that
later layers need as they are (masks, position embeddings, labels, ...) and a `CallPlan`, which says where in a layer's
arguments each of them belongs. The plan holds no tensor, so the tuple may travel to any device.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe.hf.capture import BlockTraits, CallTemplate, graft, run_after_last_block, run_until_last_block
from roundpipe.models.function import causal_lm_loss

__all__ = ["BlockLayer", "CallPlan", "HeadLayer", "LayerState", "PrefixLayer"]

logger = logging.getLogger(__name__)

_REFUSED_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
_CACHES = ("cache", "past_key_values")


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How this call's layers are called. Immutable and free of tensors."""

    blocks: tuple[CallTemplate, ...]
    head: CallTemplate
    return_logits: bool
    return_dict: bool


LayerState = tuple[Tensor, tuple[Tensor, ...], CallPlan]


class PrefixLayer(nn.Module):
    """All that comes before the first block. Takes the arguments of the model's own forward and `return_logits`."""

    def __init__(
        self, skeleton: nn.Module, path: tuple[str, ...], traits: BlockTraits, trunk_arguments: frozenset[str]
    ) -> None:
        """skeleton: the model without its blocks and head; path: where the blocks belong in it; trunk_arguments: names
        of the arguments that only the trunk looks at."""
        super().__init__()
        self.skeleton = skeleton
        self._path = path
        self._traits = traits
        self._trunk_arguments = trunk_arguments
        self._signature = inspect.signature(type(skeleton).forward)

    def forward(self, *args, return_logits: bool = True, **kwargs) -> LayerState:
        """input_ids [B, S] int64 or inputs_embeds [B, S, H], attention_mask, position_ids, labels, ... as the model's
        own forward takes them -> the state of the first block. return_logits=False: the head gives the loss alone."""
        call = self._bind(args, kwargs)
        return_dict = call.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.skeleton.config, "return_dict", True)
        if not return_logits and call.get("labels") is None:
            raise ValueError("return_logits=False without labels leaves nothing to return; pass labels")
        head = {name: value for name, value in call.items() if name not in self._trunk_arguments}
        recorder = run_until_last_block(self.skeleton, self._path, self._traits, (), call)
        plan = CallPlan(tuple(recorder.calls), recorder.template(head), bool(return_logits), bool(return_dict))
        return recorder.hidden, tuple(recorder.constants), plan

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name, checked."""
        bound = self._signature.bind(self.skeleton, *args, **kwargs)
        call: dict[str, Any] = {}
        for name, value in list(bound.arguments.items())[1:]:
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                call.update(value)
            else:
                call[name] = value
        for name in _CACHES:
            if call.get(name) is not None:
                raise ValueError(f"{name} was given: streamed training keeps no key/value cache; leave it out")
        if call.get("use_cache"):
            raise ValueError("use_cache=True: streamed training keeps no key/value cache; leave it out")
        for name in _REFUSED_OUTPUTS:
            if call.get(name, getattr(self.skeleton.config, name, False)):
                raise NotImplementedError(
                    f"{name} is set: results of single blocks stay where the block runs; unset it in the call and in "
                    "the model's config"
                )
        call["use_cache"] = False
        return call


class BlockLayer(nn.Module):
    """One of the model's own blocks, called with the arguments that its trunk meant for it."""

    def __init__(self, block: nn.Module, index: int) -> None:
        super().__init__()
        self.block = block
        self._index = index

    def forward(self, state: LayerState) -> LayerState:
        """The state with this block's hidden state; constants and plan are passed on as they are."""
        hidden, constants, plan = state
        args, kwargs = plan.blocks[self._index].fill(hidden, constants)
        output = self.block(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output, constants, plan


class _LogitsAreTransformed(Exception):
    """The model computes on its logits before the loss, so they cannot be left out."""


class _NoLogits(nn.Module):
    """In the place of the output projection: keeps its input and returns a marker of vocabulary size zero."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Tensor | None = None
        self.marker: Tensor | None = None

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.kept = hidden_states
        self.marker = hidden_states.new_empty((*hidden_states.shape[:-1], 0))
        return self.marker


class HeadLayer(nn.Module):
    """All that comes after the last block: final norm, output projection and, with labels, the model's own loss."""

    def __init__(
        self, skeleton: nn.Module, path: tuple[str, ...], traits: BlockTraits, projection: tuple[str, ...] | None
    ):
        """projection: path of the output projection if the loss may be computed from it in chunks, else None."""
        super().__init__()
        self.skeleton = skeleton
        self._path = path
        self._traits = traits
        self._projection = projection

    def forward(self, state: LayerState) -> Any:
        """The model's own output (its ModelOutput, or a tuple with return_dict=False). With return_logits=False its
        logits are None, and no more than one chunk of them has existed."""
        hidden, constants, plan = state
        kwargs = plan.head.fill(None, constants)
        kwargs.update(use_cache=False, return_dict=True)
        output = None
        if plan.return_logits:
            output = self._run(self.skeleton, hidden, kwargs)
        else:
            if self._projection is not None:
                try:
                    output = self._run(self._without_logits(), hidden, kwargs)
                except _LogitsAreTransformed:
                    logger.debug("%s transforms its logits; they are computed whole", type(self.skeleton).__name__)
            if output is None:
                output = self._run(self.skeleton, hidden, kwargs)
            output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return output if plan.return_dict else output.to_tuple()

    def _run(self, skeleton: nn.Module, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        return run_after_last_block(skeleton, self._path, self._traits, hidden, kwargs)

    def _without_logits(self) -> nn.Module:
        """A copy of the skeleton whose output projection and loss are replaced by the chunked loss."""
        projection = self.skeleton
        for name in self._projection:
            projection = projection._modules[name]
        stand_in = _NoLogits()
        skeleton = graft(self.skeleton, self._projection, stand_in)

        def loss_function(
            logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_
        ) -> Tensor:
            if logits is not stand_in.marker:
                raise _LogitsAreTransformed
            return causal_lm_loss(
                stand_in.kept,
                projection.weight,
                labels,
                bias=projection.bias,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
            )

        skeleton.loss_function = loss_function
        return skeleton


def trunk_arguments(model: nn.Module, trunk: nn.Module) -> frozenset[str]:
    """Named arguments of the trunk's forward: what the head does not need to see."""
    parameters = inspect.signature(type(trunk).forward).parameters.values()
    named = {p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return frozenset(named - {"self"} | set(_CACHES))


def uses_chunkable_loss(model: nn.Module, projection: nn.Module | None) -> bool:
    """Whether the model's loss is the plain causal cross entropy of a plain linear projection."""
    if type(projection) is not nn.Linear or torch.nn.utils.parametrize.is_parametrized(projection):
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    return getattr(model, "loss_function", None) is ForCausalLMLoss
