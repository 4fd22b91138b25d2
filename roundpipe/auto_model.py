"""``AutoRoundPipe``: a model that runs its own forward, with parts of it streamed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .compiled import compile_layers
from .construction import check_arguments, claim_weights
from .errors import ConfigError
from .function_layer import loss_property
from .layer_list import PassedBy, is_chain
from .model import RoundPipe
from .ownership import owners
from .packed import RoundPipePackedData
from .run_config import RoundPipeRunConfig
from .streamed_part import PartSettings, part_class
from .training_state import TrainingState
from .tree_copy import TreeCopy
from .weight_placement import place

_LOSS = "loss_function"  # no module can have this name: the class has a property of it
ONE_MICROBATCH = RoundPipeRunConfig(num_microbatch=1)


class AutoRoundPipe(RoundPipe):
    """A model whose own forward runs on the host and whose parts are streamed; made by ``wrap_model_to_roundpipe``.

    Calling it, the optimizer's side (``step``, ``synchronize``, ``optim_parameters``, ``parameters()`` in OptimizerCtx)
    and the verbs of ``nn.Module`` are as for ``RoundPipe``. There is no ``forward_backward``: the loss is computed from
    the outputs, and ``loss.backward()`` runs the parts' backward stages. Parameters shared between parts, or between a
    part and the model's own forward, get the sum of their gradients. Parameters in no part stay where they are and are
    trained with the others.

    Args:
        model: on the CPU. It stays as it is; a copy of its tree calls the parts.
        parts: names of the modules to stream (as in ``named_modules``), each with the configuration that is its own.
        optim_dtype, name, model_run_config, pin_model, compile: as for ``RoundPipe``. Of ``model_run_config`` and of a
            call's ``roundpipe_run_config`` the parts take what their own configuration leaves open.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, RoundPipeRunConfig],
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: str = "alloc",
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        nn.Module.__init__(self)
        config = check_arguments(model, optim_dtype, name, model_run_config, pin_model, compile)
        _refuse_plan(config, "model_run_config")
        modules = dict(model.named_modules(remove_duplicate=False))
        streamed = {part: modules[part] for part in parts}
        layers: list[nn.Module] = []
        places = {}
        for part, module in streamed.items():
            own = list(module._modules.values()) if is_chain(module) else [module]
            places[part] = range(len(layers), len(layers) + len(own))
            layers += own  # type: ignore[arg-type]
        left = _LeftOnHost(model, layers)
        function = loss_property(model)
        if function is not None:
            places[_LOSS] = range(len(layers), len(layers) + 1)
            layers.append(function)
            streamed[_LOSS] = function
        claim_weights(self, name, list(model.named_parameters()))
        lock = threading.RLock()
        settings = PartSettings(self.name, lock, config)
        self.__dict__.update(_parts=dict(parts), _left=left, _settings=settings)
        with owners.released_on_failure(self):
            state = self._new_state(layers, optim_dtype, pin_model)
            compile_layers(layers[:-1] if function is not None else layers, compile)
        self.__dict__["_compile"] = compile
        self._set_up(model, state, lock, self.name, config)
        pipes = {
            part: part_class(module)(settings, module, state, places[part], part, parts.get(part, ONE_MICROBATCH))
            for part, module in streamed.items()
        }
        self.__dict__.update(parts=pipes, layers=layers, num_layers=len(layers))
        more = {id(model): {"_loss_function": pipes[_LOSS]}} if function is not None else {}
        self.__dict__["_tree"] = TreeCopy(model, {id(streamed[part]): pipe for part, pipe in pipes.items()}, more)

    def _new_state(self, layers: list[nn.Module], optim_dtype: torch.dtype | None, pin_model: str) -> TrainingState:
        state = place([*layers, self._left], optim_dtype, pin_model, self.name)
        state.host_read |= {unit.key for unit in state.units_of[-1]}
        return state

    def _find_passed_by(self, *models: nn.Module) -> PassedBy:
        return PassedBy((), ())  # the copy of the tree calls all modules but those of the parts

    def _renew_state(self) -> None:
        before = self._state
        before.close()
        state = self._new_state(self.layers, before.optimizer.dtype, before.placement.asked)
        self.__dict__["_state"] = state
        for pipe in self.parts.values():
            pipe.follow(state)

    def train(self, mode: bool = True) -> AutoRoundPipe:
        super().train(mode)
        for pipe in self.parts.values():
            pipe.set_training(mode)
        return self

    def _forward(self, args: tuple[Any, ...], run_config: RoundPipeRunConfig | None, kwargs: dict[str, Any]) -> Any:
        """The model's own forward, on the copy of its tree."""
        with self._entered():
            if run_config is not None:
                _refuse_plan(run_config, "roundpipe_run_config")
            state, settings, tree = self._state, self._settings, self._tree
            state.prepare(trains=torch.is_grad_enabled())
            self._left.check()
            state.wait_host_read()
            tree.begin()
            before, settings.call = (settings.call, state.whole_call), run_config
            state.whole_call = True
            try:
                out = tree.root(*args, **kwargs)
            finally:
                settings.call, state.whole_call = before
                tree.push()
            _refuse_lost(out)
            config = self._resolve(run_config)
            return out if config.merge_output is False else _merged(out)

    @property
    def forward_backward(self) -> Any:  # type: ignore[override]
        raise AttributeError  # and __getattr__ says why

    def __getattr__(self, name: str) -> Any:
        if name == "forward_backward":
            raise AttributeError(
                "an AutoRoundPipe has no forward_backward: its model runs its own forward and computes a loss from it. "
                "Call it and loss.backward() on what follows, or build an nn.Sequential of its layers for "
                "forward_backward."
            )
        return super().__getattr__(name)

    def _layer_costs(self, run_type: str) -> Any:
        raise ConfigError(
            "an AutoRoundPipe has no single list of layers to plan for; plan for its parts, which are in .parts by name"
        )

    def _rebuild_arguments(self) -> dict[str, Any]:
        return {"parts": dict(self._parts), "compile": self._compile}


def _refuse_plan(config: RoundPipeRunConfig, what: str) -> None:
    if config.execute_plan is not None:
        raise ConfigError(
            f"{what}: an execute_plan is for one list of layers, but this model has several streamed parts; give each "
            "its own by override_config={module: RoundPipeRunConfig(execute_plan=...)}"
        )


def _merged(out: Any) -> Any:
    """Packed values that the forward only passed on."""
    return pytree.tree_map_only(RoundPipePackedData, RoundPipePackedData.merged, out)


def _refuse_lost(out: Any) -> None:
    """transformers collects some outputs by hooks, on the thread of the call, and hooks inside a part run on others."""
    if not isinstance(out, Mapping):
        return
    lost = [key for key, value in out.items() if isinstance(value, tuple) and not value]
    if lost:
        raise ConfigError(
            f"output {lost[0]!r} is empty: it would be collected inside modules that are streamed as a whole. Stream "
            "smaller ones (a smaller upper_threshold of wrap_model_to_roundpipe), skip those modules (skip_modules), "
            "or do not ask for this output."
        )


class _LeftOnHost(nn.Module):
    """The parameters that no part has, which the model's own forward computes with."""

    places: list[tuple[nn.Module, str, nn.Parameter]]

    def __init__(self, model: nn.Module, layers: list[nn.Module]) -> None:
        super().__init__()
        streamed = {id(parameter) for layer in layers for parameter in layer.parameters()}
        self.places = []
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in streamed:
                    continue
                self.places.append((module, name, parameter))
                streamed.add(id(parameter))
                full = f"{prefix}.{name}" if prefix else name
                self._parameters[full.replace(".", "/")] = parameter

    def check(self) -> None:
        for module, name, parameter in self.places:
            if module._parameters.get(name) is not parameter:
                raise ConfigError(
                    f"parameter {name!r} of {type(module).__name__} is another one than when the model was wrapped; "
                    "edit values in place (parameter.data.copy_, load_state_dict), or wrap the model again."
                )
