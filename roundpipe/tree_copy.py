"""A user's module tree with some of its modules replaced, over his own attributes, parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .compiled import DeviceCodes
from .errors import ConfigError
from .replica import LayerReplica


class _HostParameters:
    """In the place of a device's parameters: the host's own."""

    def __init__(self) -> None:
        self.codes = DeviceCodes()

    def get(self, host: nn.Parameter) -> nn.Parameter:
        return host

    def follow_hooks(self, host: nn.Parameter) -> None:
        """Autograd runs them."""


class TreeCopy(LayerReplica):
    """``root`` runs the user's own forward, with ``replacements`` called where their modules stood.

    The user's tree is not touched: he goes on to set attributes, hooks and modes on it, and they are seen by the next
    call, as with any skeleton.

    Args:
        replacements: by id of the replaced module.
        attributes: what the copy of a module has besides, by id of the module.
    """

    def __init__(
        self,
        model: nn.Module,
        replacements: Mapping[int, nn.Module],
        attributes: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._replacements = replacements
        self._attributes = attributes
        super().__init__(model, _HostParameters())  # type: ignore[arg-type]

    def _twin(self, module: nn.Module) -> nn.Module | None:
        return self._replacements.get(id(module))

    def _build(self) -> nn.Module:
        root = super()._build()
        for module, twin in self._nodes:  # one dictionary for both: what a forward registers or assigns is the host's
            twin.__dict__["_parameters"] = module._parameters
            twin.__dict__["_buffers"] = module._buffers
        return root

    def begin(self) -> None:
        """Before a call."""
        if self._structure_changed():
            raise ConfigError(
                "modules of the model were added, exchanged or removed after it was wrapped; change the model first "
                "and wrap it afterwards."
            )
        self.pull()
        for (module, twin), given in zip(self._nodes, self._given, strict=True):
            more = self._attributes.get(id(module), {})
            twin.__dict__.update(more)
            given.update(more)
