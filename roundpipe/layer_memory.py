"""How much memory one layer takes for one microbatch, learned by running it on tensors without values.

Note [Layers without values]
  A layer is run on fake tensors: shapes, dtypes and the choice of kernels are those of a real run, but nothing is
  computed, nothing is allocated, and no random number is drawn. LiveMemory counts what the run would hold. So any size
  of a microbatch can be asked for, on a device that would not hold it, with the real weights or without any (a model
  on the meta device). A layer whose course depends on values (``.item()``, a choice of experts by ``nonzero``) cannot
  be run so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import recompute
from .ambient import Ambient
from .boundary import LiveTree
from .hf.assumed_values import assumed_values
from .host_placement import is_dense
from .layer_call import EntryGrads, enter_graph
from .live_memory import LiveMemory
from .replica import DeviceParameters, LayerReplica

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeRun", "LayerMemory", "Measured"]


@dataclass(frozen=True)
class LayerMemory:
    """Device memory of one layer (or of the loss) for one microbatch, in bytes. Weights are not in it; the temporary
    gradients of weights, before they are added to their place, are.
    """

    input_bytes: int
    """Tensors that come in."""
    output_bytes: int
    """Tensors that go out and are not among those that came in."""
    forward_bytes: int
    """Most at once beside the input while a forward runs that keeps its graph, or, without backward, that keeps
    nothing; the output is part of it."""
    graph_bytes: int
    """What the graph holds after that forward, beside input and output."""
    backward_bytes: int
    """Most at once beside the input during backward, when autograd itself made the gradients of the output, and frees
    them as it goes on, and nobody else holds the output."""
    backward_held_bytes: int
    """Most at once beside the input and the gradients of the output, when somebody else holds those and the output."""
    input_grad_bytes: int
    """Gradients of the input."""
    saved_input_bytes: int
    """Of the input, what the graph holds."""
    saved_output_bytes: int
    """Of the output, what the graph holds."""

    def scaled(self, ratio: float) -> LayerMemory:
        """For a microbatch ``ratio`` times as large; temporary gradients of weights are scaled too, which they are not
        in fact."""
        return LayerMemory(*(int(getattr(self, name) * ratio) for name in self.__dataclass_fields__))

    @staticmethod
    def from_sizes(input_bytes: int, inner_bytes: int) -> LayerMemory:
        """A rough one from the bytes that hooks of saved tensors have counted: backward takes as much again."""
        backward = 2 * inner_bytes
        return LayerMemory(input_bytes, 0, inner_bytes, inner_bytes, backward, backward, input_bytes, input_bytes, 0)


@dataclass(frozen=True)
class Measured:
    """Of one microbatch: every layer's memory, and that of the loss (None: there is none)."""

    layers: tuple[LayerMemory, ...]
    loss: LayerMemory | None
    label_bytes: int = 0


class _FakeParameters(DeviceParameters):
    """Parameters without values, each with a gradient in its place, as a job gives them."""

    def __init__(self, device: torch.device, mode: FakeTensorMode) -> None:
        super().__init__(device)
        self._mode = mode
        self._fakes: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def get(self, host: nn.Parameter) -> nn.Parameter:
        entry = self._fakes.get(id(host))
        if entry is None:
            made = nn.Parameter(_fake(host, self.device, self._mode), requires_grad=host.requires_grad)
            made.__dict__.update(host.__dict__)
            if host.requires_grad:
                made.grad = _fake(host, self.device, self._mode)
            entry = self._fakes[id(host)] = (host, made)
        return entry[1]

    def follow_hooks(self, host: nn.Parameter) -> None:
        """They are for gradients with values."""


class _Released(torch.autograd.Function):
    """Lets go of the outputs before backward begins, and makes their gradients when it does, as a layer above would."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.like = [(o.size(), o.stride(), o.dtype, o.device) for o in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        return tuple(
            torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in ctx.like
        )


class FakeRun:
    """Runs a model's layers on tensors without values.

    Args:
        layers: the host's modules, on the CPU or the meta device; they are not changed.
        device: whose kernels count; a simulated device's is the CPU.
        ambient: autocast as the layers will see it; None: that of the calling thread.

    Raises (from its methods): whatever a layer raises that cannot be run so.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, ambient: Ambient | None = None) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and rarely wanted

        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self.mode:
            self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._ambient = Ambient.capture() if ambient is None else ambient
        self._kinds = [_kind(layer) for layer in layers]
        self._known: dict[Any, tuple[LayerMemory, Any]] = {}  # of equal layers one is run
        parameters = _FakeParameters(device, self.mode)
        self._replicas = [LayerReplica(layer, parameters) for layer in layers]
        for replica in self._replicas:
            made: list[torch.Tensor] = []
            for module, name, number in replica.buffer_places():
                buffer = module._buffers[name]
                if buffer is not None and number == len(made):
                    made.append(_fake(buffer, device, self.mode))
                replica.skeleton_of(module)._buffers[name] = None if number is None else made[number]

    def measure(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        backward: bool = True,
    ) -> Measured:
        """The memory of every layer for a microbatch of these arguments, of which only shapes and dtypes are looked at
        (tensors of the meta device do).

        ``loss_fn``: called with the output and ``label``; None: there is no loss. ``backward`` False: forward alone.
        """
        with assumed_values():  # models of transformers ask for some values
            tree: Any = self._faked((args, kwargs))
            found = []
            for index, replica in enumerate(self._replicas):
                key = (index == 0, backward, self._kinds[index], _shapes(tree))
                if key not in self._known:
                    self._known[key] = self._measure(_caller(replica, index == 0), tree, backward)
                memory, tree = self._known[key]
                found.append(memory)
            loss = None
            label = self._faked(label)
            if loss_fn is not None:
                loss, _ = self._measure(lambda out: loss_fn(out, label), tree, backward, is_loss=True)
        return Measured(tuple(found), loss, _tree_bytes(label))

    def _faked(self, tree: Any) -> Any:
        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return _fake(tensor, self.device, self.mode).requires_grad_(tensor.requires_grad)

        return pytree.tree_map_only(torch.Tensor, fake, tree)

    def _measure(
        self, function: Callable[[Any], Any], tree: Any, backward: bool, is_loss: bool = False
    ) -> tuple[LayerMemory, Any]:
        input_bytes = _tree_bytes(tree)
        outside = _storages(tree)
        memory = LiveMemory()
        with self.mode, recompute.entered(recompute.RecomputeScope(False, keeps=False)):
            forward_bytes, out = self._forward(memory, function, self._enter(tree)[0] if backward else tree, backward)
            wanted = backward and any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(out))
            output_bytes = sum(size for key, size in _storages(out).items() if key not in outside)
            out = pytree.tree_map_only(torch.Tensor, _cut, out)
            if not wanted:
                return LayerMemory(input_bytes, output_bytes, forward_bytes, 0, 0, 0, 0, 0, 0), out
            saved_input = self._saved_input(function, tree)
            graph, owned, grads, saved_output = self._backward(memory, function, tree, held=False, is_loss=is_loss)
            held = owned if is_loss else self._backward(memory, function, tree, held=True, is_loss=False)[1]
        graph = max(0, graph - output_bytes)
        sizes = (input_bytes, output_bytes, forward_bytes, graph, owned, held, grads)
        return LayerMemory(*sizes, saved_input, min(saved_output, output_bytes)), out

    def _saved_input(self, function: Callable[[Any], Any], tree: Any) -> int:
        """What of the input lives on with the graph, once nobody else holds it."""
        memory = LiveMemory()
        copies: dict[int, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                copies[id(tensor)] = torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
            return copies[id(tensor)]

        with memory:
            own = pytree.tree_map_only(torch.Tensor, copy, tree)
        keys = list(memory.sizes())
        copies.clear()
        with torch.enable_grad():
            value, entry = self._enter(own)
            del own
            with self._ambient.entered():
                out = function(value)
        roots = [x.grad_fn for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        del value, entry, out
        sizes = memory.sizes()
        del roots
        return sum(sizes.get(key, 0) for key in keys)

    def _forward(
        self, memory: LiveMemory, function: Callable[[Any], Any], value: Any, grad: bool = True
    ) -> tuple[int, Any]:
        """(most at once, output)."""
        before = memory.live_bytes
        memory.reset_peak()
        with torch.set_grad_enabled(grad), memory, self._ambient.entered():
            out = function(value)
        return memory.peak_bytes - before, out

    def _backward(
        self, memory: LiveMemory, function: Callable[[Any], Any], tree: Any, *, held: bool, is_loss: bool
    ) -> tuple[int, int, int, int]:
        """(held after the forward, most during the backward, gradients of the input, what of the output the graph
        holds; that only without ``held``).
        """
        before = memory.live_bytes
        value, entry = self._enter(tree)
        _, out = self._forward(memory, function, value)
        graph_bytes = memory.live_bytes - before
        made = _storages(out)
        outs = list(
            {id(x): x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad}.values()
        )
        grads: list[torch.Tensor | None] = [None] * len(outs)
        if held:
            grads = [torch.empty_like(x) for x in outs]  # outside the count
        elif not is_loss:
            outs, grads = [_Released.apply(*outs)], [None]  # type: ignore[no-untyped-call]
        if not held:
            del out
        sizes = memory.sizes()
        saved_output = sum(sizes.get(key, 0) for key in made)
        memory.reset_peak()
        with memory:
            torch.autograd.backward(outs, grads)
        found = () if entry is None else entry.grads
        input_grads = sum(g.nbytes for g in found if g is not None)
        return graph_bytes, memory.peak_bytes - before, input_grads, saved_output

    def _enter(self, tree: Any) -> tuple[Any, EntryGrads | None]:
        """The same tensors as the beginning of a graph, see layer_call.py."""
        leaves, spec = pytree.tree_flatten(tree)
        plain = {id(x): x.detach() for x in leaves if isinstance(x, torch.Tensor)}
        wanted = [isinstance(x, torch.Tensor) and x.requires_grad for x in leaves]
        live = LiveTree(spec, [plain.get(id(x), x) for x in leaves], wanted, {})
        entry = enter_graph(live, self)  # type: ignore[arg-type]  # of which it takes the anchor
        return live.value(), entry


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Autograd as in training, for whoever runs layers without values, wherever he is asked: inside the user's own
    backward, say, it is off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _caller(replica: LayerReplica, first: bool) -> Callable[[Any], Any]:
    def call(tree: Any) -> Any:
        replica.pull()
        if first:
            args, kwargs = tree
            return replica.root(*args, **kwargs)
        return replica.root(tree)

    return call


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _fake(like: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        if is_dense(like):
            return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device)
        return torch.empty(like.size(), dtype=like.dtype, device=device)


_SAME = frozenset({"_parameters", "_buffers", "_modules", "_index", "layer_idx"})
"""Attributes that do not tell equal layers apart. ``layer_idx`` is how models of transformers number theirs, ``_index``
how their converted blocks are numbered; what depends on it stands in other attributes too."""


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that take the same memory: the same classes, plain attributes, shapes and dtypes."""
    return tuple(
        (
            name,
            module.__class__,
            tuple((key, _plain(value)) for key, value in sorted(module.__dict__.items()) if key not in _SAME),
            tuple(
                (key, None if t is None else (t.size(), t.stride(), t.dtype, t.requires_grad))
                for key, t in (*module._parameters.items(), *module._buffers.items())
            ),
        )
        for name, module in layer.named_modules()
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, (dict, set)) and not value:
        return ()
    return id(value)


def _shapes(tree: Any) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    return spec, tuple(
        (x.size(), x.stride(), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else _plain(x) for x in leaves
    )


def _storages(tree: Any) -> dict[int, int]:
    """Bytes by storage; the tensors must stay alive while the keys count."""
    found = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            found[storage._cdata] = int(storage.nbytes())
    return found


def _tree_bytes(tree: Any) -> int:
    found = {id(leaf): leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return sum(found.values())
