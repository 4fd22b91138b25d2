"""Notices that modules or parameters of a wrapped model were added, replaced or removed after the wrapping."""

from __future__ import annotations

from torch import nn

from .errors import ConfigError

_REMEDY = (
    "Weights are packed when a model is wrapped. Edit their values in place (parameter.data.copy_, load_state_dict), or "
    "change the model first and wrap it afterwards."
)


class Structure:
    """The parameters of some layers, by the places where they stand."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._modules: list[tuple[str, nn.Module, list[nn.Module | None], list[nn.Parameter | None]]] = []
        seen = set()
        for index, layer in enumerate(layers):
            for name, module in layer.named_modules(prefix=str(index)):
                if id(module) not in seen:
                    seen.add(id(module))
                    children, own = list(module._modules.values()), list(module._parameters.values())
                    self._modules.append((name, module, children, own))

    def check(self) -> None:
        """Identities only, a few microseconds for a hundred modules.

        Raises:
            ConfigError: naming the module that has changed.
        """
        for name, module, children, own in self._modules:
            if len(module._parameters) != len(own) or any(
                a is not b for a, b in zip(module._parameters.values(), own, strict=True)
            ):
                raise ConfigError(
                    f"parameters of {name} ({type(module).__name__}) were added, removed or replaced by other Parameter "
                    f"objects since the model was wrapped: it has {sorted(module._parameters)}. {_REMEDY}"
                )
            if len(module._modules) == len(children) and all(
                a is b for a, b in zip(module._modules.values(), children, strict=True)
            ):
                continue
            if _weights(module) != _weights_of(children, own):
                raise ConfigError(
                    f"modules with parameters were added to, removed from or replaced in {name} "
                    f"({type(module).__name__}) since the model was wrapped: it has {sorted(module._modules)}. {_REMEDY}"
                )


def _weights(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _weights_of(children: list[nn.Module | None], own: list[nn.Parameter | None]) -> set[int]:
    found = {id(parameter) for parameter in own if parameter is not None}
    return found.union(*(_weights(child) for child in children if child is not None))
