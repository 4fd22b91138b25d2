"""Functions that ``torch.compile`` made of a layer's methods, made anew for the layer's skeleton on a device.

What is compiled is bound to the host's module. Called from a skeleton as it is it would compute with the host's weights
and train nothing.

Note [Code of one's own]
  What was compiled is kept with a function's code object, and PyTorch allows one of them ``recompile_limit`` (8)
  compilations. Then ``fullgraph=True`` is an error, and everything else runs uncompiled, with one line in the log. All
  layers of a class have the code of its ``forward``, on every device, and all layers of torch.nn that were compiled one
  by one share one frame of PyTorch's; each device, width and mode of autograd takes a compilation. So a function that
  is made anew gets a copy of its code, one for each device and kind of layer: what is left to count are modes and
  shapes. Layers that are alike share it, and with it what was compiled.

  A compiled module is entered by its ``__call__``, whose frames are PyTorch's and are left alone: what is compiled is
  the frame of ``forward`` inside. There the copy becomes the skeleton's own ``forward``. In the same way skeletons have
  methods of their own where a class has compiled one, and those of layers that are alike have one function. Frames of
  other modules and functions that are compiled one by one around a graph break keep their shared code.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_uncompiled: list[types.CodeType] = []


def uncompiled(function: _Function) -> _Function:
    """For functions of ours that are called amid a layer's operators, such as hooks of saved tensors: where a compiled
    layer runs an operator uncompiled, PyTorch would compile them, with the user's compiler.
    """
    _uncompiled.append(function.__code__)
    return function


def _leave_uncompiled() -> None:
    """To be called when something was compiled: then dynamo is loaded, which takes seconds."""
    while _uncompiled:
        torch._dynamo.eval_frame.skip_code(_uncompiled.pop())


_ENTRIES = (nn.Module.__call__, nn.Module._call_impl)


def is_compiled(value: object) -> bool:
    return isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_orig_callable")


def compile_layers(layers: Iterable[nn.Module], options: bool | Mapping[str, Any]) -> None:
    """Each layer by itself and in place, ``options``: of ``torch.compile``. What its owner has compiled stays so. Of a
    layer that is nothing but modules of torch.nn, ``nn.Module.compile`` would compile no frame (and with ``fullgraph``
    it would fail).
    """
    if options is False:
        return
    for layer in layers:
        own = any(not type(module).__module__.startswith("torch.nn.") for module in layer.modules())
        if (
            own
            and layer._compiled_call_impl is None
            and not isinstance(layer, torch._dynamo.eval_frame.OptimizedModule)
        ):
            layer.compile(**({} if options is True else options))


class DeviceCodes:
    """Copies of code for one device, see Note [Code of one's own]. They go with the functions that have them."""

    def __init__(self) -> None:
        self._copies: weakref.WeakValueDictionary[Any, types.CodeType] = weakref.WeakValueDictionary()
        self._compiled: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()

    def own(self, function: Callable[..., Any], kind: Any = None) -> types.FunctionType:
        """``function`` with the code that this device has for layers of this kind."""
        assert isinstance(function, types.FunctionType)
        key = (function.__code__, kind)
        code = self._copies.get(key)
        if code is None:
            code = self._copies[key] = function.__code__.replace()
        own = types.FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
        )
        own.__kwdefaults__, own.__qualname__ = function.__kwdefaults__, function.__qualname__
        own.__dict__.update(function.__dict__)
        return own

    def compiled(self, function: Any, kind: Any) -> Any:
        """The like of ``function``, which was compiled as a method of a class, for layers of this kind; None: it cannot
        be made again, and serves all devices.
        """
        key = (function, kind)
        made = self._compiled.get(key)
        if made is None:
            context, plain = _cell(function, "self"), function._torchdynamo_orig_callable
            if not callable(context) or not isinstance(plain, types.FunctionType):
                return None
            _leave_uncompiled()
            made = self._compiled[key] = context(self.own(plain, kind))
        return made


@dataclass
class Rebound:
    """
    Attributes:
        function: for the skeletons.
        module: the host's module that it is bound to; None: to none.
        enters: it is the module's call, and what is compiled when it runs is the frame of its ``forward``.
    """

    function: Any
    module: nn.Module | None = None
    enters: bool = False


def rebound(compiled: Any, twins: Mapping[int, nn.Module], codes: DeviceCodes) -> Rebound:
    """``compiled`` for the skeletons of the modules that it is bound to; itself when it is bound to none of them.

    Args:
        twins: skeletons by id of the host's module.

    Raises:
        ConfigError: this version of PyTorch keeps such functions in a way that we do not know.
    """
    function = compiled._torchdynamo_orig_callable
    found = _moved(function, twins, codes)
    if found.module is None:
        return Rebound(compiled)
    context = _cell(compiled, "self")
    if context is None or not callable(context):
        raise ConfigError(
            f"{getattr(function, '__qualname__', function)!r} was compiled in a way that cannot be repeated for each "
            "device; compile the layer as a whole (torch.compile(layer) or layer.compile()), or leave compiling out."
        )
    _leave_uncompiled()
    return Rebound(context(found.function), found.module, found.enters)


def own_forward(module: nn.Module, twin: nn.Module, codes: DeviceCodes) -> types.MethodType | None:
    """The ``forward`` of ``module``'s class with code of its own, for its skeleton; None: it is no plain method."""
    function = inspect.getattr_static(type(module), "forward", None)
    if not isinstance(function, types.FunctionType):
        return None
    return types.MethodType(codes.own(function, kind_of(module)), twin)


def compiled_methods(
    module: nn.Module, twin: nn.Module, codes: DeviceCodes
) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """Methods that the class of ``module`` has compiled, by name: the class's function, and the skeleton's method."""
    found: dict[str, Any] = {}
    for cls in reversed(type(module).__mro__):
        if cls in (nn.Module, object):
            continue
        found |= {name: value for name, value in vars(cls).items() if is_compiled(value)}
    made = {name: (function, codes.compiled(function, kind_of(module))) for name, function in found.items()}
    return {
        name: (function, _bound(one, twin))
        for name, (function, one) in made.items()
        if one is not None and getattr(type(module), name, None) is function
    }


_METHODS_KEEP_SELF = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def _bound(compiled: Callable[..., Any], twin: nn.Module) -> Callable[..., Any]:
    """PyTorch before 2.12 loses the ``self`` of a method that a module has for itself, where another compiled module
    calls it, and refuses functions with a ``__self__``. There it is a plain function, which a deep copy of the skeleton
    does not bind to the copy.
    """
    if _METHODS_KEEP_SELF:
        return types.MethodType(compiled, twin)

    def method(*args: Any, **kwargs: Any) -> Any:
        return compiled(twin, *args, **kwargs)

    plain = compiled._torchdynamo_orig_callable  # type: ignore[attr-defined]
    method.__name__, method.__qualname__, method.__doc__ = plain.__name__, plain.__qualname__, plain.__doc__
    own = inspect.signature(plain)
    method.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]
    return method


def kind_of(module: nn.Module) -> Any:
    """Equal for modules for which the same code compiles to the same: classes, shapes, dtypes, constants of torch.nn.

    Plain attributes of other classes do not count: many number their layers.
    """
    return tuple(
        (
            name,
            type(one),
            tuple((key, _facts(t)) for key, t in (*one._parameters.items(), *one._buffers.items())),
            tuple(sorted(_constants(one).items())) if type(one).__module__.startswith("torch.nn.") else (),
        )
        for name, one in module.named_modules()
    )


def _facts(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _constants(module: nn.Module) -> dict[str, str]:
    plain = (bool, int, float, str, tuple)
    return {key: repr(v) for key, v in vars(module).items() if isinstance(v, plain) and key != "training"}


def _moved(function: Any, twins: Mapping[int, nn.Module], codes: DeviceCodes) -> Rebound:
    """What was compiled for the skeletons, before it is compiled for them."""
    if isinstance(function, types.MethodType):
        module, method = function.__self__, function.__func__
        twin = twins.get(id(module))
        if twin is None or not isinstance(module, nn.Module):
            return Rebound(function)
        if method in _ENTRIES or not isinstance(method, types.FunctionType):
            return Rebound(types.MethodType(method, twin), module, enters=True)
        return Rebound(types.MethodType(codes.own(method, kind_of(module)), twin), module)
    inner = _cell(function, "fn")  # PyTorch's own frame around a module of torch.nn, or a method of one
    module = inner.__self__ if isinstance(inner, types.MethodType) else inner
    twin = twins.get(id(module))
    if twin is None or not isinstance(module, nn.Module):
        return Rebound(function)
    moved = types.MethodType(inner.__func__, twin) if isinstance(inner, types.MethodType) else twin

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return moved(*args, **kwargs)

    return Rebound(codes.own(call, kind_of(module)), module)


def _cell(function: Any, name: str) -> Any:
    """What ``function`` has captured under this name, or None."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or not cells or name not in code.co_freevars:
        return None
    return cells[code.co_freevars.index(name)].cell_contents
