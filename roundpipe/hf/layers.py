"""The layers of a converted causal language model: prefix, blocks, head.

They hand one tuple to each other, `(hidden_states, constants, router_logits, plan)`: the hidden state [B, S, H], the
tensors that later layers need as they are (masks, position embeddings, labels, ...), for each block so far the logits
of its routers if they were asked for, and a `CallPlan`, which says where in a layer's arguments each of the constants
belongs. The plan holds no tensor, so the tuple may travel to any device.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe.hf.capture import BlockTraits, CallTemplate, graft, run_after_last_block, run_until_last_block
from roundpipe.hf.pending_logits import LogitsAreTransformed, PendingLogits
from roundpipe.hf.router_logits import append_router_logits, collecting_router_logits
from roundpipe.hf.routing import call_replaying_routes
from roundpipe.models.function import causal_lm_loss

__all__ = ["BlockLayer", "CallPlan", "HeadLayer", "LayerState", "PrefixLayer"]

logger = logging.getLogger(__name__)

_REFUSED_OUTPUTS = ("output_hidden_states", "output_attentions")
_ROUTER_LOGITS = "output_router_logits"
_CACHES = ("cache", "past_key_values")
_NO_CACHE = (
    "streamed calls keep no key/value cache; leave it out. To continue a text call generate() on the wrapped model, "
    "which runs the host's model on the CPU, with a cache"
)


@dataclass(frozen=True, eq=False)
class CallPlan:
    """How this call's layers are called. Immutable and free of tensors."""

    blocks: tuple[CallTemplate, ...]
    head: CallTemplate
    return_logits: bool
    return_dict: bool
    router_logits: bool


RouterLogits = tuple[tuple[Tensor, ...], ...]
LayerState = tuple[Tensor, tuple[Tensor, ...], RouterLogits, CallPlan]


class _RunsTheModel(nn.Module):
    """Runs the model's own forward with stubs in the places of blocks, which torch.compile cannot follow."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Stays as it is. The blocks are where the time goes."""


class PrefixLayer(_RunsTheModel):
    """All that comes before the first block. Takes the arguments of the model's own forward and `return_logits`."""

    def __init__(
        self,
        skeleton: nn.Module,
        path: tuple[str, ...],
        traits: BlockTraits,
        trunk_arguments: frozenset[str],
        collects_router_logits: bool,
    ) -> None:
        """skeleton: the model without its blocks and head; path: where the blocks belong in it; trunk_arguments: names
        of the arguments that only the trunk looks at; collects_router_logits: whether blocks can give them."""
        super().__init__()
        self.skeleton = skeleton
        self._path = path
        self._traits = traits
        self._trunk_arguments = trunk_arguments
        self._collects_router_logits = collects_router_logits
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
        routers = bool(call.get(_ROUTER_LOGITS))
        hidden_from_head = self._trunk_arguments
        if routers:  # the loss that balances the experts leaves padding out
            hidden_from_head = hidden_from_head - {_ROUTER_LOGITS, "attention_mask"}
        head = {name: value for name, value in call.items() if name not in hidden_from_head}
        recorder = run_until_last_block(self.skeleton, self._path, self._traits, (), call)
        plan = CallPlan(tuple(recorder.calls), recorder.template(head), bool(return_logits), bool(return_dict), routers)
        return recorder.hidden, tuple(recorder.constants), (), plan

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
                raise ValueError(f"{name} was given: {_NO_CACHE}")
        if call.get("use_cache"):
            raise ValueError(f"use_cache=True: {_NO_CACHE}")
        for name in _REFUSED_OUTPUTS:
            if call.get(name, getattr(self.skeleton.config, name, False)):
                raise NotImplementedError(
                    f"{name} is set: results of single blocks stay where the block runs; unset it in the call and in "
                    "the model's config"
                )
        if call.get(_ROUTER_LOGITS) is None and getattr(self.skeleton.config, _ROUTER_LOGITS, False):
            call[_ROUTER_LOGITS] = True
        if call.get(_ROUTER_LOGITS) and not self._collects_router_logits:
            raise NotImplementedError(
                f"{_ROUTER_LOGITS} is set, but {type(self.skeleton).__name__} does not tell where its routers are; "
                "unset it in the call and in the model's config"
            )
        call["use_cache"] = False
        return call


class BlockLayer(nn.Module):
    """One of the model's own blocks, called with the arguments that its trunk meant for it."""

    def __init__(self, block: nn.Module, index: int) -> None:
        super().__init__()
        self.block = block
        self._index = index
        self._routes: bool | None = None  # whether this block chooses experts; a fact, the same from every thread

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the block. What is around it here differs from block to block and from call to call, and would be
        compiled anew for each."""
        if self.block._compiled_call_impl is None:
            self.block.compile(*args, **kwargs)

    def forward(self, state: LayerState) -> LayerState:
        """The state with this block's hidden state; constants and plan are passed on as they are."""
        hidden, constants, router_logits, plan = state
        args, kwargs = plan.blocks[self._index].fill(hidden, constants)

        def run():
            output, routes = call_replaying_routes(lambda: self.block(*args, **kwargs), self._routes)
            if routes is not self._routes:
                self._routes = routes
            return output

        if plan.router_logits:
            output, own = collecting_router_logits(run)
            router_logits = (*router_logits, own)
        else:
            output = run()
        return output[0] if isinstance(output, tuple) else output, constants, router_logits, plan


class _NoLogits(nn.Module):
    """In the place of the output projection: its result stands for the logits."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        # Some models look at its dtype. No parameters: those belong to the projection.
        self.__dict__.update(weight=projection.weight, bias=projection.bias)
        self._vocabulary = projection.out_features

    def forward(self, hidden_states: Tensor) -> Tensor:
        return PendingLogits.of(hidden_states, self._vocabulary)


class HeadLayer(_RunsTheModel):
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
        hidden, constants, router_logits, plan = state
        kwargs = plan.head.fill(None, constants)
        kwargs.update(use_cache=False, return_dict=True)

        def run(skeleton: nn.Module) -> Any:
            return run_after_last_block(
                skeleton,
                self._path,
                self._traits,
                hidden,
                kwargs,
                on_block=lambda index: append_router_logits(router_logits[index]) if router_logits else None,
            )

        output = None
        if plan.return_logits:
            output = run(self.skeleton)
        else:
            if self._projection is not None:
                try:
                    output = run(self._without_logits())
                except LogitsAreTransformed:
                    logger.debug("%s transforms its logits; they are computed whole", type(self.skeleton).__name__)
            if output is None:
                output = run(self.skeleton)
            output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
        return output if plan.return_dict else output.to_tuple()

    def _without_logits(self) -> nn.Module:
        """A copy of the skeleton whose output projection and loss are replaced by the chunked loss."""
        projection = self.skeleton
        for name in self._projection:
            projection = projection._modules[name]
        skeleton = graft(self.skeleton, self._projection, _NoLogits(projection))

        def loss_function(
            logits, labels, vocab_size=None, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_
        ) -> Tensor:
            if not isinstance(logits, PendingLogits):
                raise LogitsAreTransformed
            transform = logits.transform()
            hidden, bias = logits.hidden, projection.bias
            if transform.scale != 1.0:
                hidden = hidden * transform.scale
                bias = None if bias is None else bias * transform.scale
            return causal_lm_loss(
                hidden,
                projection.weight,
                labels,
                bias=bias,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                softcap=transform.softcap,
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
