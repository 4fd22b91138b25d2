"""The state of an optimizer as entries of files, with what is small enough to be copied beside them.

Note [Optimizer entries]
  A parameter's states are tensors named ``<state>/<parameter>`` ("exp_avg/0.weight"), whatever the optimizer; "master"
  is its float32 copy and "master_low" the lower half of a split one. Everything else (counts, options of groups) is
  copied. In the copied part a tensor of the files is ``{"__tensor__": name, "stride": [...]}``. Files are row-major;
  the strides matter because kernels may round in another way where memory is in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .. import optimizer_states
from ..errors import ConfigError
from ..optim.compact import CompactOptimizer
from .job import Entry
from .names import ModelNames
from .snapshot import OPTIMIZER, STEP_FUNCTION, Snapshot, unit_of_parameters

if TYPE_CHECKING:
    from ..model import RoundPipe

MARK = "__tensor__"


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Optimizers of one kind load each other's states."""
    return type(optimizer).__name__.removeprefix("Compact")


def check_optimizer(model: RoundPipe, optimizer: object) -> None:
    """Raises ConfigError for an optimizer that does not train this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: got {type(optimizer).__name__}, expected a torch.optim.Optimizer or None")
    if isinstance(optimizer, CompactOptimizer):
        model._check_own(optimizer)
        return
    own = {id(parameter) for _, parameter in model._state.optimizer.pairs()}  # asking the model would publish
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(
            f"none of the parameters of the {type(optimizer).__name__} is an optimizer parameter of {model.name!r}: "
            "build it inside `with roundpipe.OptimizerCtx():` from model.parameters(), or give None"
        )
    optimizer_states.note(optimizer)


def named_groups(
    model: RoundPipe, optimizer: torch.optim.Optimizer, names: ModelNames
) -> tuple[list[list[str | None]], dict[int, str]]:
    """Names of the parameters of each group (None: not of this model), and by id of the optimizer's parameter."""
    if isinstance(optimizer, CompactOptimizer):
        by_id = dict(names.name_of)
    else:
        by_id = {}
        for host, own in model._state.optimizer.pairs():
            if id(host) in names.name_of:
                by_id[id(own)] = names.name_of[id(host)]
    return [[by_id.get(id(p)) for p in group["params"]] for group in optimizer.param_groups], by_id


def add_optimizer(
    snapshot: Snapshot, model: RoundPipe, optimizer: torch.optim.Optimizer, names: ModelNames
) -> dict[str, Any]:
    """The tensors become entries; gives the rest, copied."""
    compact = isinstance(optimizer, CompactOptimizer)
    # That of a compact one would publish what an asynchronous step left.
    packed = torch.optim.Optimizer.state_dict(optimizer) if compact else optimizer.state_dict()
    groups, _ = named_groups(model, optimizer, names)
    state = model._state
    units = unit_of_parameters(state)
    label: dict[Any, str] = {}
    group_of: dict[Any, int] = {}
    for group, of_names in zip(packed["param_groups"], groups, strict=True):
        for key, name in zip(group["params"], of_names, strict=True):
            label[key] = f"parameter {key}" if name is None else name
            unit = units.get(id(names.parameters[name])) if compact and name is not None else None
            group_of[key] = STEP_FUNCTION if unit is None else unit.key
    values: dict[Any, Any] = {}
    for key, of_parameter in packed["state"].items():
        place = group_of.get(key, STEP_FUNCTION)

        def refer(path: str, tensor: torch.Tensor, key: Any = key, place: int = place) -> Any:
            if not tensor.dim():
                return tensor.detach().clone()
            name = f"{path}/{label.get(key, key)}"
            snapshot.add(OPTIMIZER, Entry(name, tensor.detach(), tensor.dtype), place)
            return {MARK: name, "stride": list(tensor.stride())}

        values[key] = _mapped(of_parameter, refer)
    if not compact:
        for host, own in state.optimizer.pairs():
            if id(host) in names.name_of and own.dtype != host.dtype:  # otherwise the weight says it all
                master = f"master/{names.name_of[id(host)]}"
                snapshot.add(OPTIMIZER, Entry(master, own.detach(), own.dtype), STEP_FUNCTION)
    return {
        "kind": kind_of(optimizer),
        "names": groups,
        "param_groups": _mapped(packed["param_groups"], lambda _, tensor: tensor.detach().clone()),
        "state": values,
    }


def _mapped(value: Any, function: Callable[[str, torch.Tensor], Any], path: str = "") -> Any:
    """The same tree with ``function(path, tensor)`` in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, dict):
        return {k: _mapped(v, function, f"{path}.{k}" if path else str(k)) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        made = [_mapped(v, function, f"{path}.{i}" if path else str(i)) for i, v in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    return value


def resolved(value: Any, tensor: Callable[[str, list[int]], Any]) -> Any:
    """The tree with what ``tensor(name, stride)`` gives in the place of each reference."""
    if isinstance(value, dict):
        if MARK in value:
            return tensor(value[MARK], value["stride"])
        return {k: resolved(v, tensor) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        made = [resolved(v, tensor) for v in value]
        return made if isinstance(value, list) else tuple(made)
    return value
