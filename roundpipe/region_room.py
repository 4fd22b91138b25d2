"""How much room a call's regions must leave for its activations, see Note [Room for regions]."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from .activation_peaks import Beside
from .auto_plan import usable_bytes
from .layer_cost import activation_bytes, activations_known
from .oom_advice import plan_key

if TYPE_CHECKING:
    from .call import Call
    from .plan import ModelExecutePlan
    from .training_state import TrainingState

__all__ = ["watch"]


def watch(state: TrainingState, call: Call, run_type: str, plan: ModelExecutePlan) -> None:
    """Lets ``call`` know what its activations need, and those after it what they have taken."""
    usable = usable_bytes([state.plan_limits()[1]])
    if usable is None:
        return
    room = _Room(state, call, run_type, plan, usable)
    call.beside, call.tell_peak = room.beside, room.note
    if call.keeps_graph:
        call.region_owner = weakref.ref(state)


class _Room:
    """Of one call, which holds it: so it holds neither that nor the model."""

    def __init__(
        self, state: TrainingState, call: Call, run_type: str, plan: ModelExecutePlan, usable_bytes: int
    ) -> None:
        self._peaks = state.measurements.peaks
        self._kind = plan_key(plan, call.num_microbatch, call.grain)
        self._tight = state.measurements.tight.get(self._kind)
        self._call_bytes = call.microbatch_bytes
        self._sizes = state.measurements.sizes
        self._usable_bytes = usable_bytes
        self._counts = call.engine.simulated
        self._expected = None
        if call.keeps_graph:
            stages = call.backward_stages(plan)
            self._expected = functools.partial(
                _activation_bytes, weakref.ref(state), run_type, stages, call.grain == "layer"
            )

    def _key(self, later: bool) -> Any:
        return self._expected is not None, later, self._kind

    def note(self, later: bool, peak_bytes: int) -> None:
        self._peaks.note(self._key(later), self._call_bytes, peak_bytes, self._expected)

    def beside(self, later: bool) -> Beside:
        peak = self._peak_bytes(later)
        if self._tight is not None and self._tight[1] is not None:
            predicted, capacity = self._tight
            return Beside(max(predicted, peak or 0), capacity)
        if self._expected is None and not self._counts:
            return Beside()
        if peak is not None and self._expected is not None:
            peak = self._peaks.among_recent(self._kind, peak)
        return Beside(None, self._usable_bytes) if peak is None else Beside.counted(peak, self._usable_bytes)

    def _peak_bytes(self, later: bool) -> int | None:
        seen = self._peaks.seen(self._key(later), self._call_bytes)
        if seen is not None:
            return max(seen, self._peaks.seen(self._key(not later), self._call_bytes) or 0)
        expected = None
        if self._expected is not None:
            expected = self._peaks.expected(self._kind, self._sizes.revision, self._expected)
        if expected is None or not self._counts:
            return expected
        excess = self._peaks.excess(self._call_bytes)
        return None if excess is None else expected + excess


def _activation_bytes(
    state: weakref.ref[TrainingState], run_type: str, stages: list[range], by_layer: bool
) -> int | None:
    """Of the largest stage that runs backward, by what was measured of the layers; None: not of all."""
    model = state()
    costs = None if model is None else model.layer_costs(run_type)
    if costs is None or not activations_known(costs):
        return None
    return max(activation_bytes(costs[stage.start : stage.stop], by_layer=by_layer) for stage in stages)
