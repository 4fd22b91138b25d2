"""Compact optimizers: they train the host weights in place, one fused pass a layer, instead of a copy of them."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from ..errors import ConfigError, ConfigTypeError
from .compact_memory import MASTERS, STATE_DTYPES, CompactMemory, Slot
from .compact_update import Numbers
from .host_optimizer import HostOptimizer

if TYPE_CHECKING:
    from ..grad_scaler import GradScaler
    from ..model import RoundPipe

Selection = str | Callable[[str, nn.Parameter], bool] | nn.Parameter | Iterable[Any]


class CompactOptions(TypedDict, total=False):
    """Arguments of the compact path, for when an optimizer of :mod:`roundpipe.optim` is given a wrapped model.

    master: "split" (bfloat16 weights are the upper half of an exact float32 master, 2 bytes more) or "float32".
    state_dtype: of the moments: "float32"; "bfloat16", rounded stochastically; or "int8", codes of eight bits with a
        scale for every 256 of them (block-wise dynamic quantisation as in Dettmers et al., "8-bit Optimizers via
        Block-wise Quantization", 2022).
    max_grad_norm: every step's gradients are scaled down to this global norm; None: no norm is computed.
    error_if_nonfinite: a norm that is infinite or NaN makes the step an error and changes nothing.
    groups: parameter groups, each a dict with options and "params": a pattern of names, a function of (name,
        parameter), a parameter, or a list of these; a parameter belongs to the first that selects it. The rest is a
        group of its own, in front.
    seed: of stochastic rounding.
    """

    master: str
    state_dtype: str
    max_grad_norm: float | None
    error_if_nonfinite: bool
    groups: Sequence[Mapping[str, Any]]
    seed: int


class CompactOptimizer(HostOptimizer):
    """Base of the compact optimizers; made by ``roundpipe.optim.AdamW(model, ...)`` and its like.

    A real ``torch.optim.Optimizer`` whose groups hold the host model's own parameters. ``model.step(optimizer)`` takes
    the step; :meth:`step` is the same, exact by default. Its state stands in ``state`` under torch's names; it is being
    written while a step runs, so call ``model.synchronize()`` before you look (``state_dict`` does).
    """

    _algorithm: str
    _moments: tuple[str, ...]

    def __init__(
        self,
        params: Any,
        *args: Any,
        master: str = "split",
        state_dtype: str = "float32",
        max_grad_norm: float | None = None,
        error_if_nonfinite: bool = False,
        groups: Sequence[Mapping[str, Any]] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        for name, value, known in (("master", master, MASTERS), ("state_dtype", state_dtype, tuple(STATE_DTYPES))):
            if value not in known:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(map(repr, known))}")
        check_max_grad_norm(max_grad_norm)
        self._model = wrapper_of(params)
        self._memory = CompactMemory(self._moments, master, state_dtype, seed)
        self.max_grad_norm = max_grad_norm
        self._memory.measures = max_grad_norm is not None
        self.error_if_nonfinite = bool(error_if_nonfinite)
        self._ensured: Any = None
        if groups and not _is_wrapper(params):
            raise ConfigError("groups=... selects parameters of a model; pass the model as first argument")
        self._places = {
            id(unit.parameters[i]): (unit, i) for unit in self._model._state.units for i in range(len(unit.parameters))
        }
        names = list(self._model._naming_model().named_parameters())
        self._names = {id(parameter): name for name, parameter in names}
        super().__init__(_select_groups(names, groups) if _is_wrapper(params) else params, *args, **options)
        with self._model._entered():
            self._model._state.attach_optimizer(self._memory)

    # -- groups ----------------------------------------------------------------------------------------------------
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; ``params`` may be whatever ``groups`` takes, of parameters that no group holds yet."""
        group = dict(param_group)
        if "params" in group:
            named = [(name, p) for name, p in self._model._naming_model().named_parameters() if p.requires_grad]
            taken = {id(p) for group in self.param_groups for p in group["params"]}
            group["params"] = _selected(named, group["params"], taken)
        super().add_param_group(group)
        for parameter in self.param_groups[-1]["params"]:
            place = self._places.get(id(parameter))
            if place is None:
                self.param_groups.pop()
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is not one of the model {self._model.name!r}, "
                    "which this optimizer trains; pass parameters of model.model"
                )
            unit, index = place
            name = self._names[id(parameter)]
            self._memory.add(parameter, name, unit, unit.layouts[index], group=len(self.param_groups) - 1)
        self._ensured = None

    # -- steps -----------------------------------------------------------------------------------------------------
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        is_async: bool = False,
        scaler: GradScaler | None = None,
    ) -> Any:
        """``model.step(self, is_async)``: takes the gradients of the window and returns at once.

        Every number in the groups is read before this returns. Exact steps too do not block: whatever shows weights
        through the model waits for them.

        Args:
            closure: if given, it computes the gradients first (with ``forward_backward``) and returns the loss.
            is_async: the next iteration computes with the weights from before this step.
            scaler: what scaled the losses. The gradients are unscaled in the same pass, and the step is skipped when
                one of them is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._model._entered():
            self._model._state.compact_step(self, is_async, scaler)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that the next step would take (a step leaves none behind)."""
        self._model.zero_grad(set_to_none)

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradients, before clipping, in the newest step that has computed it; None: none has.

        Does not wait: ``model.synchronize()`` first to have that of the last step. Without ``max_grad_norm`` no norm is
        computed; ``max_grad_norm=float("inf")`` computes it and clips nothing.
        """
        return self._memory.grad_norm

    def numbers(self) -> Numbers:
        """What a step that is called now computes with."""
        check_max_grad_norm(self.max_grad_norm)
        return Numbers(
            self._algorithm,
            [number for group in self.param_groups for number in self._row(group)],
            [self._counts(group) for group in self.param_groups],
            None if self.max_grad_norm is None else float(self.max_grad_norm),
            self.error_if_nonfinite,
        )

    def ensure_state(self, drain: Callable[[], None]) -> None:
        """State for everything that requires grad, before a step takes its window. ``drain`` waits for steps under way.

        Raises ConfigError for a parameter without a group, HostOutOfMemory.
        """
        if self._memory.retired:
            raise ConfigError(
                f"the model {self._model.name!r} has another optimizer, made after this one; only the newest can "
                "train it"
            )
        units = self._model._state.units
        wanted = [self._kept(group) for group in self.param_groups]
        signature = (wanted, [tuple(unit.trainable) for unit in units])
        if signature == self._ensured:
            return
        drain()
        self._memory.updates.clear()
        for slot in self._memory.ensure(units, wanted):
            self.state[slot.host] = self._memory.state_of(slot)
        self._ensured = signature

    def _row(self, group: Mapping[str, Any]) -> list[float]:
        """A group's numbers in the order of the kernel."""
        raise NotImplementedError

    def _kept(self, group: Mapping[str, Any]) -> list[bool]:
        """Which of ``_moments`` this group keeps."""
        raise NotImplementedError

    def _counts(self, group: Mapping[str, Any]) -> bool:
        """Whether a step of this group is counted."""
        return True

    # -- state -----------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """As torch's: moments in their own dtype, ``step``, and of masters ``master`` (float32) or ``master_low``
        (int16, the lower half of a split one). Waits for steps under way. Tensors are the live ones, not copies."""
        self._model.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over a state of this class, whatever its formats, or of the class of that name in ``torch.optim``.

        Load the model first: a master counts only where it rounds to the weight that the model has, so a loaded or
        edited weight is never reverted.

        Raises ValueError when groups or shapes do not fit; nothing has changed then.
        """
        from .compact_load import load_state

        self._model.synchronize()
        self._model._state.wait_saved()
        self.ensure_state(lambda: None)
        load_state(self, state_dict)

    def named_masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, exact float32 weight) of every parameter in the groups, one copy at a time; waits for steps first."""
        self._model.synchronize()
        for group in self.param_groups:
            for parameter in group["params"]:
                yield self._names[id(parameter)], self.slot(parameter).float32()

    def slot(self, parameter: nn.Parameter) -> Slot:
        return self._memory.slots[id(parameter)]

    def __reduce__(self) -> Any:
        raise ConfigError(
            f"{type(self).__name__} of a wrapped model can be neither copied nor pickled; keep its state_dict(), and "
            "load that into an optimizer made for the other model"
        )


def check_max_grad_norm(value: float | None) -> None:
    if value is not None and not float(value) > 0:
        raise ConfigError(f"max_grad_norm={value!r}: expected a number above 0, or None")


def _is_wrapper(value: Any) -> bool:
    from ..model import RoundPipe

    return isinstance(value, RoundPipe)


def is_compact(params: Any) -> bool:
    """Whether an optimizer of these would train a wrapped model's own weights."""
    return _is_wrapper(params) or (isinstance(params, (list, tuple)) and _owner(params) is not None)


def _owner(params: Sequence[Any]) -> RoundPipe | None:
    from ..ownership import owners

    for item in params:
        inner = item.get("params") if isinstance(item, dict) else item
        for parameter in inner if isinstance(inner, (list, tuple)) else [inner]:
            if isinstance(parameter, nn.Parameter):
                return owners.of(parameter)  # type: ignore[return-value]
    return None


def wrapper_of(params: Any) -> RoundPipe:
    owner = params if _is_wrapper(params) else _owner(params)
    if owner is None:
        raise ConfigTypeError("expected a RoundPipe, or groups of its parameters")
    return owner  # type: ignore[no-any-return]


def _selected(named: Sequence[tuple[str, nn.Parameter]], selection: Selection, taken: set[int]) -> list[nn.Parameter]:
    """Parameters that a group's ``params`` means; a parameter itself is taken even if another group holds it, so that
    the duplicate is noticed."""
    if isinstance(selection, str):
        found = [p for name, p in named if id(p) not in taken and fnmatch.fnmatchcase(name, selection)]
        what = f"the pattern {selection!r}"
    elif isinstance(selection, nn.Parameter):
        return [selection]
    elif callable(selection):
        found = [p for name, p in named if id(p) not in taken and selection(name, p)]
        what = "the function given as params"
    else:
        picked: dict[int, nn.Parameter] = {}
        for one in selection:
            picked |= {id(p): p for p in _selected(named, one, taken | picked.keys())}
        return list(picked.values())
    if not found:
        raise ConfigError(
            f"{what} selects no parameter that is not in another group; names are such as {named[0][0]!r}"
        )
    return found


def _select_groups(
    named: Sequence[tuple[str, nn.Parameter]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not named:
        raise ConfigError("no parameter of the model requires grad, so there is nothing to train")
    made: list[dict[str, Any]] = []
    taken: set[int] = set()
    for position, group in enumerate(groups):
        if not isinstance(group, Mapping) or "params" not in group:
            got = f"a dict with {list(group)}" if isinstance(group, Mapping) else type(group).__name__
            raise ConfigTypeError(
                f"groups[{position}]: got {got}, expected a dict with 'params' (a pattern of names, a function or a "
                "list) and the options of the group"
            )
        chosen = _selected(named, group["params"], taken)
        taken |= {id(parameter) for parameter in chosen}
        made.append({**group, "params": chosen})
    rest = [parameter for _, parameter in named if id(parameter) not in taken]
    return [{"params": rest}, *made] if rest else made
