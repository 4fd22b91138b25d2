"""Which modules are the layers of a model, and which of its modules are passed by, because their layers are called
without them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from .call_site import caller_level
from .errors import ConfigError


def is_chain(module: nn.Module) -> bool:
    """Whether calling the module means calling its children one after the other: an ``nn.Sequential`` without a forward
    of its own.
    """
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
    )


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The children of a chain, or the model itself.

    Raises:
        ConfigError: a layer cannot be called, or the chain has weights to train that no layer has.
    """
    if not is_chain(model):
        if isinstance(model, nn.Sequential):
            warnings.warn(
                f"{type(model).__name__} is an nn.Sequential with a forward of its own, so it is streamed whole, as "
                "one layer. For layers that are streamed one by one wrap an nn.Sequential that has none.",
                stacklevel=caller_level(),
            )
        _refuse_uncallable(model, "the model")
        return [model]
    layers = list(model._modules.values())
    if not layers:
        raise ConfigError("the model is an empty nn.Sequential; expected at least one layer")
    for index, layer in enumerate(layers):
        if layer is None:
            raise ConfigError(f"layer {index} of the nn.Sequential is None; leave it out, or put nn.Identity() there")
        _refuse_uncallable(layer, f"layer {index}")
    inside = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
    for name, parameter in model.named_parameters(recurse=False):
        if parameter.requires_grad and id(parameter) not in inside:
            raise ConfigError(
                f"parameter {name!r} belongs to the nn.Sequential itself and to none of its layers, so no layer "
                "computes with it and it would not be trained; make it a parameter of a layer, or freeze it"
            )
    return layers  # type: ignore[return-value]  # none of them is None


def warn_of_one_layer(model: nn.Module) -> None:
    """Says that a whole model of many blocks is one layer, so that next to nothing of it is streamed."""
    if isinstance(model, nn.Sequential):  # has been said, or is not so
        return
    if any(is_lazy(parameter) for parameter in model.parameters()):  # is refused when weights are placed
        return
    kind = type(model).__name__
    if any(
        c.__name__ in _WHOLE_MODELS and c.__module__.startswith(("transformers.", "peft.")) for c in type(model).__mro__
    ):
        what = f"{kind} is no nn.Sequential"
    else:
        blocks = next((name for name, m in model.named_modules() if _are_blocks(m, model)), None)
        if blocks is None:
            return
        what = f"{kind} is no nn.Sequential, though most of it is in the modules of {blocks!r}"
    warnings.warn(
        f"{what}: the whole model is one layer, which must fit in a device as it is. To stream its blocks one by one "
        "use roundpipe.wrap_model_to_roundpipe(model), or wrap an nn.Sequential of them.",
        stacklevel=caller_level(),
    )


_WHOLE_MODELS = ("PreTrainedModel", "PeftModel")
_MANY_BLOCKS = 4


def _are_blocks(module: nn.Module, model: nn.Module) -> bool:
    """Many modules of one class that hold most of the model's parameters. (Not the experts of a block beside attention
    and norms of its size, but those of a block that is little else.)
    """
    if not isinstance(module, nn.ModuleList) or len(module) < _MANY_BLOCKS or len({type(m) for m in module}) > 1:
        return False
    inside = sum(p.numel() for p in module.parameters())
    return 2 * inside > sum(p.numel() for p in model.parameters())


def _refuse_uncallable(module: nn.Module, what: str) -> None:
    if type(module).forward is not nn.Module.forward or "forward" in vars(module):
        return
    remedy = (
        "put an nn.Sequential of its modules in its place, which calls them one after the other"
        if isinstance(module, (nn.ModuleList, nn.ModuleDict))
        else "define one"
    )
    raise ConfigError(f"{what} ({type(module).__name__}) has no forward, so it cannot be called; {remedy}")


class PassedBy:
    """The modules of a model whose own ``__call__``, with its hooks, never runs."""

    def __init__(self, models: Iterable[nn.Module | None], layers: Sequence[nn.Module]) -> None:
        called = {id(module) for layer in layers for module in layer.modules()}
        found = {id(m): (name, m) for x in models if x is not None for name, m in x.named_modules()}
        self._modules = [entry for key, entry in found.items() if key not in called]
        children = [(m, list(m._modules.values())) for _, m in self._modules]
        self._chain = next((m for m, own in children if is_chain(m) and _same(own, layers)), None)
        self._layers = layers
        self._warned = False

    def check(self) -> None:
        """Before a call.

        Raises:
            ConfigError: the chain has other layers than when it was wrapped.
        """
        if self._chain is not None and not _same(list(self._chain._modules.values()), self._layers):
            raise ConfigError(
                f"layers of the {type(self._chain).__name__} were added, exchanged or removed after it was wrapped; "
                "change the model first and wrap it afterwards."
            )
        self._warn_of_hooks()

    def _warn_of_hooks(self) -> None:
        """Says once that hooks have no effect."""
        if self._warned:
            return
        for name, module in self._modules:
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
            ):
                self._warned = True
                warnings.warn(
                    f"{f'module {name!r}' if name else 'the model'} ({type(module).__name__}) has hooks, which do not "
                    "run: its layers are called without it. Register them on a layer, or on a module inside of one.",
                    stacklevel=caller_level(),
                )
                return


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
