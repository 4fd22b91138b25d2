"""What a trunk hands to each of its blocks, written down without running a block.

The trunk's own forward runs with stubs in place of the blocks. A stub notes its arguments and returns the hidden state
it was given, so the forward reaches every block; the last one ends it. Tensors become entries of one flat tuple that
can travel between devices, everything else stays as it is.

Note [No shared state]: several device threads run replicas of one layer at the same time, and a replica shares every
attribute that is neither a module nor a tensor with its host module. So nothing here is kept between two calls: each
call makes its own stubs and its own `CallRecorder`, and grafts them into a shallow copy of the module tree.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = [
    "BlockTraits",
    "CallRecorder",
    "CallTemplate",
    "block_traits",
    "graft",
    "run_after_last_block",
    "run_until_last_block",
    "shallow_copy",
    "stub_list",
]

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class AllBlocksReached(BaseException):
    """Ends a trunk's forward at its last block. A BaseException, so that no `except Exception` on the way stops it."""


@dataclass(frozen=True)
class _Hidden:
    """Stands for the hidden state in a template."""


@dataclass(frozen=True)
class _Constant:
    """Stands for entry `index` of the constants in a template."""

    index: int


@dataclass(frozen=True, eq=False)
class CallTemplate:
    """Arguments of one call with the tensors taken out."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def fill(self, hidden: Tensor | None, constants: tuple[Tensor, ...]) -> Any:
        """The arguments again, around this hidden state and these constants."""
        leaves = [
            hidden if isinstance(leaf, _Hidden) else constants[leaf.index] if isinstance(leaf, _Constant) else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)


class CallRecorder:
    """Collects the calls of one forward of a trunk. Used by one thread."""

    def __init__(self) -> None:
        self.constants: list[Tensor] = []
        self.calls: list[CallTemplate] = []
        self.hidden: Tensor | None = None
        self._index_of: dict[int, int] = {}
        # Blocks mostly get the very same objects; comparing identities is cheaper than flattening again. The
        # arguments are kept in the entry because an id is only unique while its object lives.
        self._last: tuple[tuple, tuple, CallTemplate] | None = None

    def record(self, block: int, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Writes down the call of a block and returns the hidden state it was called with."""
        hidden = _hidden_argument(block, args, kwargs)
        if block != len(self.calls):
            raise NotImplementedError(
                f"block {block} was called as number {len(self.calls)}: the trunk does not run each block once in order"
            )
        if self.hidden is None:
            self.hidden = hidden
        elif hidden is not self.hidden:
            raise NotImplementedError(
                f"the trunk changes the hidden state between block {block - 1} and block {block}; only trunks that "
                "pass a block's result straight to the next block can be streamed"
            )
        key = (*map(id, args), *kwargs, *map(id, kwargs.values()))
        if self._last is None or self._last[0] != key:
            self._last = (key, (args, kwargs), self.template((args, kwargs)))
        self.calls.append(self._last[2])
        return hidden

    def template(self, tree: Any) -> CallTemplate:
        """Takes the tensors out of a tree of arguments; equal objects share one constant."""
        leaves, spec = pytree.tree_flatten(tree)
        return CallTemplate(tuple(self._leaf(leaf) for leaf in leaves), spec)

    def _leaf(self, leaf: Any) -> Any:
        if leaf is self.hidden and leaf is not None:
            return _Hidden()
        if isinstance(leaf, Tensor):
            index = self._index_of.setdefault(id(leaf), len(self.constants))
            if index == len(self.constants):
                self.constants.append(leaf)
            return _Constant(index)
        if any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()):
            raise NotImplementedError(
                f"a block gets a {type(leaf).__name__}, which holds tensors that cannot be moved between devices; "
                "register the type with torch.utils._pytree.register_pytree_node"
            )
        return leaf


def _hidden_argument(block: int, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor):
        raise NotImplementedError(
            f"block {block} was called with {type(hidden).__name__} where its hidden state (first positional argument "
            "or keyword hidden_states) was expected"
        )
    return hidden


@dataclass(frozen=True)
class BlockTraits:
    """What a trunk may want to know of a block without calling it."""

    attributes: tuple[dict[str, Any], ...]
    """Each block's plain attributes (a trunk may look at, say, its attention type)."""

    tuple_length: int | None
    """Length of the tuple that a block returns, None if it returns the hidden state alone."""

    kinds: tuple[type, ...] = ()
    """Each block's class (a trunk may ask which one it is)."""

    embedding_width: int | None = None
    """Of the embeddings that the trunk takes, None if it is the hidden state's (a trunk may project them)."""

    def __len__(self) -> int:
        return len(self.attributes)

    def result(self, hidden: Tensor) -> Any:
        """A block's result around this hidden state."""
        return hidden if self.tuple_length is None else (hidden, *[None] * (self.tuple_length - 1))


def block_traits(
    blocks: Iterable[nn.Module], tuple_length: int | None, embedding_width: int | None = None
) -> BlockTraits:
    """The traits of these blocks; holds none of their modules, parameters and buffers."""
    attributes, kinds = [], []
    for block in blocks:
        kinds.append(type(block))
        plain = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        plain.pop("training", None)
        attributes.append({k: v for k, v in plain.items() if not isinstance(v, (Tensor, nn.Module)) and k != "forward"})
    return BlockTraits(tuple(attributes), tuple_length, tuple(kinds), embedding_width)


class Stub(nn.Module):
    """Stands in a block's place for one call; `on_call(index, args, kwargs)` gives its result."""

    __call__ = nn.Module.__call__  # and not that of the block's class

    def __init__(self, index: int, attributes: dict[str, Any], on_call) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attributes)
        self._index = index
        self._on_call = on_call

    def forward(self, *args, **kwargs):
        return self._on_call(self._index, args, kwargs)


@functools.lru_cache(maxsize=256)
def _stub_class(kind: type) -> type[Stub]:
    """A stub that is, for `isinstance`, a block of this kind."""
    try:
        return type(f"StubOf{kind.__name__}", (Stub, kind), {})
    except TypeError:  # a class that does not let others derive from it so
        return Stub


def stub_list(traits: BlockTraits, on_call) -> nn.ModuleList:
    """A list of stubs in the place of the list of blocks."""
    return nn.ModuleList(
        _stub_class(kind)(index, attributes, on_call)
        for index, (kind, attributes) in enumerate(zip(traits.kinds, traits.attributes, strict=True))
    )


def shallow_copy(module: nn.Module) -> nn.Module:
    """The same module under a new identity: own child table and no hooks, everything else shared."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    twin.__dict__["_compiled_call_impl"] = None
    for name in _HOOK_DICTS:
        if name in twin.__dict__:
            twin.__dict__[name] = OrderedDict()
    return twin


def graft(root: nn.Module, path: tuple[str, ...], replacement: nn.Module) -> nn.Module:
    """A copy of `root` in which the module at `path` is `replacement`; only modules on the path are copied."""
    top = shallow_copy(root)
    node = top
    for name in path[:-1]:
        node._modules[name] = shallow_copy(node._modules[name])
        node = node._modules[name]
    node._modules[path[-1]] = replacement
    return top


def run_until_last_block(root: nn.Module, path: tuple[str, ...], traits: BlockTraits, args, kwargs) -> CallRecorder:
    """Runs the forward of `root` up to its last block and returns what the blocks would have got."""
    recorder = CallRecorder()

    def on_call(index: int, args: tuple, kwargs: dict[str, Any]):
        hidden = recorder.record(index, args, kwargs)
        if index == len(traits) - 1:
            raise AllBlocksReached
        return traits.result(hidden)

    try:
        graft(root, path, stub_list(traits, on_call))(*args, **kwargs)
    except AllBlocksReached:
        return recorder
    raise NotImplementedError(
        f"{type(root).__name__}.forward called {len(recorder.calls)} of its {len(traits)} blocks; only trunks that run "
        "every block can be streamed"
    )


def run_after_last_block(
    root: nn.Module,
    path: tuple[str, ...],
    traits: BlockTraits,
    hidden: Tensor,
    kwargs: dict[str, Any],
    on_block: Callable[[int], None] = lambda index: None,
) -> Any:
    """Runs what the forward of `root` does behind its last block, on the hidden state that block returned.

    The forward needs some input to start from; it gets the hidden state as embeddings, or zeros where those are of
    another width, and the stubs forget what became of that. Detached, so that nothing before the blocks enters the
    graph.
    `on_block(index)` runs in each block's place.
    """

    def on_call(index: int, args: tuple, kwargs: dict[str, Any]):
        on_block(index)
        return traits.result(hidden)

    version = hidden._version
    embeddings = hidden.detach()
    if traits.embedding_width not in (None, hidden.shape[-1]):
        embeddings = hidden.new_zeros(*hidden.shape[:-1], traits.embedding_width)
    output = graft(root, path, stub_list(traits, on_call))(inputs_embeds=embeddings, **kwargs)
    if hidden._version != version:
        raise NotImplementedError(
            f"{type(root).__name__}.forward writes its input embeddings in place; such trunks cannot be streamed"
        )
    return output
