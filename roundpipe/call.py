"""One call of a model: what its jobs share, how its results and its failure reach the caller."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from . import _ops, errors, random_state
from .activation_peaks import Beside
from .activation_sizes import microbatch_bytes
from .ambient import Ambient
from .boundary import Boundary, HostTensor, LiveTree, PendingTree
from .buffers import BufferUndo, BufferUpdate, NotedBuffers
from .devices import devices
from .engine import Engine, Watchdog, Worker, cpu_generator_lock
from .errors import RoundPipeError
from .gradient_stats import GradientStats
from .interrupts import uninterrupted
from .layer_call import LayerFacts
from .memory_model import consecutive_jobs
from .oom_state import as_out_of_memory, note_use, outside_bytes, shapes_of
from .passed_on import PassedOn
from .stage_job import Phase, StageJob
from .units import Unit

if TYPE_CHECKING:
    from torch import nn

    from .announced_step import AnnouncedStep
    from .job_probe import CallProbe
    from .oom_advice import OomAdvisor
    from .plan import ModelExecutePlan
    from .replica import Attributes
    from .window import Window

_NO_RNG_KEPT = 0x5DEECE66D  # mixed into recompute's seeds when the forward's random numbers need not be seen again


class CallAborted(Exception):
    """Ends a job whose call has already failed; never reaches the caller."""


class Call:
    """Shared by the jobs of one ``forward`` or ``forward_backward``.

    The caller's thread makes it, dispatches it and collects; workers run its jobs. ``_mutex`` covers the dictionaries
    below it; ``_changed`` is notified whenever one of them, the failure or the number of open jobs changes.
    (``with _mutex`` rather than ``with _changed``: Ctrl-C may strike inside a Condition's own methods, with the lock
    taken and nobody to release it. Waits on the main thread are uninterrupted slices for the same reason.)
    """

    def __init__(
        self,
        engine: Engine,
        layers: list[nn.Module],
        units_of: list[list[Unit]],
        host_buffers: Any,
        facts: list[LayerFacts],
        loss_facts: LayerFacts,
        *,
        inputs: list[Boundary],
        labels: list[Boundary],
        loss_fn: Callable[[Any, Any], Any],
        grain: str,
        preserve_rng: bool,
        keeps_graph: bool,
        keeps_outputs: bool,
        window: Window | None,
        predecessor: Call | None,
        probe: CallProbe,
    ) -> None:
        self.engine = engine
        self.layers = layers
        self.units_of = units_of
        # By unit: the layers of this call that use it. The model may be a part of what the unit's own numbers count.
        self.layers_of: dict[int, tuple[int, ...]] = {}
        for index, units in enumerate(units_of):
            for unit in units:
                self.layers_of[unit.key] = (*self.layers_of.get(unit.key, ()), index)
        self.host_buffers = host_buffers
        self.facts = facts
        self.loss_facts = loss_facts
        self._labels: list[Boundary | None] = [*labels]  # each until its loss is computed
        self.loss_fn = loss_fn
        self.grain = grain
        self.preserve_rng = preserve_rng
        self.keeps_graph = keeps_graph
        self.keeps_outputs = keeps_outputs
        self.window = window  # until the jobs are open; it holds this call
        self.joined = window is not None  # brings gradients to a window
        self.predecessor = predecessor  # the training call before, of this window or the last, that has not settled
        self.probe = probe
        self.gradient_stats: GradientStats | None = None  # None: nobody wants them
        self.announced: AnnouncedStep | None = None  # the step that this call ends with
        self.advisor: OomAdvisor | None = None
        # What its jobs need beside the regions, and who is told what they have taken; each is given whether the jobs
        # are those of a backward that was dealt out by itself.
        self.beside: Callable[[bool], Beside] = lambda _: Beside()
        self.tell_peak: Callable[[bool, int], None] | None = None
        self.region_owner: weakref.ref[Any] | None = None  # see Engine.reserve_regions
        self.microbatch_bytes = microbatch_bytes(inputs, labels) if labels else microbatch_bytes(inputs)
        self.microbatch_shapes = shapes_of(inputs[0] if inputs else None)
        self.num_microbatch = len(inputs)
        self.wants_input_grads = keeps_graph and any(any(b.requires_grad) for b in inputs)
        self.ambient = Ambient.capture()
        with cpu_generator_lock:  # a layer of another call may have the generator seeded at this moment
            self.seed = random_state.draw_call_seed()

        self.saved_layers: frozenset[int] = frozenset()  # layers whose inputs recompute starts from
        self.noted_buffers: dict[tuple[int, int], NotedBuffers] = {}  # by microbatch and layer
        self.buffer_updates: list[BufferUpdate] = []
        self.buffer_undos: list[BufferUndo] = []
        self.drew: set[tuple[int, int]] = set()  # (microbatch, layer) whose recompute must draw again
        # By layer, as its last forward left them: the caller changes modes and attributes for his next call while this
        # one may still be recomputing.
        self.attributes: dict[int, Attributes] = {}
        self.touched: dict[int, set[int]] = {}  # by unit: trainable parameters that got a gradient
        self.stores: dict[int, torch.Tensor] = {}  # by unit: the gradient image this call writes
        self.losses: dict[int, tuple[list[HostTensor], bool]] = {}
        self.outputs: dict[int, Boundary] = {}
        self._recompute_data: dict[tuple[int, int], Boundary] = {}

        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._boundaries: dict[tuple[int, int], Boundary] = {(m, 0): b for m, b in enumerate(inputs)}
        self._gradients: dict[tuple[int, int], list[HostTensor | None] | None] = {}
        self.error: BaseException | None = None
        self.told = False  # whether the caller has seen the failure
        self.jobs: list[StageJob] = []
        # Backward stages, with their positions in the plan, that wait for the caller's loss.backward().
        self._later: list[tuple[range, int]] = []
        self._open_jobs = 0
        self._open_forward = 0
        self._peak_bytes: int | None = None  # beside the regions, of the jobs of this deal
        self._is_later = False  # its jobs are those of a backward that was dealt out by itself
        self._jobs_on: list[int] = []  # by device, those that have not ended; each entry belongs to that worker
        self.passed_on = [PassedOn(device.memory_bytes) for device in devices()]
        self.settled = False
        # One thread at a time waits for the downloads and then gives the job handles up: the caller and the optimizer
        # thread may both come here, and the second must not find handles that the first has ended.
        self._settling = threading.Lock()
        self._keepers: list[torch.Tensor] = []  # of the jobs' handles

    # -- dispatch (caller's thread) ------------------------------------------------------------------------------
    def dispatch(self, plan: ModelExecutePlan, run_type: str) -> None:
        """Deals the jobs out to the devices, in program order, and starts their uploads.

        ``run_type``: "infer" or "train" (the forward stages only), or "fused" (everything).
        """
        jobs = [StageJob(self, Phase.FORWARD, stage, i) for i, stage in enumerate(plan.fwd_plan)]
        if self.keeps_graph:
            stages = self.backward_stages(plan)
            recomputed = stages[1:] if run_type == "fused" else stages
            if self.grain == "layer":
                kept = {stages[0].stop - 1} if run_type == "fused" else set()
                self.saved_layers = frozenset(x for s in stages for x in s) - kept
            else:
                self.saved_layers = frozenset(s.start for s in recomputed)
            if run_type == "fused":
                jobs.append(StageJob(self, Phase.FUSED, stages[0], 0))
            backward = [(s, plan.bwd_plan.index(s)) for s in recomputed]
            if run_type == "fused":
                jobs += [StageJob(self, Phase.BACKWARD, *where) for where in backward]
            else:
                self._later = backward
        self._deal(jobs)

    def backward_stages(self, plan: ModelExecutePlan) -> list[range]:
        """Those of the plan that run: gradients need not reach the others."""
        lowest = self._lowest_needed()
        return [stage for stage in plan.bwd_plan if stage.stop > lowest] or plan.bwd_plan[:1]

    def dispatch_backward(
        self, window: Window, predecessor: Call | None, grads: list[list[HostTensor | None] | None]
    ) -> None:
        """Deals out the backward stages of a "train" call. ``grads``: for each microbatch those of the outputs."""
        jobs = [StageJob(self, Phase.BACKWARD, *where) for where in self._later]
        self._later, self._is_later, self._peak_bytes = [], True, None
        self.window, self.joined, self.predecessor = window, True, predecessor
        for microbatch, found in enumerate(grads):
            self.put_gradient(microbatch, len(self.layers), found)
        self.settled = False
        self._deal(jobs)

    @property
    def awaits_backward(self) -> bool:
        return bool(self._later)

    def _deal(self, jobs: list[StageJob]) -> None:
        self.probe.expect(len(jobs))
        with self.engine.dispatch_lock:
            self._reserve(jobs)
            if self.announced is not None:
                self.announced.plan(jobs)
            with uninterrupted():
                self._open(jobs)

    def _open(self, jobs: list[StageJob]) -> None:
        self.jobs = jobs
        self._open_jobs = len(jobs)
        self._open_forward = sum(job.phase is not Phase.BACKWARD for job in jobs)
        self._jobs_on = [0] * self.engine.device_count
        for ahead in range(len(jobs)):
            self._jobs_on[self.engine.peek(ahead)] += 1
        self.engine.calls_in_flight.add(self)
        for opened, job in enumerate(jobs):
            worker = self.engine.next_worker()
            try:
                job.open(worker)
                if self.announced is not None:
                    self.announced.take_tickets(job)
            except BaseException as error:  # noqa: BLE001 (reaches the caller as the call's failure)
                with self._mutex:
                    self._open_jobs -= len(jobs) - opened
                self.fail(error, worker=worker, job=job)
                break
            worker.submit(job)
        self.window = None  # neither it nor a job may refer back here: with the model all memory goes, at once
        handles = [job.handle for job in jobs if job.handle]
        if handles:
            self._keepers.append(_ops.handle_keeper(*handles))

    def _lowest_needed(self) -> int:
        """The lowest layer that a gradient must reach."""
        if self.wants_input_grads:
            return 0
        for index, units in enumerate(self.units_of):
            if any(unit.trainable for unit in units):
                return index
        return len(self.layers)

    def _reserve(self, jobs: list[StageJob]) -> None:
        """Regions large enough for two consecutive jobs of each device, or at least for the largest one
        (Note [Room for regions]).

        Also for jobs that a device gets when calls like this one follow, so that no region grows then: that waits for
        all work.
        """
        count = self.engine.device_count
        sizes = [job.job_bytes for job in jobs]
        wanted, least = [0] * count, [0] * count
        beside = self.beside(self._is_later)
        for first in range(count):
            device = self.engine.peek(first)
            pair = max(sizes[i] + sizes[j] for i, j in consecutive_jobs(len(jobs), count, first))
            least[device] = max(sizes[first::count], default=0)
            wanted[device] = beside.region_bytes(pair, least[device])
        owner = None if beside.peak_bytes is None else self.region_owner
        try:
            self.engine.reserve_regions(wanted, least, beside.ceiling_bytes, owner)
        except torch.OutOfMemoryError as error:
            raise self._region_failure(error, wanted) from error

    def _region_failure(self, error: BaseException, wanted: list[int]) -> BaseException:
        """There is no room for weights and gradients of one stage on some device."""
        worker = next(w for w, size in zip(self.engine.workers, wanted, strict=True) if w.region.numel() < size)
        made = as_out_of_memory(error, f"{worker.name}, region of weights and gradients")
        assert made is not None
        made.phase = "region"
        note_use(made, worker, 0, outside_bytes(worker))
        made.microbatch_shapes = self.microbatch_shapes
        return made

    def gradient_images(self, unit: Unit) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(image to start from, image to write; None: a place of the announced step's pool) for one backward job of
        ``unit``."""
        if self.announced is not None and self.announced.passes(unit):
            assert self.window is not None
            return self.window.image(unit), None
        own = self.stores.get(unit.key)
        if own is not None:
            return own, own
        assert self.window is not None
        load = self.window.image(unit)
        store = unit.gradient_image(other_than=load)
        self.stores[unit.key] = store
        return load, store

    # -- what jobs exchange (workers) ----------------------------------------------------------------------------
    def check(self) -> None:
        if self.error is not None:
            raise CallAborted

    def boundary(self, microbatch: int, layer: int, block: bool) -> Boundary | None:
        with self._mutex:
            while (microbatch, layer) not in self._boundaries:
                self.check()
                if not block:
                    return None
                self._changed.wait()
            return self._boundaries[microbatch, layer]

    def has_boundary(self, microbatch: int, layer: int) -> bool:
        """Call with ``_changed`` held, as ``wait_for``'s condition is."""
        return (microbatch, layer) in self._boundaries

    def take_boundary(self, microbatch: int, layer: int) -> Boundary:
        with self._mutex:
            return self._boundaries.pop((microbatch, layer))

    def is_saved(self, host: HostTensor) -> bool:
        """Whether a job that is still to come starts from this tensor."""
        with self._mutex:
            return any(leaf is host for boundary in self._boundaries.values() for leaf in boundary.leaves)

    def has_input_gradients(self) -> bool:
        """Whether every microbatch's gradients of the call's inputs are known (or known to be none)."""
        with self._mutex:
            return all((m, 0) in self._gradients for m in range(self.num_microbatch))

    def forward_done(self) -> bool:
        """Whether every forward and the fused job have ended, so that outputs and buffers are complete."""
        return self._open_forward == 0

    def put_boundary(self, microbatch: int, layer: int, boundary: Boundary) -> None:
        with self._mutex:
            self._boundaries[microbatch, layer] = boundary
            self._changed.notify_all()

    def take_label(self, microbatch: int) -> Boundary:
        """Nobody needs it a second time: a window of many calls would keep the labels of all of them."""
        label, self._labels[microbatch] = self._labels[microbatch], None
        assert label is not None
        return label

    def drop_boundary(self, microbatch: int, layer: int) -> None:
        with self._mutex:
            self._boundaries.pop((microbatch, layer), None)

    def gradient(self, microbatch: int, layer: int, block: bool) -> tuple[bool, list[HostTensor | None] | None]:
        """(whether it is known, gradients of the tensors at the input of ``layer`` that require grad)."""
        with self._mutex:
            while (microbatch, layer) not in self._gradients:
                self.check()
                if not block:
                    return False, None
                self._changed.wait()
            return True, self._gradients.pop((microbatch, layer))

    def put_gradient(self, microbatch: int, layer: int, grads: list[HostTensor | None] | None) -> None:
        with self._mutex:
            self._gradients[microbatch, layer] = grads
            self._changed.notify_all()

    def keep_recompute_data(self, worker: Worker, microbatch: int, layer: int, data: Any) -> None:
        leaves, spec = pytree.tree_flatten(data)
        live = LiveTree(spec, leaves, [False] * len(leaves), {})
        self._recompute_data[microbatch, layer] = live.stash(worker)

    def recompute_data(self, worker: Worker, microbatch: int, layer: int) -> Any:
        boundary = self._recompute_data.pop((microbatch, layer), None)
        return None if boundary is None else PendingTree(boundary, worker).wait().value()

    def layer_seed(self, microbatch: int, layer: int, recomputing: bool) -> int:
        seed = random_state.layer_seed(self.seed, microbatch, layer)
        return seed ^ _NO_RNG_KEPT if recomputing and not self.preserve_rng else seed

    def wait_predecessor(self) -> None:
        """Before gradients go down: the call before must have kept its own, or its sum could not be restored."""
        predecessor = self.predecessor  # another worker may be here too
        if predecessor is not None:
            predecessor.wait_jobs(self.check)
            if predecessor.error is not None:
                raise CallAborted
            self.predecessor = None

    def note_peak(self, peak_bytes: int) -> None:
        """A job has ended well, and its device held so much at most beside its region."""
        with self._mutex:
            self._peak_bytes = max(peak_bytes, self._peak_bytes or 0)

    # -- ending --------------------------------------------------------------------------------------------------
    def fail(self, error: BaseException, *, worker: Worker, job: StageJob) -> None:
        """The first failure is the call's; the other jobs stop at their next safe point."""
        if isinstance(error, CallAborted):
            if self.error is None and self.predecessor is not None and self.predecessor.error is not None:
                error = self.predecessor.error
            elif self.error is None:
                error = RoundPipeError("a job was aborted without a reason")
            else:
                return
        located: BaseException = error
        if isinstance(error, Exception):
            place = job.place
            located = errors.locate(
                error,
                device=worker.name,
                phase=place.phase,
                stage=job.position,
                layer=place.layer,
                microbatch=place.microbatch,
            )
        with self._mutex:
            if self.error is None:
                self.error = located
            self._changed.notify_all()

    def lost(self, error: RoundPipeError, device: str | None = None, stage: int | None = None) -> None:
        """Something that this call computed did not arrive on the host."""
        located = errors.locate(error, device=device, phase="download", stage=stage)
        with self._mutex:
            self.error = self.error or located
            self._changed.notify_all()

    def abandon(self, error: BaseException, told: bool = True) -> None:
        """The caller leaves the call with ``error`` (Ctrl-C, a failure of his own functions): its jobs stop at their
        next safe point, its gradients and buffers are dropped, and nobody needs to be told any more, unless ``told`` is
        False.
        """
        with self._mutex:
            if self.error is None:
                self.error, self.told = error, told
            self._changed.notify_all()

    def job_finished(self, job: StageJob, worker: Worker) -> None:
        self._jobs_on[worker.index] -= 1
        if self._jobs_on[worker.index] == 0:
            self.passed_on[worker.index].clear()
        with self._mutex:
            self._open_jobs -= 1
            self._open_forward -= job.phase is not Phase.BACKWARD
            if self._open_jobs == 0 and self.error is None and self._peak_bytes is not None and self.tell_peak:
                self.tell_peak(self._is_later, self._peak_bytes)
            over = self.keeps_graph and not self._later
            if self._open_jobs == 0 and (over or self.error is not None):
                self._boundaries.clear()
                self._labels.clear()
                self._recompute_data.clear()
                self.noted_buffers.clear()
                self.attributes.clear()
            self._changed.notify_all()

    def release(self) -> None:
        """What only a failed call would have needed; the window keeps the call for its gradients."""
        self.buffer_undos.clear()
        self.advisor = None
        self.predecessor = None

    def counters(self) -> str:
        """Where every job is and the tickets of every unit, for the watchdog."""
        lines = [f"jobs open: {self._open_jobs} of {len(self.jobs)}"]
        lines += [
            f"  {job.phase.value} stage {job.position}, layers {job.stage.start}-{job.stage.stop - 1}: {job.place}"
            for job in self.jobs
        ]
        lines.append("units: issued (upload, publish, gradient load, write, take), completed (the same)")
        units = {unit.key: unit for layer in self.units_of for unit in layer}
        for unit in units.values():
            counts = _ops.unit_counters(unit.handle)
            lines.append(f"  layers {', '.join(map(str, unit.layers))}: {counts[:5]}, {counts[5:]}")
        return "\n".join(lines)

    @property
    def finished(self) -> bool:
        return self._open_jobs == 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Blocks the calling thread in slices until ``condition`` or a failure of this call."""
        watchdog = Watchdog(self.engine, what, self.counters)
        while not self._slice(lambda: condition() or self.error is not None):
            watchdog()

    def _slice(self, condition: Callable[[], bool]) -> bool:
        """Waits a tenth of a second at most; whether ``condition`` holds."""
        with uninterrupted(), self._mutex:
            return condition() or self._changed.wait_for(condition, timeout=0.1)

    def wait_jobs(self, check: Callable[[], None] | None = None) -> None:
        """Blocks until every job has ended, well or not, and all gradients are on the host. Does not raise for a
        failure of this call: look at ``error``.
        """
        watchdog = Watchdog(self.engine, "the jobs of a call", self.counters)
        while not self._slice(lambda: self._open_jobs == 0):
            watchdog()
            if check is not None:
                check()
        with self._settling:
            if not self.settled:
                self._settle(watchdog)

    def wait_ended(self) -> None:
        self.wait_jobs()

    def _settle(self, watchdog: Watchdog) -> None:
        for job in self.jobs:
            if job.handle and job.with_gradients and self.error is None:
                try:
                    _ops.wait(_ops.job_wait_gradients, job.handle, check=watchdog)
                except RoundPipeError as error:
                    self.lost(error, device=job.device, stage=job.position)
        with uninterrupted():
            self.settled = True
            self.jobs = []
            self._keepers.clear()
