"""Module skeletons: one for each layer and device, sharing everything with the host module but its tensors.

A skeleton is a shallow copy of the layer's module tree whose parameters are re-pointed to views of the device's weight
region at every job, and whose buffers are the device's copies. Everything else (attributes, hooks, train/eval flags) is
taken from the host module before each call and plain attributes that the forward assigned are written back after it.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import held
from .attribute_memo import INERT, MOVES, OWN, AttributeMemo, moves
from .compiled import DeviceCodes, Rebound, compiled_methods, is_compiled, own_forward, rebound
from .errors import ConfigError, RoundPipeError

if TYPE_CHECKING:
    from .boundary import HostTensor

_MISSING = object()

Attributes = dict[int, dict[str, Any]]
"""Plain attributes, hooks and flags of host modules, by id of the module."""


class DeviceParameters:
    """The device-side Parameter objects of one device: one for each host parameter, whatever layers use it.

    Layers that share a parameter share its object here too, so that autograd adds their gradients as it would on the
    host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.accumulated: Callable[[nn.Parameter], None] | None = None  # told of every accumulation of a gradient
        self.codes = DeviceCodes()
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._followed: set[int] = set()

    def get(self, host: nn.Parameter) -> nn.Parameter:
        entry = self._made.get(id(host))
        if entry is not None and entry[0] is host:
            return entry[1]
        data = torch.empty(0, dtype=host.dtype, device=self.device)
        trainable = data.is_floating_point() or data.is_complex()  # others hold quantised weights
        made = nn.Parameter(data, requires_grad=trainable)
        made.__dict__.update(host.__dict__)
        if trainable:
            made.register_post_accumulate_grad_hook(self._hook)
        self._made[id(host)] = (host, made)
        return made

    def follow_hooks(self, host: nn.Parameter) -> None:
        """Hooks on the host's parameter see, and may replace, the gradients of its object on this device.

        Raises:
            ConfigError: a hook waits for ``.grad`` of the host's parameter, which is not there during a backward.
        """
        if host._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            raise ConfigError(
                "a parameter has a post-accumulate-grad hook (an optimizer step during backward, most likely); its "
                "gradients accumulate on the devices and come to the host later. Put what it does into the function "
                "given to model.step()."
            )
        if host._backward_hooks and id(host) not in self._followed:
            self._followed.add(id(host))
            self.get(host).register_hook(functools.partial(_run_hooks, host))

    def _hook(self, parameter: torch.Tensor) -> None:
        if self.accumulated is not None:
            self.accumulated(parameter)  # type: ignore[arg-type]

    def leave_region(self) -> None:
        """The region that they were views of goes; the next job points them to another. Only while no job is open."""
        for _, made in list(self._made.values()):
            made.data = torch.empty(0, dtype=made.dtype, device=self.device)
            made.grad = None

    def forget(self, hosts: list[nn.Parameter]) -> None:
        for host in hosts:
            self._made.pop(id(host), None)
            self._followed.discard(id(host))


def _run_hooks(host: nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    hooks: dict[int, Callable[[torch.Tensor], torch.Tensor | None]] = host._backward_hooks or {}
    for hook in list(hooks.values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad


def _inside(container: Any) -> tuple[Any, ...]:
    return tuple(container) if type(container) is list else (*container, *container.values())


def _other(value: Any, others: dict[int, Any]) -> Any:
    if isinstance(value, types.MethodType):
        owner = others.get(id(value.__self__))  # where it is no skeleton, its class does not have the method
        return value if type(owner) is not type(value.__self__) else types.MethodType(value.__func__, owner)
    return others.get(id(value), value) if isinstance(value, MOVES) else value


def foreign_gradient(parameter: nn.Parameter) -> RoundPipeError:
    """For a gradient of a parameter that is in no layer of the present stage."""
    return RoundPipeError(
        f"a parameter of shape {tuple(parameter.shape)} got a gradient that belongs to another layer, which is not in "
        "this stage: a layer handed on a function or an object that computes with its weights later. Compute inside "
        "the layer and hand on tensors, or register the parameter in both layers."
    )


def late_gradient(name: str) -> RoundPipeError:
    """For a gradient that comes when those of its unit are on their way to the host."""
    return RoundPipeError(
        f"parameter {name!r} got a gradient after its unit was complete; a reentrant checkpoint inside a layer does "
        "this: use torch.utils.checkpoint with use_reentrant=False."
    )


BufferPlace = tuple[nn.Module, str, "int | None"]
"""Module of the host, name, number of the tensor: one that stands at several places has one number; None: no tensor."""


class LayerReplica:
    """The skeleton of one layer on one device. Used by that device's worker only."""

    def __init__(self, layer: nn.Module, parameters: DeviceParameters) -> None:
        self.layer = layer
        self._parameters = parameters
        self._nodes: list[tuple[nn.Module, nn.Module]] = []
        self._given: list[dict[str, Any]] = []
        self._memos: list[AttributeMemo] = []
        # By node and name, of lists and dicts with something to exchange: the host's, and what its copy had in it.
        self._copies: list[dict[str, tuple[Any, tuple[Any, ...]]]] = []
        # By id of the module and name: (its value on the host, the device's copy, version of the copy when loaded).
        self.loaded_buffers: dict[tuple[int, str], tuple[weakref.ref[HostTensor], torch.Tensor, int]] = {}
        self.placed_buffers: dict[tuple[int, str], nn.Module] = {}  # by the same: skeletons that have them
        self.root = self._build()

    def _twin(self, module: nn.Module) -> nn.Module | None:
        """What stands for ``module`` instead of a skeleton; None: a skeleton."""
        return None

    # -- structure -----------------------------------------------------------------------------------------------
    def _build(self) -> nn.Module:
        self._twins: dict[int, nn.Module] = {}
        # And parameters, which follow at the next job: what the device has, by id of what the host has, and back.
        self._moved: dict[int, Any] = self._twins
        self._origins: dict[int, Any]
        self._compiled: dict[int, tuple[Any, Rebound]] = {}
        # Of compiled modules, by id of the host's: its class's, and what the skeleton has for it.
        self._forwards: dict[int, tuple[Any, types.MethodType | None]] = {}
        # Of classes that have compiled methods, by index of the node and name.
        self._methods: dict[int, dict[str, tuple[Any, Callable[..., Any]]]] = {}
        self._nodes = []
        self._replaced: list[tuple[nn.Module, nn.Module]] = []  # and by what, see _twin
        root = self._make(self.layer)
        self._origins = {id(twin): module for module, twin in (*self._nodes, *self._replaced)}
        self._given = [{} for _ in self._nodes]
        self._copies = [{} for _ in self._nodes]
        self._memos = [AttributeMemo() for _ in self._nodes]
        self._methods = {
            index: methods
            for index, (module, twin) in enumerate(self._nodes)
            if (methods := compiled_methods(module, twin, self._parameters.codes))
        }
        return root

    def _make(self, module: nn.Module) -> nn.Module:
        twins = self._twins
        known = twins.get(id(module))
        if known is None:  # not `or`: an empty container is false
            known = self._twin(module)
            if known is not None:
                self._replaced.append((module, known))
        if known is not None:
            twins[id(module)] = known
            return known
        twin = module.__class__.__new__(module.__class__)
        twins[id(module)] = twin
        self._nodes.append((module, twin))
        twin.__dict__["_modules"] = {
            name: None if child is None else self._make(child) for name, child in module._modules.items()
        }
        twin.__dict__["_parameters"] = {
            name: None if p is None else self._parameters.get(p) for name, p in module._parameters.items()
        }
        twin.__dict__["_buffers"] = dict(module._buffers)
        return twin

    def _structure_changed(self) -> bool:
        for module, twin in self._nodes:
            children = twin._modules
            same = module.__class__ is twin.__class__ and module._modules.keys() == children.keys()
            if not same or module._parameters.keys() != twin._parameters.keys():
                return True
            for name, child in module._modules.items():
                if children[name] is not (None if child is None else self._twins.get(id(child))):
                    return True
        return False

    # -- before and after a call ---------------------------------------------------------------------------------
    def begin_job(self) -> None:
        """Follows structural changes of the host module; parameters of the skeleton become the device's objects."""
        if self._structure_changed():
            self._build_again()
        self._moved = dict(self._twins)
        self._origins = {id(twin): module for module, twin in (*self._nodes, *self._replaced)}
        for module, twin in self._nodes:
            own = twin._parameters
            for name, parameter in module._parameters.items():
                own[name] = None if parameter is None else self._parameters.get(parameter)
                if parameter is not None:
                    self._moved[id(parameter)] = own[name]
                    self._origins[id(own[name])] = parameter
                    self._parameters.follow_hooks(parameter)

    def _build_again(self) -> None:
        self.root = self._build()

    def attributes(self) -> Attributes:
        """What ``pull`` would take over now."""
        return {
            id(module): {name: value for name, value in module.__dict__.items() if name not in OWN}
            for module, _ in self._nodes
        }

    def pull(self, noted: Attributes | None = None) -> None:
        """Takes over attributes, hooks and flags of the host module, or what they were when ``noted`` was made."""
        recomputes = noted is not None
        for index, (module, twin) in enumerate(self._nodes):
            host = module.__dict__ if noted is None else noted.get(id(module), module.__dict__)
            own, memo = twin.__dict__, self._memos[index]
            if memo.still(recomputes, host, own):
                continue
            met = tuple(host.items())  # at once: another device's worker may assign to the host's module
            copies: dict[str, tuple[Any, tuple[Any, ...]]] = {}
            given, simple = {}, index not in self._methods and id(module) not in self._forwards
            for name, value in met:
                if name in OWN:
                    continue
                mine = given[name] = value if type(value) in INERT else self._rebind(value)
                if mine is not value and type(value) in (list, dict):
                    copies[name] = value, _inside(mine)
                simple = simple and (type(value) in INERT or not moves(value))
            for name in own.keys() - given.keys() - OWN:
                del own[name]
            own.update(given)
            self._given[index], self._copies[index] = given, copies
            memo.note(recomputes, met, own, simple)
        for index, methods in self._methods.items():
            module, twin = self._nodes[index]
            for name, (function, method) in methods.items():
                if name not in self._given[index] and getattr(type(module), name, None) is function:
                    self._given[index][name] = twin.__dict__[name] = method
        if self._forwards:
            self._pull_forwards()

    def _pull_forwards(self) -> None:
        """Compiled modules have a ``forward`` with code of its own, unless the host's module has one itself."""
        for index, (module, twin) in enumerate(self._nodes):
            known = self._forwards.get(id(module))
            if known is None or "forward" in self._given[index]:
                continue
            function = getattr(type(module), "forward", None)
            if known[0] is not function:  # the first time, or the class was given another
                known = function, own_forward(module, twin, self._parameters.codes)
                self._forwards[id(module)] = known
            if known[1] is not None:
                self._given[index]["forward"] = twin.__dict__["forward"] = known[1]

    def push(self, noted: Attributes | None = None) -> None:
        """Writes back the plain attributes that the forward assigned or deleted; into ``noted`` too, for the next.

        See Note [Handed on] in held.py for what stays here.
        """
        places = zip(self._nodes, self._given, self._copies, self._memos, strict=True)
        for (module, twin), given, copies, memo in places:
            own = twin.__dict__
            if memo.untouched(own):
                continue
            homes = [module.__dict__] if noted is None else [module.__dict__, noted.setdefault(id(module), {})]
            for name, value in own.items():
                if name in OWN:
                    continue
                if given.get(name, _MISSING) is not value:
                    returned = self._exchanged(value, self._origins)
                    if type(value) not in held.PLAIN and held.bound(returned, self._origins):
                        continue
                    for home in homes:
                        home[name] = returned
                elif type(value) in (list, dict):
                    if name not in copies:
                        self._return_inside(value)
                        continue
                    shared, before = copies[name]
                    now = _inside(value)
                    if len(before) != len(now) or not all(map(operator.is_, before, now)):
                        self._return_copy(value, shared)
            for name in given.keys() - own.keys():
                for home in homes:
                    home.pop(name, None)

    def _return_inside(self, shared: Any) -> None:
        """What the forward put into a container of the host's becomes the host's."""
        for key, value in list(enumerate(shared) if type(shared) is list else shared.items()):
            if isinstance(value, MOVES):
                other = _other(value, self._origins)
                if other is not value:
                    shared[key] = other

    def _return_copy(self, value: Any, shared: Any) -> None:
        """The host's container becomes what the forward made of its copy."""
        returned = self._exchanged(value, self._origins)
        if type(shared) is list:
            shared[:] = returned
            return
        shared.update(returned)  # never empty meanwhile: another device's worker may look at it
        for key in shared.keys() - returned.keys():
            shared.pop(key, None)

    def _rebind(self, value: Any) -> Any:
        """Methods, modules and parameters of the host layer that stand in attributes, or in lists there (as nn.LSTM
        keeps its weights), become those of the skeleton.
        """
        if is_compiled(value):
            known = self._compiled.get(id(value))
            if known is None:  # once: what it compiles is kept with it
                codes = self._parameters.codes
                known = self._compiled[id(value)] = (value, rebound(value, self._twins, codes))
                if known[1].enters:
                    self._forwards.setdefault(id(known[1].module), (None, None))
            return known[1].function
        return self._exchanged(value, self._moved)

    @staticmethod
    def _exchanged(value: Any, others: dict[int, Any]) -> Any:
        """``value`` with the modules, parameters and methods in it exchanged for those of ``others``, by id."""
        if isinstance(value, MOVES):
            return _other(value, others)
        if type(value) in (list, tuple) and any(isinstance(v, MOVES) for v in value):
            return type(value)(_other(v, others) for v in value)
        if type(value) is dict and any(isinstance(v, MOVES) for v in value.values()):
            return {k: _other(v, others) for k, v in value.items()}
        return value

    # -- buffers -------------------------------------------------------------------------------------------------
    def buffer_places(self) -> list[BufferPlace]:
        """Of every buffer, as the host has them now."""
        numbers: dict[int, int] = {}
        return [
            (module, name, None if buffer is None else numbers.setdefault(id(buffer), len(numbers)))
            for module, _ in self._nodes
            for name, buffer in module._buffers.items()
        ]

    def skeleton_of(self, module: nn.Module) -> nn.Module:
        twin = self._twins.get(id(module))
        if twin is None:
            raise ConfigError(
                f"a {type(module).__name__} was taken out of its layer while backward still ran. Call "
                "model.synchronize() before you change which modules a layer has."
            )
        return twin
