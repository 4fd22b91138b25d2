"""The execution plan of a model: which layers make up each forward and each backward stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, overload

from roundpipe.auto_plan import best_plans, check_number, check_positive, stage_limit, usable_bytes
from roundpipe.errors import ConfigError, ConfigTypeError, PlanError
from roundpipe.layer_cost import LayerCost
from roundpipe.plan_report import PlanFacts, describe
from roundpipe.planner import Request
from roundpipe.stage_search import Part

__all__ = ["LayerCost", "ModelExecutePlan"]

RUN_TYPES = ("infer", "train", "fused")


class PlannableModel(Protocol):
    """What :meth:`ModelExecutePlan.auto` asks a RoundPipe for."""

    def _layer_costs(self, run_type: str) -> list[LayerCost]:
        """The costs of the layers, in order, as far as they are known by now."""

    def _plan_limits(self) -> tuple[int, int | None]:
        """The number of devices, and the memory of the smallest in bytes (None: no limit)."""

    def _plan_run(self) -> tuple[int | None, str]:
        """num_microbatch (None: not set) and recompute_grain of the model's own configuration."""


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
        if isinstance(num_layers, bool) or not isinstance(num_layers, int):
            raise ConfigTypeError(
                f"num_layers: got {num_layers!r} of type {type(num_layers).__name__}, expected an int"
            )
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
        is uploaded meanwhile; a single layer above that raises the limit, with a warning that names it. Where the
        memory of devices is limited and the activations of a microbatch have been measured (the first training calls
        do), what a backward stage keeps of them fits beside its weights too. Waits for nothing.

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
            if not hasattr(type(model), "_layer_costs"):
                raise ConfigTypeError(
                    f"ModelExecutePlan.auto: got {type(model).__name__}, expected a RoundPipe; wrap the model first"
                )
        limits = [model._plan_limits() for model in models]
        num_devices = max(count for count, _ in limits)
        parts = [
            Part(tuple(model._layer_costs(run_type)), backward=run_type != "infer", fused=run_type == "fused" and last)
            for model, last in ((model, i == len(models) - 1) for i, model in enumerate(models))
        ]
        runs = [model._plan_run() for model in models]
        memories = [memory for _, memory in limits]
        request = Request(
            num_devices=num_devices,
            min_stages=num_devices if min_stages is None else check_positive("min_stages", min_stages),
            upper_threshold=check_number("upper_threshold", upper_threshold, 1.0),
            stage_limit_bytes=stage_limit(parts, model_memory_limit, memories, warns=True),
            microbatches=next((count for count, _ in runs if count is not None), None),
            usable_bytes=usable_bytes(memories),
            by_layer=all(grain == "layer" for _, grain in runs),
        )
        plans = []
        for part, stages in zip(parts, best_plans(parts, request), strict=True):
            plan = cls()
            plan.fwd_plan, plan.bwd_plan = stages.forward, stages.backward
            plan.note_facts(part, request)
            plans.append(plan)
        return plans[0] if len(plans) == 1 else plans

    def note_facts(self, part: Part, request: Request) -> None:
        """What :meth:`explain` is to show the stages with."""
        self._facts = PlanFacts(part, request)

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
