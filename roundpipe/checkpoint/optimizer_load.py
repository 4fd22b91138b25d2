"""Loading the state of an optimizer from a checkpoint: checked first, then copied to where it belongs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import _ops
from ..errors import CheckpointMismatch
from ..host_placement import is_dense
from ..optim.compact import CompactOptimizer
from .names import ModelNames
from .optimizer_state import kind_of, named_groups, resolved
from .tensor_file import TensorFiles

if TYPE_CHECKING:
    from ..model import RoundPipe

_MASTERS = ("master", "master_low")


class OptimizerLoad:
    """Raises CheckpointMismatch, before anything is written, when the state does not belong to this optimizer.

    ``saved``: what ``add_optimizer`` gave; ``files``: where its tensors are.
    """

    def __init__(
        self,
        model: RoundPipe,
        optimizer: torch.optim.Optimizer,
        names: ModelNames,
        saved: dict[str, Any],
        files: TensorFiles,
    ) -> None:
        self.model, self.optimizer, self.names = model, optimizer, names
        self._files = files
        if saved["kind"] != kind_of(optimizer):
            raise CheckpointMismatch(
                f"the checkpoint holds the state of {saved['kind']}, the optimizer is a {kind_of(optimizer)}"
            )
        groups, self._by_id = named_groups(model, optimizer, names)
        if [len(group) for group in groups] != [len(group) for group in saved["names"]]:
            raise CheckpointMismatch(
                f"the checkpoint has groups of {[len(g) for g in saved['names']]} parameters, the optimizer of "
                f"{[len(g) for g in groups]}"
            )
        # Parameters may stand in another order in their group; those of other models are matched by position.
        self._state: dict[int, Any] = {}
        # Strides that the tensors of the state had, by id; kept with the tensor, so that no other gets its id.
        self._strides: dict[int, tuple[torch.Tensor, tuple[int, ...]]] = {}
        self._groups = []
        number = 0
        for position, (own, theirs) in enumerate(zip(groups, saved["names"], strict=True)):
            if set(own) != set(theirs):
                other = sorted(str(n) for n in set(own) ^ set(theirs))
                raise CheckpointMismatch(
                    f"group {position} holds other parameters in the checkpoint, such as {other[0]!r}"
                )
            options = saved["param_groups"][position]
            keys = dict(zip(theirs, options["params"], strict=True))
            indices = []
            for place, name in enumerate(own):
                key = keys[name] if name is not None else options["params"][place]
                if key in saved["state"]:
                    self._state[number] = resolved(saved["state"][key], self._tensor)
                indices.append(number)
                number += 1
            self._groups.append({**options, "params": indices})
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._check_shapes()
        if isinstance(optimizer, CompactOptimizer):
            from ..optim.compact_load import check_state

            for index, parameter in enumerate(self._parameters):
                master = f"master/{self._by_id[id(parameter)]}"
                if master in files:
                    self._state.setdefault(index, {}).setdefault("master", files.tensor(master))
            optimizer.ensure_state(lambda: None)
            try:
                check_state(optimizer, self._state_dict())
            except ValueError as error:
                raise CheckpointMismatch(f"the optimizer state of the checkpoint does not fit: {error}") from error

    def _tensor(self, name: str, stride: list[int]) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointMismatch(f"the checkpoint has no tensor {name!r}, which its optimizer state names")
        tensor = self._files.tensor(name)
        self._strides[id(tensor)] = tensor, tuple(stride)
        return tensor

    def _state_dict(self) -> dict[str, Any]:
        return {"state": self._state, "param_groups": self._groups}

    def _check_shapes(self) -> None:
        for index, parameter in enumerate(self._parameters):
            present = self.optimizer.state.get(parameter, {})
            master = f"master/{self._by_id.get(id(parameter))}"
            if master in self._files and self._files.specs[master].shape != tuple(parameter.shape):
                raise CheckpointMismatch(
                    f"{master!r} is {self._files.specs[master]}, expected {tuple(parameter.shape)}"
                )
            for key, value in self._state.get(index, {}).items():
                before = present.get(key)
                if (
                    isinstance(before, torch.Tensor)
                    and isinstance(value, torch.Tensor)
                    and not key.endswith("_scale")
                    and before.shape != value.shape
                ):
                    raise CheckpointMismatch(
                        f"{key!r} of parameter {self._by_id.get(id(parameter), index)!r} has shape "
                        f"{tuple(value.shape)} in the checkpoint, {tuple(before.shape)} in the optimizer"
                    )

    # -- writing -----------------------------------------------------------------------------------------------------
    def apply(self) -> None:
        """After the weights were loaded."""
        if isinstance(self.optimizer, CompactOptimizer):
            self.optimizer.load_state_dict(self._state_dict())
            return
        hosts = {id(own): host for host, own in self.model._state.optimizer.pairs()}
        with torch.no_grad():
            for index, parameter in enumerate(self._parameters):
                values = self._state.get(index)
                host = hosts.get(id(parameter))
                master = self._master(parameter, values, None if host is None else host.detach())
                if master is not None:
                    parameter.copy_(master)
                if values:
                    present = self.optimizer.state.get(parameter, {})
                    plain = _plain(values, parameter)
                    self._state[index] = {k: self._owned(v, present.get(k)) for k, v in plain.items()}
            # Those that this optimizer does not have.
            for host, own in self.model._state.optimizer.pairs():
                name = f"master/{self.names.name_of.get(id(host))}"
                if name in self._files and id(own) not in self._by_id_of_optimizer():
                    own.copy_(self._files.tensor(name))
        self.optimizer.load_state_dict(self._state_dict())

    def _by_id_of_optimizer(self) -> set[int]:
        return {id(parameter) for parameter in self._parameters}

    def _master(self, parameter: torch.Tensor, values: Any, weight: torch.Tensor | None) -> torch.Tensor | None:
        name = f"master/{self._by_id.get(id(parameter))}"
        if name in self._files:
            return self._files.tensor(name)
        if values and "master_low" in values and weight is not None:
            upper = weight.contiguous().view(-1)
            joined = torch.empty(upper.numel())
            _ops.join_master(upper, values["master_low"].reshape(-1), joined)
            return joined.view(weight.shape)
        return None

    def _owned(self, value: Any, present: Any) -> Any:
        """Memory that the optimizer may keep, in the order that it had: what it has already, where that fits."""
        if isinstance(value, dict):
            return {k: self._owned(v, None) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([self._owned(v, None) for v in value])
        if not isinstance(value, torch.Tensor):
            return value
        _, stride = self._strides.get(id(value), (value, value.stride()))
        if (
            isinstance(present, torch.Tensor)
            and (present.shape, present.dtype, present.stride()) == (value.shape, value.dtype, stride)
            and present.device.type == "cpu"
        ):
            return present.copy_(value)
        dense = is_dense(torch.empty_strided(value.shape, stride, device="meta"))
        return torch.empty_strided(value.shape, stride if dense else value.stride(), dtype=value.dtype).copy_(value)

    def restore_pending(self, previous: TensorFiles) -> None:
        """The weights from before an asynchronous step go to the host, the newest to where that step left them."""
        state = self.model._state
        hosts = {id(self.names.parameters[name]): name for name in previous.specs if name in self.names.parameters}
        restored: dict[int, tuple[Any, set[int]]] = {}
        with torch.no_grad():
            for unit in state.units:
                for position, parameter in enumerate(unit.trainable_parameters):
                    if id(parameter) not in hosts:
                        continue
                    if isinstance(self.optimizer, CompactOptimizer):
                        shadow = unit.gradient_layouts[position].view(self.optimizer._memory.shadow(unit))
                        shadow.copy_(parameter)
                    # Not an edit: written as a step publishes, without counting a version.
                    layout = unit.layouts[unit.trainable[position]]
                    layout.shaped(unit.home(parameter)).copy_(previous.tensor(hosts[id(parameter)]))
                    restored.setdefault(unit.key, (unit, set()))[1].add(position)
        if not restored:
            return
        state.generation += 1
        if isinstance(self.optimizer, CompactOptimizer):
            state.compact.leave_pending(self.optimizer._memory, restored)
        else:
            state._unpublished = True


def _plain(values: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """As torch's classes keep it: without masters, and moments as numbers."""
    made = {}
    moments = [k for k in values if f"{k}_scale" in values]
    for key, value in values.items():
        if key in _MASTERS or (key.endswith("_scale") and key.removesuffix("_scale") in moments):
            continue
        if key in moments:
            # Blocks that share a scale are consecutive in the memory of the weight.
            codes = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.uint8).copy_(value)
            flat = torch.empty(value.numel())
            order = moments.index(key)
            _ops.decode_moment(codes.as_strided(flat.shape, (1,)), values[f"{key}_scale"].contiguous(), flat, order)
            value = flat.as_strided(parameter.shape, parameter.stride())
        made[key] = value
    return made
