"""One call of one layer for one microbatch on a device: random numbers, autocast, attributes, autograd's entry."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from . import batch_tree, held, random_state, recompute
from .boundary import LiveTree
from .compiled import uncompiled
from .engine import cpu_generator_lock

if TYPE_CHECKING:
    from .activation_sizes import SavedBytes
    from .ambient import Ambient
    from .engine import Worker
    from .replica import Attributes, LayerReplica


@dataclass
class LayerFacts:
    """What earlier calls taught about a layer; None: not seen yet."""

    writes_input: bool | None = None  # modifies a tensor of its input in place
    draws_cpu: bool | None = None  # takes random numbers from the CPU generator
    refuses_hooks: bool = False  # uses torch.func, which raises under hooks of saved tensors
    training: bool | None = None  # the mode in which that was seen: many layers draw in training only

    def see_mode(self, training: bool) -> None:
        if training is not self.training:
            self.training, self.draws_cpu = training, None


class EntryGrads:
    """Receives the gradients that autograd delivers at a stage's input."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.grads: tuple[torch.Tensor | None, ...] = (None,) * len(tensors)

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors, once. Kept, they and their graph, which holds this object, would live until the collector runs:
        device memory that nobody uses.
        """
        tensors, self._tensors = self._tensors, []
        return tuple(tensors)


class _Entry(torch.autograd.Function):
    """Makes tensors that came from the host the beginning of a graph.

    They are outputs of a node and no leaves, so a layer may write them in place; they are not views, because the node
    gets them beside its arguments.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: EntryGrads) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return entry.take()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:  # type: ignore[override]
        ctx.entry.grads = grads
        return None, None


def enter_graph(live: LiveTree, worker: Worker) -> EntryGrads | None:
    """Lets every leaf of ``live`` that requires grad do so on this device; None when there is none.

    ``grads[i]`` of the result belongs to the i-th leaf among those wanted (each tensor once).
    """
    tensors: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    for leaf, wanted in zip(live.leaves, live.requires_grad, strict=True):
        if wanted and isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
            seen[id(leaf)] = len(tensors)
            tensors.append(leaf)
    if not tensors:
        return None
    entry = EntryGrads(tensors)
    outs = _Entry.apply(worker.anchor, entry)
    for position, leaf in enumerate(live.leaves):
        if isinstance(leaf, torch.Tensor) and live.requires_grad[position]:
            out = outs[seen[id(leaf)]]
            if out is not leaf:
                host = live.stored(leaf)
                if host is not None:
                    live.remember(out, host)
                live.leaves[position] = out
    return entry


def distinct_tensors(live: LiveTree) -> list[torch.Tensor]:
    """The tensors of a tree that require grad, each once, in the order of ``enter_graph``."""
    seen: dict[int, torch.Tensor] = {}
    for leaf, wanted in zip(live.leaves, live.requires_grad, strict=True):
        if isinstance(leaf, torch.Tensor) and wanted:
            seen.setdefault(id(leaf), leaf)
    return list(seen.values())


@uncompiled
def _drop(_: torch.Tensor) -> None:
    return None


@uncompiled
def _unavailable(_: Any) -> torch.Tensor:
    raise RuntimeError(
        "backward needs what a layer's forward has not kept, because that forward is repeated when its own turn comes. "
        "Either the loss uses a tensor that the layer left in an attribute, or elsewhere: let it return that with "
        "its output. Or a layer ran a backward pass inside its own forward: compute such inner gradients in the last "
        "(fused) stage, or detach them."
    )


def saved_tensors(
    facts: LayerFacts, discards: bool, counter: SavedBytes | None
) -> contextlib.AbstractContextManager[Any]:
    """What autograd keeps for backward: everything, or with ``discards`` nothing, for a forward that will be repeated
    and only has to track requires_grad exactly. ``counter`` sees it on the way. Around a layer that refuses hooks there
    are none: what it keeps goes with its graph, at the end of the layer, and is not counted.
    """
    if facts.refuses_hooks:
        return contextlib.nullcontext()
    if discards:
        return torch.autograd.graph.saved_tensors_hooks(_drop if counter is None else counter.count, _unavailable)
    if counter is not None:
        return torch.autograd.graph.saved_tensors_hooks(counter.keep, counter.unpack)
    return contextlib.nullcontext()


def call_hooked(
    facts: LayerFacts,
    hooks: contextlib.AbstractContextManager[Any],
    function: Callable[[], tuple[Any, bool]],
    undone: Callable[[], bool],
) -> tuple[Any, bool]:
    """``function`` under hooks of saved tensors. Where it refuses them, as torch.func does, it is called once more
    without, unless ``undone`` says that what the first attempt did cannot be undone.
    """
    try:
        with hooks:
            return function()
    except RuntimeError as error:
        if facts.refuses_hooks or "saved tensor hooks" not in str(error) or not undone():
            raise
    facts.refuses_hooks = True
    return function()


def call_seeded(
    worker: Worker,
    facts: LayerFacts,
    seed: int,
    ambient: Ambient,
    function: Callable[[], Any],
    seeds: bool = True,
) -> tuple[Any, bool]:
    """Runs ``function`` with the generators of this device seeded, and the caller's states restored afterwards.

    Gives its result, and whether it drew. ``seeds`` False leaves the generators alone: for the recompute of a forward
    that did not draw, beside which the caller may be drawing already.
    """
    on_cpu = on_device = None
    with contextlib.ExitStack() as stack:
        if seeds and (worker.simulated or facts.draws_cpu is not False):
            stack.enter_context(cpu_generator_lock)
            on_cpu = stack.enter_context(random_state.seeded(seed, torch.device("cpu")))
        if seeds and not worker.simulated:
            on_device = stack.enter_context(random_state.seeded(seed, worker.device))
        with ambient.entered():
            out = function()
    if on_cpu is not None:
        facts.draws_cpu = bool(on_cpu.drew or facts.draws_cpu)
    return out, any(one is not None and one.drew is True for one in (on_cpu, on_device))


def call_layer(
    worker: Worker,
    replica: LayerReplica,
    facts: LayerFacts,
    live: LiveTree,
    *,
    first: bool,
    seed: int,
    ambient: Ambient,
    scope: recompute.RecomputeScope,
    seeds: bool,
    layer: int,
    noted: dict[int, Attributes],
    notes: bool,
    timed: contextlib.AbstractContextManager[Any],
    hooks: contextlib.AbstractContextManager[Any],
    undo: Callable[[], None],
    hands_on: bool,
) -> tuple[LiveTree, bool]:
    """Runs a layer on ``live``; gives its output, and whether it drew from the CPU generator.

    A tensor passed through unchanged keeps its place on the host. ``first``: the tree is ``(args, kwargs)`` of the
    model's own call; otherwise it is the single positional argument. ``seeds``: as in ``call_seeded``. ``noted``: by
    layer, the attributes that a recompute sees and assigns; this forward enters them if ``notes``. Until then the
    caller waits, so the host module's own are the right ones. Looked up and entered under the lock under which they
    are assigned: the last forward and the first recompute may be on two devices at the same time. ``timed``
    is entered around the module's forward alone. ``hooks``: those of saved tensors; a layer that refuses them is called
    again without, after ``undo`` has brought its buffers back to what they were. ``hands_on``: the output goes to
    another layer or to the caller, see Note [Handed on] in held.py.
    """
    if not scope.recomputing:
        facts.see_mode(replica.layer.training)
    inputs = [leaf for leaf in live.leaves if isinstance(leaf, torch.Tensor)]
    versions = [t._version for t in inputs]
    given = frozenset(id(leaf) for leaf in live.leaves if hands_on and _holds(leaf))

    def run() -> Any:
        replica.pull(attributes)
        with recompute.entered(scope), timed:
            if first:
                args, kwargs = live.value()
                return replica.root(*args, **kwargs)
            return replica.root(live.value())

    def undone() -> bool:
        if any(t._version != v for t, v in zip(inputs, versions, strict=True)):
            return False
        undo()
        scope.saved = False
        return True

    with worker.compute_lock:
        attributes = noted.get(layer) if scope.recomputing else None
        try:
            out, drew = call_hooked(facts, hooks, lambda: call_seeded(worker, facts, seed, ambient, run, seeds), undone)
        except torch.OutOfMemoryError:
            # The traceback's frames hold these closures, which would hold the tensors while the exception lives.
            inputs.clear()
            live.leaves.clear()
            live.known.clear()
            raise
        replica.push(attributes)
        if notes:
            noted[layer] = replica.attributes()

    written = any(t._version != v for t, v in zip(inputs, versions, strict=True))
    if written or facts.writes_input is None:
        facts.writes_input = written
    leaves, spec = pytree.tree_flatten(out)
    if any(type(leaf) not in held.PLAIN and not isinstance(leaf, torch.Tensor) for leaf in leaves):
        found = batch_tree.leaves(out, "output")
        batch_tree.reject_hidden_tensors(found)
        if hands_on:
            held.refuse(found, f"of {type(replica.layer).__name__}", given)
    grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    result = LiveTree(spec, leaves, grads, {})
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            host = live.stored(leaf)
            if host is not None:
                result.remember(leaf, host)
    return result, drew


def _holds(leaf: Any) -> bool:
    if type(leaf) in held.PLAIN or isinstance(leaf, torch.Tensor):
        return False
    return held.find(leaf, held.holds_state) is not None


def detach_tree(live: LiveTree) -> LiveTree:
    """The same tensors outside any graph, for the next layer of a forward that keeps nothing."""
    plain: dict[int, torch.Tensor] = {}
    out = LiveTree(live.spec, [], live.requires_grad, {})
    for leaf in live.leaves:
        if isinstance(leaf, torch.Tensor):
            tensor = plain.get(id(leaf))
            if tensor is None:
                tensor = plain[id(leaf)] = leaf.data
                host = live.stored(leaf)
                if host is not None:
                    out.remember(tensor, host)
            out.leaves.append(tensor)
        else:
            out.leaves.append(leaf)
    return out
