"""Some layers of a training state that several wrapped parts of one model share."""

from __future__ import annotations

from typing import Any

from .engine import Engine
from .layer_call import LayerFacts
from .layer_cost import LayerCost
from .measurements import Measurements
from .plan_keeper import PlanKeeper
from .run_config import ResolvedConfig
from .training_state import TrainingState


class StatePart:
    """What a call needs to see of the whole state: these layers as if they were all, with plans and measurements of
    their own. Everything else is the whole's: units, window, steps and failures, so that parameters that parts share
    get the sum of their gradients.
    """

    def __init__(self, whole: TrainingState, layers: range) -> None:
        self.whole = whole
        self.layers = whole.layers[layers.start : layers.stop]
        self.units_of = whole.units_of[layers.start : layers.stop]
        self.facts = whole.facts[layers.start : layers.stop]
        self.loss_facts = LayerFacts()
        self.measurements = Measurements(len(self.layers))
        self.adapted: dict[Any, ResolvedConfig] = {}
        self.plans = PlanKeeper(self)
        self._measured_under = self._circumstances()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def _circumstances(self) -> tuple[object, list[list[int]]]:
        """What measurements hold for: the whole's, which it renews with the devices, and what is trained."""
        return self.whole.measurements, [list(unit.trainable) for units in self.units_of for unit in units]

    def prepare(self, *, trains: bool = True) -> Engine:
        """As ``TrainingState.prepare``, which does the same for the whole. Within a call of the whole model it does not
        look at all of it again for every part.
        """
        whole = self.whole
        engine = whole.prepare_part(self.layers) if whole.whole_call else whole.prepare(trains=trains)
        before, self._measured_under = self._measured_under, self._circumstances()
        if before[0] is not self._measured_under[0]:
            self.measurements = Measurements(len(self.layers))
            self.adapted.clear()
        elif before[1] != self._measured_under[1]:
            self.measurements.sizes.forget()
            self.measurements.peaks.clear()
        else:
            return engine
        self.plans.clear()
        return engine

    def layer_costs(self, run_type: str) -> list[LayerCost]:
        return TrainingState.layer_costs(self, run_type)  # type: ignore[arg-type]
