"""``estimate_memory``: the memory of a training run before it, from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _ops
from .auto_plan import check_positive, usable_bytes
from .devices import devices
from .errors import ConfigError, ConfigTypeError
from .estimate_search import Machine, Planned, Profile, automatic_plan, fastest_plan, predict
from .hf.causal_lm import causal_lm_to_sequential, is_causal_lm
from .hf.layers import PrefixLayer
from .hf.meta_model import add_lora, load_config, meta_layers, meta_model
from .host_memory_model import STEPS, HostPeak, activation_bytes, gradient_bytes, predict_host
from .host_placement import MODES
from .layer_list import layers_of
from .layer_memory import recording
from .layer_run import LayerRun
from .layer_sizes import UnitSize, layer_costs_of, unit_sizes
from .live_memory import MemoryUse
from .optimizer_format import OptimizerFormat
from .plan import ModelExecutePlan
from .run_config import RoundPipeRunConfig
from .stage_search import StageLists

__all__ = ["Configuration", "Estimate", "MemoryEstimate", "estimate_memory"]

_GRAINS = ("stage", "layer")
_PROCESS_BYTES = {"cuda": 5 << 29, "host": 1 << 29}
"""Of Python and torch; on GPUs with the libraries of CUDA, and its context on the first GPU."""
_CONTEXT_BYTES = 1 << 29
"""Host memory that the context of each further GPU takes."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Settings of a run."""

    num_microbatch: int
    recompute_grain: str
    forward: tuple[range, ...]
    """Stages of the plan, ascending."""
    backward: tuple[range, ...]
    """Descending; the first is the fused one."""
    pin_model: str
    optimizer: str
    """See optimizer_format.py."""
    steps: str
    """"async", "exact", or "announced" with their call: ``forward_backward(..., step=optimizer)``."""

    def plan(self) -> ModelExecutePlan:
        plan = ModelExecutePlan()
        plan.fwd_plan, plan.bwd_plan = list(self.forward), list(self.backward)
        return plan

    def run_config(self) -> RoundPipeRunConfig:
        """For ``forward_backward(run_config=...)``."""
        return RoundPipeRunConfig(
            num_microbatch=self.num_microbatch, recompute_grain=self.recompute_grain, execute_plan=self.plan()
        )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The memory of one configuration. Bytes."""

    configuration: Configuration
    device: MemoryUse
    """The peak of the device that needs most."""
    host: HostPeak
    fits_device: bool
    """Within nine tenths of the device; the rest is for its context, libraries and fragments."""
    fits_host: bool
    relative_time: float
    """Against other estimates of the same call; from nominal speeds, see Note [Times without measurements]."""

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What :func:`estimate_memory` returns; ``str()`` of it is a table."""

    asked: Estimate
    """The settings that were asked for."""
    fastest: Estimate | None
    """The fitting settings that should be quickest. None: nothing that was tried fits."""
    nearest: Estimate | None
    """Where nothing fits, the settings that miss by the smallest share of a limit; None: something fits."""
    num_devices: int
    device_limit_bytes: int | None
    host_limit_bytes: int | None
    parameters: int
    trainable_parameters: int

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits."""
        return self.asked.fits

    @property
    def device(self) -> MemoryUse:
        return self.asked.device

    @property
    def host(self) -> HostPeak:
        return self.asked.host

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as ``python -m roundpipe estimate --json`` prints them."""

        def plain(estimate: Estimate | None) -> dict[str, Any] | None:
            if estimate is None:
                return None
            found = dataclasses.asdict(estimate)
            for name in ("forward", "backward"):
                found["configuration"][name] = [[s.start, s.stop] for s in getattr(estimate.configuration, name)]
            found["device"]["total_bytes"] = estimate.device.total_bytes
            found["host"]["total_bytes"] = estimate.host.total_bytes
            return found | {"fits": estimate.fits}

        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return kept | {
            "fits": self.fits,
            "asked": plain(self.asked),
            "fastest": plain(self.fastest),
            "nearest": plain(self.nearest),
        }

    def __str__(self) -> str:
        from .estimate_text import describe

        return describe(self)


@recording()
def estimate_memory(
    model: Any,
    batch: int,
    seq: int | None = None,
    *,
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
    label: Any = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    num_microbatch: int | None = None,
    recompute_grain: str = "stage",
    plan: ModelExecutePlan | None = None,
    pin_model: str = "alloc",
    optimizer: str = "compact",
    optim_dtype: torch.dtype | None = torch.float32,
    is_async: bool = True,
    accumulates: bool = False,
    announced: bool = False,
    lora: int | None = None,
    device_kind: str | None = None,
    num_devices: int | None = None,
    device_memory_bytes: int | None = None,
    host_memory_bytes: int | None = None,
    process_bytes: int | None = None,
) -> MemoryEstimate:
    """The memory that training takes on each device and on the host, from shapes alone: nothing is computed, and the
    model may be on the meta device. Changes nothing and waits for nothing.

    Every layer is run once on tensors without values, forward and backward, and what lives at a moment is counted. A
    GPU's kernels are taken into account without a GPU (``device_kind="cuda"``).

    Args:
        model: a causal language model of transformers, its configuration, or the path of one (a folder, a JSON file or
            a name on the hub); an ``nn.Sequential`` of layers, or any module as one layer; a RoundPipe of one of these.
        batch: rows of a ``forward_backward``.
        seq: tokens of a row, for a language model, which gets ``input_ids``, ``labels`` and ``return_logits=False``.
        inputs: ``(args, kwargs)`` of the first layer, for the whole batch, for every other model; only shapes and
            dtypes are looked at. Tensors whose dim 0 is ``batch`` are cut into microbatches.
        label, loss_fn: as for ``forward_backward``.
        num_microbatch: None: one more than there are devices, as in a call.
        recompute_grain, plan: as in RoundPipeRunConfig; plan None: the one a call makes itself.
        pin_model: as in RoundPipe. With "off" frozen weights are taken to be mapped from files.
        optimizer: ``"adamw"`` and its like on parameters of ``optim_dtype``, or ``"compact:split/int8"`` and its like,
            see optimizer_format.py; ``"none"``.
        is_async: steps are asynchronous.
        accumulates: a step follows several calls.
        announced: steps of a compact optimizer are announced with their call (``forward_backward(..., step=...)``), and
            so are not asynchronous.
        lora: rank of adapters that are put on every linear layer of a language model given by its configuration.
        device_kind: ``"cuda"`` or ``"host"``; None: that of the present devices.
        num_devices, device_memory_bytes: None: the present devices', if they are of that kind; else one device, or no
            limit.
        host_memory_bytes: None: this machine's, or its control group's.
        process_bytes: host memory of the process without the model; None: a usual value.

    Returns:
        The estimate of what was asked for, and of the settings that should be quickest among those that fit, or, where
        none does, of those that miss by least. These
        range over num_microbatch, recompute_grain and plans; pin_model, the kind of steps and the optimizer's format
        change only where the host has too little memory for what was asked for.

    Raises:
        ConfigError, ConfigTypeError: an argument cannot be used, or a layer's course depends on values.
    """
    batch = check_positive("batch", batch)
    if num_microbatch is not None:
        num_microbatch = check_positive("num_microbatch", num_microbatch)
    _check_choice("recompute_grain", recompute_grain, _GRAINS)
    _check_choice("pin_model", pin_model, MODES)
    wanted = OptimizerFormat.parse(optimizer)
    if announced and wanted.master is None:
        raise ConfigError(
            f"announced=True: got optimizer={optimizer!r}; expected a compact one ('compact:MASTER/STATE'): only its "
            "steps can be announced with their call"
        )
    steps = "announced" if announced else "async" if is_async else "exact"
    machine = _machine(device_kind, num_devices, device_memory_bytes)
    layers, is_language_model = _layers(model, lora)
    if wanted.trains and not any(p.requires_grad for layer in layers for p in layer.parameters()):
        raise ConfigError("no parameter of the model requires grad, so there is nothing to train")
    call = _Call(batch, *_inputs(is_language_model, batch, seq, inputs, label, loss_fn))
    if host_memory_bytes is None:
        total, _, group, _, _ = _ops.host_limits()[:5]
        host_memory_bytes = min(filter(None, (total, group)), default=None)
    if process_bytes is None:
        process_bytes = _PROCESS_BYTES[machine.kind] + _CONTEXT_BYTES * (machine.num_devices - 1)
    estimator = _Estimator(layers, call, machine, wanted, host_memory_bytes, process_bytes, accumulates, optim_dtype)
    pieces = min(batch, num_microbatch or machine.num_devices + 1)
    profile = estimator.profile(pieces)
    if plan is None:
        planned = automatic_plan(profile, machine, recompute_grain)
    else:
        plan.check_valid(len(layers), "fused")
        planned = predict(profile, machine, StageLists(list(plan.fwd_plan), list(plan.bwd_plan)), recompute_grain)
    chosen = "alloc" if pin_model == "auto" else pin_model
    asked = estimator.estimate(profile, planned, chosen, wanted, steps)
    if pin_model == "auto" and not asked.fits_host:
        asked = estimator.estimate(profile, planned, "off", wanted, steps)
    fastest, nearest = estimator.search(asked)
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    return MemoryEstimate(
        asked=asked,
        fastest=fastest,
        nearest=nearest,
        num_devices=machine.num_devices,
        device_limit_bytes=machine.memory_bytes,
        host_limit_bytes=host_memory_bytes,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
    )


@dataclass(frozen=True)
class _Call:
    """The whole batch's arguments, whose tensors are cut along dim 0."""

    batch: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: Any
    loss_fn: Callable[[Any, Any], Any]

    def piece(self, num_microbatch: int, *, smallest: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The largest microbatch's, or the smallest one's, without values."""
        rows = self.batch // num_microbatch if smallest else -(-self.batch // num_microbatch)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            fits = tensor.dim() > 0 and tensor.shape[0] == self.batch
            size = (rows, *tensor.shape[1:]) if fits else tensor.shape
            return torch.empty(size, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)

        return pytree.tree_map_only(torch.Tensor, cut, (self.args, self.kwargs, self.label))  # type: ignore[no-any-return]


class _Estimator:
    def __init__(
        self,
        layers: Sequence[nn.Module],
        call: _Call,
        machine: Machine,
        optimizer: OptimizerFormat,
        host_limit: int | None,
        process_bytes: int,
        accumulates: bool,
        optim_dtype: torch.dtype | None,
    ) -> None:
        self._call = call
        self._machine = machine
        self._optimizer = optimizer
        self._host_limit = host_limit
        self._process_bytes = process_bytes
        self._accumulates, self._optim_dtype = accumulates, optim_dtype
        self._units: list[UnitSize] = unit_sizes(layers)
        self._costs = layer_costs_of(layers, self._units)
        self._lowest = next((i for i, cost in enumerate(self._costs) if cost.gradient_bytes), len(layers))
        self._run = LayerRun(layers, machine.kind)
        self._profiles: dict[int, Profile] = {}

    def _profile_or_none(self, num_microbatch: int) -> Profile | None:
        """None: the layers do not take microbatches that small (BatchNorm wants more than one row, for example)."""
        try:
            if self._call.batch % num_microbatch:
                self._run.run(*self._call.piece(num_microbatch, smallest=True), self._call.loss_fn)
            return self.profile(num_microbatch)
        except ConfigError:
            return None

    def profile(self, num_microbatch: int) -> Profile:
        if num_microbatch not in self._profiles:
            args, kwargs, label = self._call.piece(num_microbatch)
            memory, work = self._run.run(args, kwargs, label, self._call.loss_fn)
            self._profiles[num_microbatch] = Profile.of(
                self._costs, memory, work, num_microbatch, self._lowest, self._machine.kind
            )
        return self._profiles[num_microbatch]

    def estimate(
        self, profile: Profile, planned: Planned, pin_model: str, optimizer: OptimizerFormat, steps: str
    ) -> Estimate:
        host = predict_host(
            self._units,
            optimizer,
            gradient_bytes(
                self._units,
                planned.stages.backward,
                steps=steps,
                accumulates=self._accumulates,
                num_devices=self._machine.num_devices,
            ),
            activation_bytes(
                profile.memory,
                planned.stages.backward,
                profile.num_microbatch,
                planned.grain,
                profile.lowest,
                overlaps=steps != "exact" or optimizer.master is not None,
            ),
            pin_model=pin_model,
            steps=steps,
            optim_dtype=self._optim_dtype,
            num_devices=self._machine.num_devices,
            process_bytes=self._process_bytes,
        )
        return Estimate(
            configuration=Configuration(
                num_microbatch=profile.num_microbatch,
                recompute_grain=planned.grain,
                forward=tuple(planned.stages.forward),
                backward=tuple(planned.stages.backward),
                pin_model=pin_model,
                optimizer=optimizer.name,
                steps=steps,
            ),
            device=planned.peak.use,
            host=host,
            fits_device=planned.fits,
            fits_host=self._host_limit is None or host.total_bytes <= self._host_limit,
            relative_time=planned.ms,
        )

    def search(self, asked: Estimate) -> tuple[Estimate | None, Estimate | None]:
        """The fastest that fits, or, where none does, the nearest."""
        found = []
        for pieces in self._microbatches(asked.configuration.num_microbatch):
            profile = self._profile_or_none(pieces)
            if profile is not None:
                found += [(profile, fastest_plan(profile, self._machine, grain)) for grain in _GRAINS]
        nearest = asked
        for settings in self._settings(asked):
            tried = [self.estimate(profile, planned, *settings) for profile, planned in found]
            fitting = [e for e in tried if e.fits]
            if fitting:
                return min(fitting, key=lambda e: (e.relative_time, e.device.total_bytes)), None
            nearest = min(nearest, *tried, key=self._overruns)
        return (nearest, None) if nearest.fits else (None, nearest)  # fits: by a plan of the caller's

    def _overruns(self, estimate: Estimate) -> tuple[float, float]:
        """By what share of the limits it is above them, the larger share first."""
        usable = usable_bytes([self._machine.memory_bytes])
        pairs = ((estimate.device.total_bytes, usable), (estimate.host.total_bytes, self._host_limit))
        shares = [0.0 if limit is None else max(0.0, total / limit - 1) for total, limit in pairs]
        return max(shares), min(shares)

    def _microbatches(self, asked: int) -> list[int]:
        """Powers of two and what was asked for, from one a device (they share the work) to one row each."""
        batch, least = self._call.batch, min(self._machine.num_devices, self._call.batch)
        powers = {1 << k for k in range(batch.bit_length())}
        return sorted(
            n for n in {*powers, asked, batch, min(batch, self._machine.num_devices + 1)} if least <= n <= batch
        )

    def _settings(self, asked: Estimate) -> Iterator[tuple[str, OptimizerFormat, str]]:
        """What was asked for, then what needs less of the host: frozen weights in files, other steps, smaller
        formats."""
        pins = [asked.configuration.pin_model]
        if pins[0] != "off" and any(unit.frozen_bytes for unit in self._units):
            pins.append("off")
        smaller = ["compact:split/float32", "compact:split/bfloat16", "compact:split/int8"]
        formats = [self._optimizer]
        if self._optimizer.name in ("adamw", "adam"):
            formats += [OptimizerFormat.parse(name) for name in smaller]
        elif self._optimizer.name in smaller:
            formats += [OptimizerFormat.parse(name) for name in smaller[smaller.index(self._optimizer.name) + 1 :]]
        elif self._optimizer.master == "float32":
            formats += [OptimizerFormat.parse(name) for name in smaller]
        kinds = STEPS[STEPS.index(asked.configuration.steps) :]
        for form in formats:
            for steps in kinds if form.master is not None else kinds[:1]:
                yield from ((pin, form, steps) for pin in pins)


# -- arguments ---------------------------------------------------------------------------------------------------------
def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}")


def _machine(kind: str | None, count: int | None, memory_bytes: int | None) -> Machine:
    present = devices() if kind is None or count is None or memory_bytes is None else []
    kind = present[0].kind if kind is None else kind
    _check_choice("device_kind", kind, ("cuda", "host"))
    same = [device for device in present if device.kind == kind]
    if count is None:
        count = max(1, len(same))
    if memory_bytes is None:
        memory_bytes = min((m for d in same if (m := d.memory_bytes) is not None), default=None)
    return Machine(kind, check_positive("num_devices", count), memory_bytes)


def _layers(model: Any, lora: int | None) -> tuple[list[nn.Module], bool]:
    """The layers, and whether they are those of a language model."""
    if isinstance(model, str):
        model = load_config(model)
    if type(model).__mro__ and any(c.__name__ in ("PretrainedConfig", "PreTrainedConfig") for c in type(model).__mro__):
        model = meta_model(model)
    elif not isinstance(model, nn.Module):
        raise ConfigTypeError(
            f"model: got {type(model).__name__}, expected an nn.Module, a configuration of transformers, or its path"
        )
    if hasattr(type(model), "_layer_costs"):  # wrapped
        layers = list(model.layers)
    elif is_causal_lm(model):
        if lora is not None:
            model = add_lora(model, check_positive("lora", lora))
        valueless = any(p.is_meta for p in model.parameters())
        layers = list(meta_layers(model) if valueless else causal_lm_to_sequential(model))
    else:
        layers = layers_of(model)
    if lora is not None and not isinstance(layers[0], PrefixLayer):
        raise ConfigError("lora: adapters can be added to a language model only; put yours into the model")
    return layers, isinstance(layers[0], PrefixLayer)


def _inputs(
    is_language_model: bool,
    batch: int,
    seq: int | None,
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
    label: Any,
    loss_fn: Callable[[Any, Any], Any] | None,
) -> tuple[tuple[Any, ...], dict[str, Any], Any, Callable[[Any, Any], Any]]:
    if inputs is None and is_language_model:
        if seq is None:
            raise ConfigError("seq: expected the tokens of a row, for a language model without inputs=")
        tokens = torch.empty(batch, check_positive("seq", seq), dtype=torch.int64, device="meta")
        kwargs = dict(input_ids=tokens, labels=tokens, return_logits=False)
        return (), kwargs, label, loss_fn or (lambda output, _: output.loss)
    if inputs is None:
        raise ConfigError("inputs: expected (args, kwargs) of the first layer, since the model is no language model")
    if not (isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple)):
        raise ConfigTypeError("inputs: expected a pair (args, kwargs) of a tuple and a dict")
    given = loss_fn
    if given is None:
        given = (lambda output, _: output.loss) if is_language_model else (lambda output, _: output)
    return inputs[0], dict(inputs[1]), label, given
