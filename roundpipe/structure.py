"""Notices that parameters of a wrapped model were added, replaced or removed after the wrapping."""

from __future__ import annotations

from torch import nn

from .errors import ConfigError


class Structure:
    """The modules and parameters of some layers, by the places where they stand.

    Modules may come, go and be exchanged (a parametrization that is registered late, an activation function), as long
    as the layers use the same Parameter objects.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._layers = layers
        self._note()

    def _note(self) -> None:
        modules = {id(m): (name, m) for i, x in enumerate(self._layers) for name, m in x.named_modules(prefix=str(i))}
        self._places = [
            (name, module, list(module._modules.values()), list(module._parameters.values()))
            for name, module in modules.values()
        ]
        self._parameters = {id(parameter) for layer in self._layers for parameter in layer.parameters()}

    def check(self) -> None:
        """Compares identities, in a few microseconds for a hundred modules.

        Raises:
            ConfigError: the layers have other parameters now; it names a module that has changed.
        """
        for name, module, children, own in self._places:
            if _same(list(module._parameters.values()), own) and _same(list(module._modules.values()), children):
                continue
            if {id(parameter) for layer in self._layers for parameter in layer.parameters()} != self._parameters:
                raise ConfigError(
                    f"module {name} ({type(module).__name__}) has other parameters than when the model was wrapped and "
                    "its weights were packed. Edit values in place (parameter.data.copy_, load_state_dict), or change "
                    "the model first (adapters, tying, other heads) and wrap it afterwards."
                )
            self._note()
            return


def _same(left: list[nn.Module | None] | list[nn.Parameter | None], right: list[object]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
