"""The execution plan of a model: which layers make up each forward and each backward stage."""

from __future__ import annotations

import copy
import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, overload

from roundpipe.errors import ConfigError, ConfigTypeError, PlanError
from roundpipe.layer_cost import LayerCost
from roundpipe.plan_report import PlanFacts, describe
from roundpipe.planner import Request, plan_stages
from roundpipe.stage_search import Part, StageLists

__all__ = ["LayerCost", "ModelExecutePlan"]

RUN_TYPES = ("infer", "train", "fused")

DEFAULT_MEMORY_SHARE = 0.6
"""Share of the smallest device that a plan may fill with weights and gradients; activations get the rest."""


class PlannableModel(Protocol):
    """What :meth:`ModelExecutePlan.auto` asks a RoundPipe for."""

    def _layer_costs(self) -> list[LayerCost]:
        """The costs of the layers, in order."""

    def _plan_limits(self) -> tuple[int, int | None]:
        """The number of devices, and the memory of the smallest in bytes (None: no limit)."""


class ModelExecutePlan:
    """Stages of consecutive layers. Both lists may be edited; :meth:`check_valid` tells what is wrong with them.

    Attributes:
        fwd_plan: forward stages, ascending, each a non-empty ``range`` of layer indices with step 1.
        bwd_plan: backward stages, descending; the layers inside a range still ascend. For ``forward_backward`` the
            first of them is the fused stage (forward, loss and backward at once), and ``fwd_plan`` ends where it
            begins. A backward stage recomputes its forward, the fused one does not.

    Two plans are equal when their stages are.
    """

    __hash__ = None  # type: ignore[assignment]  # the lists may change

    def __init__(self) -> None:
        self.fwd_plan: list[range] = []
        self.bwd_plan: list[range] = []
        self._facts: PlanFacts | None = None

    def __repr__(self) -> str:
        return f"ModelExecutePlan(fwd_plan={self.fwd_plan}, bwd_plan={self.bwd_plan})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModelExecutePlan):
            return NotImplemented
        return self.fwd_plan == other.fwd_plan and self.bwd_plan == other.bwd_plan

    def __copy__(self) -> ModelExecutePlan:
        # The lists are what users edit, so a copy that shared them would be a trap.
        twin = ModelExecutePlan()
        twin.fwd_plan, twin.bwd_plan, twin._facts = list(self.fwd_plan), list(self.bwd_plan), copy.copy(self._facts)
        return twin

    def check_valid(self, num_layers: int, run_type: str) -> None:
        """Checks the stages against a model.

        Args:
            num_layers: number of layers of the model.
            run_type: ``"infer"`` (``fwd_plan`` holds every layer, ``bwd_plan`` is not looked at), ``"train"`` (both
                hold every layer) or ``"fused"`` (``bwd_plan`` holds every layer, ``fwd_plan`` those below the first
                backward stage).

        Raises:
            PlanError: (a ValueError) naming the layer that is wrong.
            ConfigError: ``run_type`` is none of the three.
        """
        _check_run_type(run_type)
        for name in ("fwd_plan", "bwd_plan") if run_type != "infer" else ("fwd_plan",):
            stages = getattr(self, name)
            if not isinstance(stages, (list, tuple)):
                raise PlanError(f"{name} is of type {type(stages).__name__}, expected a list of ranges")
            for i, stage in enumerate(stages):
                _check_stage(name, i, stage, num_layers)
        if run_type == "fused":
            if not self.bwd_plan:
                raise PlanError(f"bwd_plan is empty: layer {max(num_layers - 1, 0)} needs a stage, the fused one")
            _check_cover("fwd_plan", self.fwd_plan, self.bwd_plan[0].start, "the fused stage bwd_plan[0] begins")
        else:
            _check_cover("fwd_plan", self.fwd_plan, num_layers, "the model ends")
        if run_type != "infer":
            _check_cover("bwd_plan", self.bwd_plan[::-1], num_layers, "the model ends")

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str,
        model: PlannableModel,
        /,
        *,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan: ...

    @overload
    @classmethod
    def auto(
        cls,
        run_type: str,
        model: PlannableModel,
        second: PlannableModel,
        /,
        *models: PlannableModel,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> list[ModelExecutePlan]: ...

    @classmethod
    def auto(
        cls,
        run_type: str,
        *models: PlannableModel,
        min_stages: int | None = None,
        upper_threshold: float = 1.1,
        model_memory_limit: float | None = None,
    ) -> ModelExecutePlan | list[ModelExecutePlan]:
        """Chooses the stages of one model, or of several that run one after the other, from measured times and sizes.

        Before anything has been measured, times are taken to be proportional to the layers' bytes. A stage's weights
        and buffers, and in backward its trainable gradients, stay within half of the limit, because the next stage
        is uploaded meanwhile; a single layer above that raises the limit, with a warning that names it.

        Args:
            run_type: ``"infer"``, ``"train"`` (forward and backward are separate calls) or ``"fused"``
                (``forward_backward``; of several models only the last has a fused stage).
            models: RoundPipe models.
            min_stages: fewest stages, over all models; the number of devices by default. For ``"train"`` it counts
                forward and backward stages separately, for ``"fused"`` together. As many as the layers allow.
            upper_threshold: at least 1. Stages may grow by this factor over the slowest stage of the fastest plan
                where that gives fewer stages at the same throughput.
            model_memory_limit: memory of one device for weights and gradients in GB (1e9 bytes); 60 % of the
                smallest device by default.

        Returns:
            A plan, or for several models a list of plans.

        Raises:
            ConfigError, ConfigTypeError: an argument is out of range or of the wrong type.
        """
        _check_run_type(run_type)
        if not models:
            raise ConfigTypeError("ModelExecutePlan.auto: no model given")
        for model in models:
            if not (hasattr(model, "_layer_costs") and hasattr(model, "_plan_limits")):
                raise ConfigTypeError(
                    f"ModelExecutePlan.auto: got {type(model).__name__}, expected a RoundPipe; wrap the model first"
                )
        limits = [model._plan_limits() for model in models]
        num_devices = max(count for count, _ in limits)
        parts = [
            Part(tuple(model._layer_costs()), backward=run_type != "infer", fused=run_type == "fused" and last)
            for model, last in ((model, i == len(models) - 1) for i, model in enumerate(models))
        ]
        request = Request(
            num_devices=num_devices,
            min_stages=num_devices if min_stages is None else _positive_int("min_stages", min_stages),
            upper_threshold=_number("upper_threshold", upper_threshold, 1.0),
            stage_limit_bytes=_stage_limit(parts, model_memory_limit, [memory for _, memory in limits]),
        )
        result = plan_stages(parts, request)
        plans = [cls._from(part, stages, request) for part, stages in zip(parts, result, strict=True)]
        return plans[0] if len(plans) == 1 else plans

    @classmethod
    def _from(cls, part: Part, stages: StageLists, request: Request) -> ModelExecutePlan:
        plan = cls()
        plan.fwd_plan, plan.bwd_plan = stages.forward, stages.backward
        plan._facts = PlanFacts(part, request)
        return plan

    def explain(self) -> str:
        """A table of the stages with their bytes and predicted times, and what bounds them, as text of several lines.

        Times are milliseconds for one microbatch. A plan written by hand has no costs to show.
        """
        return describe(self.fwd_plan, self.bwd_plan, self._facts)


def _check_run_type(run_type: str) -> None:
    if run_type not in RUN_TYPES:
        expected = ", ".join(repr(name) for name in RUN_TYPES)
        raise ConfigError(f"run_type: got {run_type!r}, expected one of {expected}")


def _check_stage(name: str, i: int, stage: Any, num_layers: int) -> None:
    if not isinstance(stage, range):
        raise PlanError(f"{name}[{i}] is {stage!r} of type {type(stage).__name__}, expected a range of layers")
    if len(stage) == 0 or stage.step != 1:
        problem = "is empty" if len(stage) == 0 else f"has step {stage.step} at layer {stage.start}"
        raise PlanError(f"{name}[{i}] = {stage} {problem}; a stage is a non-empty range with step 1")
    for layer in (stage[0], stage[-1]):
        if not 0 <= layer < num_layers:
            raise PlanError(f"{name}[{i}] = {stage} names layer {layer}, but the model has {num_layers} layers")


def _check_cover(name: str, ascending: Sequence[range], end: int, why: str) -> None:
    order = "descending" if name == "bwd_plan" else "ascending"
    following = 0
    for stage in ascending:
        if stage.start > following:
            raise PlanError(
                f"{name}: layer {following} is missing before {stage}; stages must be contiguous and {order}"
            )
        if stage.start < following:
            raise PlanError(
                f"{name}: layer {stage.start} of {stage} is there twice or out of order; every layer belongs to "
                f"exactly one stage, and stages are {order}"
            )
        following = stage.stop
    if following < end:
        raise PlanError(f"{name}: layer {following} is missing; the stages end there, but {why} at layer {end}")
    if following > end:
        raise PlanError(f"{name}: layer {end} is there twice; the stages end at layer {following}, but {why} at {end}")


def _positive_int(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)  # type: ignore[arg-type]  # that is what is found out here
    except TypeError:
        raise ConfigTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an integer") from None
    if count < 1:
        raise ConfigError(f"{name}: got {count}, expected at least 1")
    return count


def _number(name: str, value: object, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigTypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected a number")
    if not math.isfinite(value) or value < least:
        raise ConfigError(f"{name}: got {value}, expected a finite number of at least {least}")
    return float(value)


def _stage_limit(parts: Sequence[Part], limit_gb: float | None, memories: Sequence[int | None]) -> int | None:
    """Bytes of one stage: half of the limit, raised where one layer alone needs more. None: no limit."""
    if limit_gb is not None:
        limit = _number("model_memory_limit", limit_gb, 0.0) * 1e9
        if limit == 0:
            raise ConfigError("model_memory_limit: got 0 GB, expected more")
    else:
        known = [memory for memory in memories if memory]
        if not known:
            return None
        limit = DEFAULT_MEMORY_SHARE * min(known)
    stage = int(limit / 2)
    needs = [
        (cost.stage_bytes(gradients=part.backward), m, i)
        for m, part in enumerate(parts)
        for i, cost in enumerate(part.costs)
    ]
    most, m, i = max(needs, default=(0, 0, 0))
    if most > stage:
        name = parts[m].costs[i].name
        where = f"layer {i}" + (f" ({name})" if name else "") + (f" of model {m}" if len(parts) > 1 else "")
        warnings.warn(
            f"{where} needs {most / 1e9:.3f} GB in a stage of its own, but half of the model memory limit of "
            f"{limit / 1e9:.3f} GB is {stage / 1e9:.3f} GB; the limit is raised to {2 * most / 1e9:.3f} GB. Split the "
            "layer, or give a larger model_memory_limit, if devices run out of memory",
            stacklevel=3,
        )
        stage = most
    return stage
