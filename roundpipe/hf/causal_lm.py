"""Conversion of a transformers causal language model into `nn.Sequential(prefix, block 0, ..., block N-1, head)`.

Nothing here knows a model by name. The blocks are the module list as long as the config's layer count; what belongs
before and behind them is seen by running the model's own forward once on two tokens, with stubs for the blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from roundpipe.hf import router_logits
from roundpipe.hf.adapters import is_peft_model, model_with_adapters
from roundpipe.hf.capture import BlockTraits, block_traits, graft, run_after_last_block, shallow_copy, stub_list
from roundpipe.hf.layers import BlockLayer, HeadLayer, PrefixLayer, trunk_arguments, uses_chunkable_loss

__all__ = ["causal_lm_to_sequential", "is_causal_lm"]


def is_causal_lm(model: nn.Module) -> bool:
    """Whether this is a decoder-only causal language model of transformers, with or without adapters of PEFT. Does not
    import transformers."""
    if is_peft_model(model):
        model = model.get_base_model()
    if not any(
        c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in type(model).__mro__
    ):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = {c.__name__ for c in type(model).__mro__}
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return not getattr(model.config, "is_encoder_decoder", False) and (
        bool(names & known) or type(model).__name__.endswith("ForCausalLM")
    )


def causal_lm_to_sequential(model: nn.Module) -> nn.Sequential:
    """The layers of a causal language model, for training without a key/value cache.

    The modules and parameters are the model's own, on the CPU, not copied; ties stay. The first layer takes
    the arguments of the model's forward plus `return_logits`; every other layer takes the tuple that the layer before
    it returned; the last one returns the model's own output. Raises NotImplementedError, with the reason, for a model
    whose trunk is not one chain of blocks.
    """
    if is_peft_model(model):
        model = model_with_adapters(model)
    path = _find_blocks(model)
    blocks = model.get_submodule(".".join(path))
    with _unfollowable_is_not_implemented(model):
        before, after, hidden, tuple_length = _probe(model, path, blocks)
        traits = block_traits(blocks, tuple_length, _embedding_width(model))
        in_head = _probe_head(model, path, traits, hidden)
    trunk = model.get_submodule(".".join(path[:-1]))
    collects = router_logits.can_collect(trunk)
    projection = model.get_output_embeddings()
    projection_path = _path_of(model, projection) if uses_chunkable_loss(model, projection) else None

    prefix = _skeleton(model, path, drop=after - before)
    head = _skeleton(model, path, drop=before - in_head)
    layers = [
        PrefixLayer(prefix, path, traits, trunk_arguments(model, trunk), collects),
        *(BlockLayer(block, index) for index, block in enumerate(blocks)),
        HeadLayer(head, path, traits, projection_path),
    ]
    with _unfollowable_is_not_implemented(model):
        _try_ends(layers[0], layers[-1])
    sequential = nn.Sequential(*layers)
    sequential.train(model.training)
    _check_nothing_lost(model, sequential)
    return sequential


@contextlib.contextmanager
def _unfollowable_is_not_implemented(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, NotImplementedError):
            raise
        raise NotImplementedError(
            f"{type(model).__name__}.forward cannot be followed with stubs in place of its blocks "
            f"({type(error).__name__}: {error})"
        ) from error


def _no_router_logits(model: nn.Module) -> dict[str, bool]:
    """Stubs have no routers, so a balancing loss would find nothing to balance."""
    return {"output_router_logits": False} if getattr(model.config, "output_router_logits", False) else {}


def _try_ends(prefix: nn.Module, head: nn.Module) -> None:
    """Prefix and head must do without what the other one has: a module may be used without being called."""
    kwargs = _no_router_logits(prefix.skeleton)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        head(prefix(input_ids=torch.zeros(1, 2, dtype=torch.int64), **kwargs))


def _find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Path of the module list that holds the blocks."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    count = getattr(config, "num_hidden_layers", None)
    if not count:
        raise NotImplementedError(
            f"{type(model).__name__}: its config has no num_hidden_layers, so its blocks cannot be found; build an "
            "nn.Sequential of its parts instead"
        )
    lists = {
        name: sum(p.numel() for p in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise NotImplementedError(
            f"{type(model).__name__} has no nn.ModuleList of {count} blocks (config.num_hidden_layers); build an "
            "nn.Sequential of its parts instead"
        )
    return tuple(max(lists, key=lists.__getitem__).split("."))


Child = tuple[str, ...]
"""A module by its path."""


def _watched(root: nn.Module, path: Child, on_use: Callable[[Child], None]) -> None:
    """Reports the calls of the children of `root` (a copy) beside the way to its blocks. Copies of them are watched in
    their places, so that the user's modules never carry a hook of ours."""
    for where, name, child in _children_beside(root, path):
        twin = shallow_copy(child)
        twin.register_forward_pre_hook(lambda module, args, child=(*where, name): on_use(child))
        root.get_submodule(".".join(where))._modules[name] = twin


def _probe(
    model: nn.Module, path: Child, blocks: nn.ModuleList
) -> tuple[set[Child], set[Child], torch.Tensor, int | None]:
    """Runs the model on two tokens, with stubs for all blocks but the first.

    Returns the children called before the last block, those called after it, a hidden state, and the length of the
    tuple that a block returns (None: it returns no tuple).
    """
    before: set[Child] = set()
    after: set[Child] = set()
    seen = 0
    hidden = None
    tuple_length = None

    def on_call(index: int, args: tuple, kwargs: dict[str, Any]):
        nonlocal seen, hidden, tuple_length
        seen += 1
        hidden = args[0] if args else kwargs.get("hidden_states")
        if index == 0:
            output = blocks[0](*args, **kwargs)
            tuple_length = len(output) if isinstance(output, tuple) else None
        return BlockTraits((), tuple_length).result(hidden)

    root = graft(model, path, stub_list(block_traits(blocks, None), on_call))
    _watched(root, path, lambda child: (after if seen == len(blocks) else before).add(child))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        root(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False, **_no_router_logits(model))
    if seen != len(blocks):
        raise NotImplementedError(
            f"{type(model).__name__}.forward called {seen} of its {len(blocks)} blocks; only trunks that run every "
            "block can be streamed"
        )
    return before, after, hidden, tuple_length


def _embedding_width(model: nn.Module) -> int | None:
    """Of the embeddings that the model's forward takes, if its embedding says so."""
    width = getattr(model.get_input_embeddings(), "embedding_dim", None)
    return width if isinstance(width, int) else None


def _probe_head(model: nn.Module, path: Child, traits: BlockTraits, hidden: torch.Tensor) -> set[Child]:
    """The children that are called when the model's forward is entered with embeddings, for its end alone."""
    used: set[Child] = set()
    root = graft(model, path, nn.ModuleList())
    _watched(root, path, used.add)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        run_after_last_block(root, path, traits, hidden, {"use_cache": False, **_no_router_logits(model)})
    return used


def _children_beside(root: nn.Module, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], str, nn.Module]]:
    """(path of the parent, name, module) of every module that hangs directly on the way from the root to the blocks."""
    found = []
    node = root
    for depth, step in enumerate(path):
        found += [
            (path[:depth], name, child) for name, child in node._modules.items() if child is not None and name != step
        ]
        node = node._modules[step]
    return found


def _skeleton(model: nn.Module, path: tuple[str, ...], drop: set[tuple[str, ...]]) -> nn.Module:
    """The model without its blocks and without the children in `drop`. A child that the probe never saw called stays in
    both skeletons: some argument may lead to it."""
    skeleton = graft(model, path, nn.ModuleList())
    for where, name, _ in _children_beside(skeleton, path):
        if (*where, name) in drop:
            skeleton.get_submodule(".".join(where))._modules[name] = None
    return skeleton


def _path_of(model: nn.Module, wanted: nn.Module) -> tuple[str, ...] | None:
    return next((tuple(name.split(".")) for name, module in model.named_modules() if module is wanted), None)


def _check_nothing_lost(model: nn.Module, sequential: nn.Sequential) -> None:
    kept = {id(tensor) for tensor in (*sequential.parameters(), *sequential.buffers())}
    lost = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if id(tensor) not in kept]
    if lost:
        raise NotImplementedError(
            f"{type(model).__name__}: {', '.join(lost[:3])} would be in no layer; the model's parts are used in a way "
            "that the conversion does not see"
        )
