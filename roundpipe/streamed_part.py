"""The parts of an ``AutoRoundPipe``: in its copy of the model's tree they stand where the streamed modules stood."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from . import engine as engines
from .errors import ConfigError
from .layer_list import is_chain
from .model import RoundPipe
from .run_config import ResolvedConfig, RoundPipeRunConfig, resolve
from .state_part import StatePart
from .training_state import TrainingState


class PartSettings:
    """What all parts of a model share: its name and lock, its defaults, and those of the call that is running."""

    def __init__(self, name: str, lock: threading.RLock, model: RoundPipeRunConfig) -> None:
        self.name = name
        self.lock = lock
        self.model = model
        self.call: RoundPipeRunConfig | None = None  # under the model's lock

    def resolve(self, own: RoundPipeRunConfig, config: RoundPipeRunConfig | None) -> ResolvedConfig:
        general = self.model if self.call is None else self.model.overridden_by(self.call)
        found = resolve(
            general.overridden_by(own),
            config,
            devices=engines.current().device_count,
            grad_enabled=torch.is_grad_enabled(),
        )
        return replace(found, merges_unbatched=True)


class StreamedPart(RoundPipe):
    """A module of an ``AutoRoundPipe`` that is streamed when the model's own forward calls it.

    Args:
        layers: its places among the layers of ``whole``.
        own: the configuration that is the part's own.
    """

    def __init__(
        self,
        settings: PartSettings,
        module: nn.Module,
        whole: TrainingState,
        layers: range,
        name: str,
        own: RoundPipeRunConfig,
    ):
        nn.Module.__init__(self)
        self.__dict__.update(_own_config=own, _settings=settings, _part_name=name, _places=layers)
        title = f"{settings.name}: {name or type(module).__name__}"
        self._set_up(module, StatePart(whole, layers), settings.lock, title, RoundPipeRunConfig())

    def follow(self, whole: TrainingState) -> None:
        """The weights were placed anew."""
        self.__dict__["_state"] = StatePart(whole, self._places)

    def set_training(self, mode: bool) -> None:
        """What a forward sees that asks the part; the module has its own."""
        self.__dict__["training"] = mode

    def _plan_run(self) -> tuple[int | None, str]:
        config = self._resolve(None)
        return config.num_microbatch, config.recompute_grain

    @property
    def __class__(self) -> Any:  # isinstance() is true for the module's own class: forwards and hooks look for it
        modules = self.__dict__.get("_modules", {})
        return type(modules["model"]) if "model" in modules else type(self)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError("the class of a streamed module cannot be changed")

    def _resolve(self, config: RoundPipeRunConfig | None) -> ResolvedConfig:
        return self._settings.resolve(self._own_config, config)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, nn.Parameter):  # the model computes with the weight itself: it must be complete
            self._state.follow_publishes(value)
        return value

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module's own, which run on the host."""
        yield from self.model.named_children()


class StreamedChain(StreamedPart):
    """A streamed ``nn.Sequential``. A forward that takes it apart (a loop over it, an index, a slice, a child by its
    name) gets its children as parts of their own; all but the last hand on packed, as elements of a ModuleList do.
    """

    def _child(self, index: int) -> nn.Module:
        made: dict[int, StreamedPart] = self.__dict__.setdefault("_children", {})
        if index not in made:
            key, module = list(self.model._modules.items())[index]
            own = self._own_config
            if own.merge_output is None and index < len(self._places) - 1:
                own = replace(own, merge_output=False)
            place = range(self._places.start + index, self._places.start + index + 1)
            kind = _ChainInChain if is_chain(module) else StreamedPart
            made[index] = kind(self._settings, module, self._state.whole, place, f"{self._part_name}.{key}", own)
        return made[index]

    def follow(self, whole: TrainingState) -> None:
        super().follow(whole)
        for child in self.__dict__.get("_children", {}).values():
            child.follow(whole)

    def set_training(self, mode: bool) -> None:
        super().set_training(mode)
        for child in self.__dict__.get("_children", {}).values():
            child.set_training(mode)

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self._child(index) for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> nn.Module:
        chosen = range(len(self))[index]
        return nn.Sequential(*map(self._child, chosen)) if isinstance(chosen, range) else self._child(chosen)

    @property
    def _modules(self) -> dict[str, nn.Module | None]:  # type: ignore[override]  # what a loop over the children reads
        own: dict[str, nn.Module | None] = self.__dict__["_modules"]
        return {name: self._child(i) for i, name in enumerate(self.model._modules)} if "model" in own else own

    @_modules.setter
    def _modules(self, value: dict[str, nn.Module | None]) -> None:
        self.__dict__["_modules"] = value

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        for index, name in enumerate(self.model._modules):
            yield name, self._child(index)

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if "model" in modules and name in modules["model"]._modules:
            return self._child(list(modules["model"]._modules).index(name))
        return super().__getattr__(name)


class _ChainInChain(StreamedPart):
    """An ``nn.Sequential`` that is one layer of another, which a forward has taken apart. It goes no further."""

    def __len__(self) -> int:
        return len(self.model)

    def _refuse(self) -> Any:
        raise ConfigError(
            f"the model's forward takes apart {self._part_name!r}, an nn.Sequential that is one layer of another. Make "
            "the outer one an nn.ModuleList, whose elements are streamed one by one, or leave it on the host "
            "(skip_modules)."
        )

    def __iter__(self) -> Iterator[nn.Module]:
        return self._refuse()  # type: ignore[no-any-return]

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self._refuse()  # type: ignore[no-any-return]

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._refuse()  # type: ignore[no-any-return]


def part_class(module: nn.Module) -> type[StreamedPart]:
    return StreamedChain if is_chain(module) else StreamedPart
