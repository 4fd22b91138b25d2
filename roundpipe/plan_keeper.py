"""The plans that a model's calls use when the caller gives none: made from sizes, renewed from measurements.

Note [Plans that stay]
  Times are noisy, and a new plan costs: a region that must grow waits for everything. So a plan is looked at again only
  after 2, 4, 8, ... measured iterations, and replaced only by one that the same estimates predict to be clearly faster;
  each replacement raises what the next one must gain. Memory is no matter of taste: when activations turn out to be
  larger than a plan has room for, it is replaced at once. The first calls of a model on devices with limited memory run
  backward one layer at a time, with no more weights in a stage than the largest layer has, and are the ones that
  measure: where any plan fits, theirs is to fit too.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Protocol

from .auto_plan import best_plans, cautious, fits, iteration_ms, stage_limit, usable_bytes
from .layer_cost import LayerCost
from .measurements import Measurements
from .plan import ModelExecutePlan
from .planner import Request
from .stage_search import Part, StageLists

__all__ = ["PlanKeeper"]

GAIN = 0.05
"""How much faster than the present plan a new one must be predicted to be, for the first time."""

_FIRST_LOOK = 2
_LONGEST_PAUSE = 256  # measured iterations


class PlannedModel(Protocol):
    measurements: Measurements

    def layer_costs(self, run_type: str) -> list[LayerCost]: ...

    def plan_limits(self) -> tuple[int, int | None]: ...


@dataclass
class _Kept:
    plan: ModelExecutePlan
    cautious: bool
    revision: int  # of the activation sizes it was made, or last looked at, with
    limits: tuple[int, int | None]  # of the devices it was made for
    next_look: int  # number of measured iterations
    changes: int = 0


class PlanKeeper:
    """One plan for each kind of run, number of microbatches and grain of recompute. Used under the model's lock."""

    def __init__(self, model: PlannedModel) -> None:
        self._model: PlannedModel = weakref.proxy(model)  # its owner, whose memory must not wait for the collector
        self._kept: dict[tuple[str, int, str], _Kept] = {}
        self._warned: set[bool] = set()  # of a layer above the limit: without and with its gradients

    def clear(self) -> None:
        """Devices or trainable parameters have changed."""
        self._kept.clear()

    def plan(self, run_type: str, num_microbatch: int, grain: str) -> ModelExecutePlan:
        """The plan for the next call; it is not to be edited."""
        key = (run_type, num_microbatch, grain)
        measurements = self._model.measurements
        measurements.read()
        kept = self._kept.get(key)
        revision, limits = measurements.sizes.revision, self._model.plan_limits()
        iterations = measurements.timer(run_type).iterations
        if kept is not None and kept.limits != limits:
            kept = None
        if kept is not None and kept.revision == revision and iterations < kept.next_look:
            return kept.plan
        part = Part(tuple(self._model.layer_costs(run_type)), run_type != "infer", run_type == "fused")
        request = self._request(part, num_microbatch, grain)
        careful = cautious(request, [part])
        if kept is None or kept.cautious or not self._fits(kept.plan, part, request):
            changes = 0 if kept is None else kept.changes
            made = self._make(part, careful, request)
            kept = _Kept(made, careful is not request, revision, limits, max(_FIRST_LOOK, iterations + 1), changes)
            self._kept[key] = kept
            return kept.plan
        kept.revision = revision
        if iterations >= kept.next_look:
            kept.next_look = min(2 * iterations, iterations + _LONGEST_PAUSE)
            self._renew(kept, part, request)
        return kept.plan

    def _renew(self, kept: _Kept, part: Part, request: Request) -> None:
        made = self._make(part, request, request)
        now, then = (_predicted(plan, part, request) for plan in (kept.plan, made))
        if then < now * (1 - GAIN * (1 + kept.changes)):
            kept.plan = made
            kept.changes += 1
        else:
            kept.plan.note_facts(part, request)

    def _request(self, part: Part, num_microbatch: int, grain: str) -> Request:
        devices, memory = self._model.plan_limits()
        limit = stage_limit([part], None, [memory], warns=part.backward not in self._warned)
        self._warned.add(part.backward)
        return Request(
            num_devices=devices,
            min_stages=devices,
            stage_limit_bytes=limit,
            microbatches=num_microbatch,
            usable_bytes=usable_bytes([memory]),
            by_layer=grain == "layer",
        )

    @staticmethod
    def _make(part: Part, request: Request, facts: Request) -> ModelExecutePlan:
        (stages,) = best_plans([part], request)
        plan = ModelExecutePlan()
        plan.fwd_plan, plan.bwd_plan = stages.forward, stages.backward
        plan.note_facts(part, replace(facts, activation_limit_bytes=request.activation_limit_bytes))
        return plan

    @staticmethod
    def _fits(plan: ModelExecutePlan, part: Part, request: Request) -> bool:
        return fits([part], [StageLists(plan.fwd_plan, plan.bwd_plan)], request)


def _predicted(plan: ModelExecutePlan, part: Part, request: Request) -> float:
    return iteration_ms([part], [StageLists(plan.fwd_plan, plan.bwd_plan)], request)
