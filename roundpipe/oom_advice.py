"""What to change when a device ran out of memory, each with the peak that it leads to.

Note [Remedies]
  They come in the order of docs/memory.md: more microbatches, recompute by layer, smaller stages, and, where none of
  these fits alone, all of them together. Each is a configuration for the next call. Its peak is what memory_model says
  for layers that are run without values (layer_memory.py) on a microbatch of that size, under the plan that the call
  would use. Where a layer cannot be run so, what was counted of it is scaled; where nothing was counted, remedies come
  without numbers. What would not lower the peak beside the least region is left out.

  The region of weights and gradients is large enough for two jobs, unless the prediction says that activations need
  the room (``Measurements.tight``). That is why a configuration that was predicted is remembered. A process that has
  predicted nothing makes the least region at first (Note [Room for regions]), so that a remedy fits there too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .batch import split_inputs, split_label
from .errors import DeviceOutOfMemory
from .layer_cost import LayerCost
from .layer_memory import FakeRun, LayerMemory, Measured, recording
from .live_memory import MemoryUse
from .memory_model import DevicePeak, Run, predict_peak
from .plan import ModelExecutePlan
from .run_config import ResolvedConfig, RoundPipeRunConfig

if TYPE_CHECKING:
    from .call import Call
    from .training_state import TrainingState

__all__ = ["OomAdvisor", "Remedy", "amount", "plan_key"]

WORTH = 0.98
"""A remedy is one if the peak falls below this share of what it is without."""

USABLE_SHARE = 0.95
"""Of what the device has, for a prediction to count as fitting: copies down that are late, fragments, workspaces."""


_AFTER_A_CALL = "  # made after a call of the model"
"""Said of plans that would be others in a process where none has been made."""


@dataclass(frozen=True)
class Remedy:
    """One thing to change. ``str()`` of it is a line of the message."""

    config: RoundPipeRunConfig
    """For the next call, over the configuration of the one that failed."""
    text: str
    """The same as code."""
    before_bytes: int | None
    """Predicted peak of the fullest device as the call was made; None: it could not be predicted."""
    after_bytes: int | None
    """With it."""
    fits: bool | None
    """Whether that is within the device's memory."""

    def __str__(self) -> str:
        if self.after_bytes is None:
            return self.text
        note = "" if self.fits else ", which does not fit yet"
        return f"{self.text}: {amount(self.before_bytes or 0)} -> {amount(self.after_bytes)}{note}"


def amount(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def plan_key(plan: ModelExecutePlan, num_microbatch: int, grain: str) -> Any:
    """Equal for calls that take the same memory; of a plan that is not valid, too."""
    return str(plan.fwd_plan), str(plan.bwd_plan), num_microbatch, grain


class OomAdvisor:
    """Of one call. Keeps shapes of its arguments, no values; works on the caller's thread, under the model's lock."""

    def __init__(
        self,
        state: TrainingState,
        config: ResolvedConfig,
        run_type: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        label: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
    ) -> None:
        self._state = weakref.ref(state)
        self.config = config
        self.run_type = run_type
        self._loss_fn = loss_fn
        self._arguments = pytree.tree_map_only(torch.Tensor, _shape_only, (args, kwargs, label))
        self.plan: ModelExecutePlan | None = None  # the one that the call uses

    # -- the error -----------------------------------------------------------------------------------------------
    @recording()
    def advise(self, error: DeviceOutOfMemory, call: Call) -> None:
        """Completes the message and the attributes of the call's failure."""
        state = self._state()
        if state is None or self.plan is None or error.use is None or error.remedies is not None:
            return
        peaks = Peaks(state, self, call, error.capacity_bytes)
        peaks.teach()
        remedies = tuple(peaks.remedies())
        use: MemoryUse = error.use
        lines = [error.args[0]]
        if error.microbatch_shapes:
            lines.append("microbatch: " + ", ".join(error.microbatch_shapes))
        lines.append(f"memory of {error.device}: {_describe(use)}; {amount(error.capacity_bytes or 0)} can be used")
        present, before = peaks.present, peaks.before
        predicted = None if before is None else _as_it_ran(before, use)
        if predicted is not None and error.capacity_bytes is not None and predicted < error.capacity_bytes:
            lines.append(
                f"It ran out where {amount(predicted)} were predicted: a kernel, a layer in its recompute or "
                "backward, or fragments take more than layers without values show. Take the numbers below as less than "
                "what is needed."
            )
        if remedies:
            none_fits = all(remedy.fits is False for remedy in remedies)
            lines.append(
                "None of these is enough by itself, by the predicted peak of the fullest device. If all are not "
                "either, split the layer, or give a shorter sequence:"
                if none_fits
                else "What helps, with the predicted peak of the fullest device, in the order to try:"
            )
            lines += [f"  {remedy}" for remedy in remedies]
        else:
            lines.append(
                "No setting helps: "
                + ("one layer with one row is too large. " if present is None else _smallest(present))
                + "Split the layer, or give a shorter sequence."
            )
        error.args = ("\n".join(lines),)
        error.remedies = remedies


def _describe(use: MemoryUse) -> str:
    parts = [
        ("weight slots", use.weights_bytes),
        ("gradients", use.gradients_bytes),
        ("boundaries on their way", use.ring_bytes),
        ("activations" if use.ring_bytes is not None else "activations and boundaries", use.activations_bytes),
        ("buffers", use.buffers_bytes),
        ("other allocations of this process", use.other_bytes),
        ("other processes", use.elsewhere_bytes),
    ]
    return ", ".join(f"{name} {amount(size)}" for name, size in parts if size is not None)


def _as_it_ran(predicted: DevicePeak, use: MemoryUse) -> int:
    """Predicted bytes, with the region that there was; where it was the region that failed, with the predicted one."""
    of_two_jobs = predicted.use.weights_bytes + predicted.use.gradients_bytes
    return predicted.total_bytes - of_two_jobs + (use.weights_bytes + use.gradients_bytes or of_two_jobs)


def _smallest(present: DevicePeak) -> str:
    return f"the predicted peak of {amount(present.total_bytes)} is as low as it gets. "


def _shape_only(tensor: torch.Tensor) -> Any:
    try:
        made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)
    except (NotImplementedError, RuntimeError):  # a layout without strides
        return None


class Peaks:
    """Predictions for the call that failed and for variations of it."""

    def __init__(self, state: TrainingState, advisor: OomAdvisor, call: Call, capacity_bytes: int | None) -> None:
        assert advisor.plan is not None
        self._state, self._advisor, self._call = state, advisor, call
        self._plan = advisor.plan
        self._grain = call.grain
        self._count = call.num_microbatch
        self._capacity = None if capacity_bytes is None else int(capacity_bytes * USABLE_SHARE)
        self._measured: dict[int, tuple[Measured, int] | None] = {}
        self._cannot_run: set[int] = set()  # so many microbatches are too small for a layer
        self._run: FakeRun | None = None
        self._runs_without_values = False  # the call as it was made
        args, kwargs, label = advisor._arguments
        self._args, self._kwargs, self._label = args, kwargs, label
        self.rows = self._batch_size()
        self.present = self._peak(self._count, self._grain, self._plan)
        # As it ran: with a region for two jobs, where that is allowed.
        self.before = self._peak(self._count, self._grain, self._plan, squeezed=False)

    # -- predicting ----------------------------------------------------------------------------------------------
    def _split(self, count: int) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        config = self._advisor.config
        pieces = split_inputs(self._args, self._kwargs, count, config.split_input)
        labels = split_label(self._label, len(pieces), config.split_label, pieces.row_counts)
        return [(args, kwargs, label) for (args, kwargs), label in zip(pieces, labels, strict=True)]

    def _batch_size(self) -> int | None:
        tensors = [leaf for leaf in pytree.tree_leaves((self._args, self._kwargs)) if isinstance(leaf, torch.Tensor)]
        if all(tensor.dim() == 0 or tensor.size(0) < 2 for tensor in tensors):
            return 1  # a split would warn that there are no more rows
        count = max(2, self._count)  # one alone is not looked at
        try:
            return split_inputs(self._args, self._kwargs, count, self._advisor.config.split_input).batch_size
        except Exception:  # noqa: BLE001 - a function of the user's that wants values; then there are no numbers
            return None

    def _measure(self, count: int) -> tuple[Measured, int] | None:
        """For the largest of ``count`` microbatches: every layer's memory, bytes of arguments and label."""
        if count not in self._measured:
            self._measured[count] = self._measure_now(count)
        return self._measured[count]

    def _measure_now(self, count: int) -> tuple[Measured, int] | None:
        advisor, state = self._advisor, self._state
        try:
            pieces = sorted(self._split(count), key=_tree_bytes)
            smallest, piece = pieces[0], pieces[-1]
            size = _tree_bytes(piece)
        except Exception:  # noqa: BLE001 - as above
            return None
        backward = advisor.run_type != "infer"
        try:
            if self._run is None:
                self._run = FakeRun(state.layers, self._call.engine.workers[0].device, self._call.ambient)
            measured = self._run.measure(*piece, advisor._loss_fn, backward=backward)
            if _tree_bytes(smallest) < size and count != self._count:
                self._run.measure(*smallest, advisor._loss_fn, backward=backward)
            self._runs_without_values |= count == self._count
            return measured, size
        except Exception:  # noqa: BLE001 - a layer whose course depends on values, or that is given too few rows
            if self._runs_without_values:
                self._cannot_run.add(count)
                return None
            scaled = self._scaled(size)
            return None if scaled is None else (scaled, size)

    def _scaled(self, size: int) -> Measured | None:
        found = []
        for entry in self._state.measurements.sizes.entries:
            if entry is None or entry[0] <= 0:
                return None
            found.append(LayerMemory.from_sizes(entry[1], entry[2]).scaled(size / entry[0]))
        return Measured(tuple(found), None)

    def _peak(self, count: int, grain: str, plan: ModelExecutePlan, *, squeezed: bool = True) -> DevicePeak | None:
        measured = self._measure(count)
        if measured is None:
            return None
        engine = self._call.engine
        run = Run(
            self._advisor.run_type,
            plan.fwd_plan,
            plan.bwd_plan,
            count,
            grain,
            engine.device_count,
            self._call._lowest_needed() if self._call.keeps_graph else 0,
            in_flight=0 if engine.simulated else 1,
        )
        costs = self._state.layer_costs(self._advisor.run_type)
        peak = predict_peak(costs, measured[0], run, capacity_bytes=self._capacity if squeezed else None)
        beside = (peak.use.ring_bytes or 0) + (peak.use.activations_bytes or 0) + (peak.use.buffers_bytes or 0)
        self._state.measurements.tight[plan_key(plan, count, grain)] = (beside, self._capacity)
        return peak

    def teach(self) -> None:
        """What the planner has not measured yet, because no call came so far."""
        measured = self._measure(self._count)
        sizes = self._state.measurements.sizes
        if measured is not None and self._call.keeps_graph:
            for layer, (memory, entry) in enumerate(zip(measured[0].layers, sizes.entries, strict=True)):
                if entry is None:
                    sizes.note(layer, measured[1], memory.input_bytes, memory.graph_bytes + memory.output_bytes)
        sizes.call_failed()

    # -- varying -------------------------------------------------------------------------------------------------
    def _planned(self, count: int, grain: str) -> ModelExecutePlan:
        """The plan that a call with these settings would use."""
        given = self._advisor.config.execute_plan
        if given is not None:
            return given
        measured = self._measure(count)
        with self._state.measurements.sizes.supposing(None if measured is None else measured[1]):
            return self._state.plans.plan(self._advisor.run_type, count, grain)

    def _limited(self, count: int, grain: str, limit_gb: float) -> ModelExecutePlan:
        """As planned here and now."""
        measured = self._measure(count)
        with self._state.measurements.sizes.supposing(None if measured is None else measured[1]):
            return self._auto(self._state.layer_costs(self._advisor.run_type), count, grain, limit_gb)

    def _limited_by_sizes(self, count: int, grain: str, limit_gb: float) -> ModelExecutePlan | None:
        """As planned in a process that has measured nothing, whether or not the model's own configuration has the
        number of microbatches; None: that matters.
        """
        costs = [cost.unmeasured() for cost in self._state.layer_costs(self._advisor.run_type)]
        plan, other = (self._auto(costs, given, grain, limit_gb) for given in (count, None))
        return plan if plan == other else None

    def _auto(self, costs: list[LayerCost], count: int | None, grain: str, limit_gb: float) -> ModelExecutePlan:
        planned = _Planned(costs, self._state.plan_limits(), count, grain)
        return ModelExecutePlan.auto(self._advisor.run_type, planned, model_memory_limit=limit_gb)

    def remedies(self) -> Iterator[Remedy]:
        found = []
        for candidates in (self._more_microbatches, self._by_layer, self._smaller_stages):
            remedy = self._best(candidates(self._count, self._grain))
            if remedy is not None:
                found.append(remedy)
                yield remedy
        if not any(remedy.fits for remedy in found) and len(found) > 1:
            remedy = self._best(self._everything())
            if remedy is not None:
                yield remedy

    def _best(self, candidates: Iterator[Remedy]) -> Remedy | None:
        """The first that fits, or else the one with the lowest peak; None: none of them lowers it."""
        best = None
        for remedy in candidates:
            if remedy.after_bytes is None:  # nothing is known: the first step of each kind
                return remedy
            if self.present is None or remedy.after_bytes >= WORTH * self.present.total_bytes:
                continue
            if best is None or remedy.after_bytes < (best.after_bytes or 0):
                best = remedy
            if remedy.fits:
                break
        return best

    def _more_microbatches(self, count: int, grain: str) -> Iterator[Remedy]:
        for more in self._counts(count):
            yield self._remedy(more, grain, self._planned(more, grain), num_microbatch=more)

    def _counts(self, count: int) -> Iterator[int]:
        rows = self.rows or 0
        while count < rows:
            count = min(2 * count, rows)
            self._measure(count)
            if count not in self._cannot_run:
                yield count

    def _by_layer(self, count: int, grain: str) -> Iterator[Remedy]:
        if grain == "stage" and self._advisor.run_type != "infer":
            yield self._remedy(count, "layer", self._planned(count, "layer"), recompute_grain="layer")

    def _smaller_stages(self, count: int, grain: str) -> Iterator[Remedy]:
        for word, plan in self._plans(count, grain):
            yield self._remedy(count, grain, plan, execute_plan=(word, plan))

    def _plans(self, count: int, grain: str) -> Iterator[tuple[str, ModelExecutePlan]]:
        """Plans with ever smaller stages, and the code that makes them. First those that it makes in any process,
        then those that take what a call has shown, even one that failed.
        """
        auto = f'ModelExecutePlan.auto("{self._advisor.run_type}", model, model_memory_limit='
        found = [(limit, self._limited(count, grain, limit)) for limit in self._limits()]
        lasting = [self._limited_by_sizes(count, grain, limit) == plan for limit, plan in found]
        yield from ((f"{auto}{limit})", plan) for (limit, plan), lasts in zip(found, lasting, strict=True) if lasts)
        for (limit, plan), lasts in zip(found, lasting, strict=True):
            if not lasts:
                yield f"{auto}{limit}){_AFTER_A_CALL}", plan

    def _limits(self) -> Iterator[float]:
        """Ever smaller model memory limits in GB, down to that of single layers."""
        costs = self._state.layer_costs(self._advisor.run_type)
        gradients = self._advisor.run_type != "infer"
        least = max(cost.stage_bytes(gradients=gradients) for cost in costs)
        limit = 2 * max(
            sum(costs[layer].stage_bytes(gradients=gradients) for layer in stage) for stage in self._stages()
        )
        while limit > 2 * least:
            limit = max(limit // 2, 2 * least)
            limit_gb = float(f"{limit * 1.002 / 1e9:.3g}")
            while limit_gb * 1e9 < 2 * least:
                limit_gb = float(f"{limit_gb * 1.005:.4g}")
            yield limit_gb

    def _stages(self) -> list[range]:
        return [*self._plan.fwd_plan, *(self._plan.bwd_plan if self._advisor.run_type != "infer" else ())]

    def _everything(self) -> Iterator[Remedy]:
        grain = "layer" if self._advisor.run_type != "infer" else self._grain
        changes: dict[str, Any] = {} if grain == self._grain else {"recompute_grain": grain}
        for count in (*self._counts(self._count),) or (self._count,):
            more = {} if count == self._count else {"num_microbatch": count}
            yield self._remedy(count, grain, self._planned(count, grain), **more, **changes)
            for word, plan in self._plans(count, grain):
                yield self._remedy(count, grain, plan, **more, **changes, execute_plan=(word, plan))

    def _remedy(self, count: int, grain: str, plan: ModelExecutePlan, **changes: Any) -> Remedy:
        words = {name: repr(value) for name, value in changes.items()}
        if "execute_plan" in changes:
            words["execute_plan"], changes["execute_plan"] = changes["execute_plan"]
        text = f"RoundPipeRunConfig({', '.join(f'{name}={word}' for name, word in words.items())})"
        if _AFTER_A_CALL in text:
            text = text.replace(_AFTER_A_CALL, "") + _AFTER_A_CALL
        config = RoundPipeRunConfig(**changes)
        after = self._peak(count, grain, plan)
        if after is None or self.before is None:
            return Remedy(config, text.replace("'", '"'), None, None, None)
        fits = self._capacity is None or after.total_bytes <= self._capacity
        return Remedy(config, text.replace("'", '"'), self.before.total_bytes, after.total_bytes, fits)


class _Planned:
    """What ``ModelExecutePlan.auto`` asks a model."""

    def __init__(self, costs: list[LayerCost], limits: tuple[int, int | None], count: int | None, grain: str) -> None:
        self._costs, self._limits, self._run = costs, limits, (count, grain)

    def _layer_costs(self, run_type: str) -> list[LayerCost]:
        return self._costs

    def _plan_limits(self) -> tuple[int, int | None]:
        return self._limits

    def _plan_run(self) -> tuple[int | None, str]:
        return self._run


def _tree_bytes(tree: Any) -> int:
    found = {id(leaf): leaf.nbytes for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}
    return sum(found.values())


def changed(config: ResolvedConfig, remedy: RoundPipeRunConfig) -> ResolvedConfig:
    """``config`` with what the remedy sets."""
    names = ("num_microbatch", "recompute_grain", "execute_plan")
    return replace(config, **{name: value for name in names if (value := getattr(remedy, name)) is not None})
