"""One job: all microbatches of a call through one stage on one device.

Note [Phases]
  forward   weights up, every microbatch through the layers, the input of each layer that recompute starts from and the
            output go down. Nothing is kept for backward, but autograd tracks which tensors require grad.
  fused     the last stage: forward, loss and backward of a microbatch at once, without recompute.
  backward  recompute from the saved input and backward, the whole stage ("stage") or layer by layer ("layer").
  Gradients of a unit start down when the last microbatch has passed it; the input's gradients go down for each
  microbatch.
"""

from __future__ import annotations

import contextlib
import enum
import traceback
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import _ops, errors, layer_call, spans
from .boundary import ArrivingGradients, HostTensor, LiveTree, PendingTree, Traffic
from .buffers import LayerBuffers, NotedBuffers
from .job_place import Place
from .job_probe import JobProbe
from .live_memory import counted
from .loss_call import call_loss
from .oom_state import note_use, outside_bytes
from .recompute import RecomputeScope
from .replica import foreign_gradient, late_gradient
from .units import Unit

if TYPE_CHECKING:
    from .call import Call
    from .engine import Worker


_NO_BUFFERS = NotedBuffers([], [])


class Phase(enum.Enum):
    FORWARD = "forward"
    FUSED = "fused"
    BACKWARD = "backward"


class StageJob:
    """Made and queued on the caller's thread, run once on its device's worker."""

    def __init__(self, call: Call, phase: Phase, stage: range, position: int) -> None:
        self.call = call
        self.phase = phase
        self.stage = stage
        self.position = position  # of the stage in its plan, for messages
        self.handle = 0
        layers = list(stage) if phase is not Phase.BACKWARD or call.grain == "stage" else list(reversed(stage))
        ordered: dict[int, Unit] = {unit.key: unit for layer in layers for unit in call.units_of[layer]}
        self.units = list(ordered.values())
        self.index = {unit.key: i for i, unit in enumerate(self.units)}
        self.with_gradients = phase is not Phase.FORWARD
        self._ready: set[int] = set()
        self._weights_done: set[int] = set()
        self._handed: set[int] = set()
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._fired: dict[int, set[int]] = {}  # by unit: parameters that got their last gradient
        self._gradients_at: dict[int, int] = {}  # by unit: byte offset in the device's region
        self._owner: dict[int, tuple[Unit, int]] = {}
        self._buffers: dict[int, LayerBuffers] = {}
        self._last = False  # the present backward is the last one of this job
        self._hook_failure: BaseException | None = None
        self.place = Place(phase.value)
        self.probe = JobProbe(call.probe)
        self.device: str | None = None

    @property
    def title(self) -> str:
        first, last = self.stage.start, self.stage.stop - 1
        return f"{self.phase.value} layer {first}" if first == last else f"{self.phase.value} layers {first}-{last}"

    @property
    def job_bytes(self) -> int:
        return sum(unit.job_bytes(self.with_gradients) for unit in self.units)

    def open(self, worker: Worker) -> None:
        """Takes the tickets and queues the uploads; program order (caller's thread)."""
        self.device = self.probe.device = worker.name
        empty = torch.empty(0, dtype=torch.uint8)
        loads, stores, pooled = [], [], []
        for position, unit in enumerate(self.units):
            load, store = (None, None)
            if self.with_gradients and unit.gradient_bytes:
                load, store = self.call.gradient_images(unit)
                if store is None:
                    pooled.append(position)
            loads.append(empty if load is None else load)
            stores.append(empty if store is None else store)
        units, announced = [unit.handle for unit in self.units], self.call.announced
        pool = announced.pool.handle if announced is not None and pooled else 0
        self.handle = _ops.job_open(worker.engine.handle, worker.index, units, loads, stores, pooled, pool)

    # -- running -------------------------------------------------------------------------------------------------
    def run(self, worker: Worker) -> None:
        call = self.call
        self.place.state = f"on {worker.name}"
        worker.check = call.check
        self._worker = worker
        self._kept = call.passed_on[worker.index]
        worker.parameters.accumulated = self._accumulated
        self._outside_bytes = outside_bytes(worker)
        if worker.memory is not None:
            worker.memory.reset_beside_peak()
        try:
            call.check()
            with (
                counted(worker.memory),
                torch.set_grad_enabled(call.keeps_graph),
                spans.span("job", self.title),
            ):
                self._run(worker)
            self._release_all(worker)
            _ops.job_close(self.handle)
            if worker.memory is not None:
                call.note_peak(worker.memory.beside_peak_bytes)
            self.probe.ended()
        except BaseException as error:  # noqa: BLE001 (everything becomes the call's failure and reaches the caller)
            if isinstance(error, torch.OutOfMemoryError):
                error = self._located(error, worker)  # noqa: PLW2901
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
                # Whoever catches it wants the memory back, which the locals of these frames would hold with it.
                traceback.clear_frames((error.__cause__ or error).__traceback__)
            _ops.drop_quietly(_ops.job_abort, self.handle)
            for buffers in self._buffers.values():
                buffers.distrust()
            call.fail(error, worker=worker, job=self)
        finally:
            worker.parameters.accumulated = None
            self._buffers.clear()
            self._gradients.clear()
            worker.check = None
            self.place.state = "ended"
            del self.call  # which holds this job: what both hold must go with its last user, not with the collector
            call.job_finished(self, worker)

    def _located(self, error: torch.OutOfMemoryError, worker: Worker) -> errors.DeviceOutOfMemory:
        """With the place, and with what the device holds as long as the frames of the traceback do."""
        place = self.place
        located = errors.locate(
            error,
            device=worker.name,
            phase=place.phase,
            stage=self.position,
            layer=place.layer,
            microbatch=place.microbatch,
        )
        assert isinstance(located, errors.DeviceOutOfMemory)
        gradients = sum(unit.gradient_bytes for unit in self.units) if self.with_gradients else 0
        note_use(located, worker, gradients, self._outside_bytes)
        located.microbatch_shapes = self.call.microbatch_shapes
        return located

    def _run(self, worker: Worker) -> None:
        for layer in self.stage:
            worker.replica(self.call.layers[layer]).begin_job()
        if self.phase is Phase.FORWARD:
            self._run_forward(worker)
        elif self.phase is Phase.FUSED:
            self._run_fused(worker)
        else:
            self._run_backward(worker)
        if self.phase is not Phase.BACKWARD:
            updates = self.call.buffer_updates
            for buffers in self._buffers.values():
                buffers.collect(updates)

    def _inputs(self, worker: Worker, microbatch: int, block: bool) -> PendingTree | None:
        """Starts the input of a microbatch on its way up; not blocking gives None when it is not there yet."""
        boundary = self.call.boundary(microbatch, self.stage.start, block)
        return None if boundary is None else boundary.fetch(worker, self._kept)

    def _run_forward(self, worker: Worker) -> None:
        call, stage = self.call, self.stage
        pending = self._inputs(worker, 0, block=True)
        for m in range(call.num_microbatch):
            call.check()
            self.place.at(self.phase.value, m, None)
            live = (pending or self._must(self._inputs(worker, m, block=True))).wait()
            pending = self._inputs(worker, m + 1, block=False) if m + 1 < call.num_microbatch else None
            if stage.start not in call.saved_layers:
                call.drop_boundary(m, stage.start)
            live = self._forward_layers(worker, m, live, stage)
            call.put_boundary(m, stage.stop, live.stash(worker, passed_on=self._kept))

    @staticmethod
    def _must(pending: PendingTree | None) -> PendingTree:
        assert pending is not None
        return pending

    def _forward_layers(self, worker: Worker, m: int, live: LiveTree, layers: range) -> LiveTree:
        """Layers of a forward that keeps nothing; their saved inputs go down on the way."""
        call = self.call
        for layer in layers:
            if layer != self.stage.start and layer in call.saved_layers:
                call.put_boundary(m, layer, live.stash(worker, passed_on=self._kept))
            if call.keeps_graph:
                live = layer_call.detach_tree(live)
                layer_call.enter_graph(live, worker)
                live = self._call_layer(worker, m, layer, live, recomputing=False)
                live = layer_call.detach_tree(live)
            else:
                live = self._call_layer(worker, m, layer, live, recomputing=False)
            if m == call.num_microbatch - 1 and self.phase is Phase.FORWARD:
                self._pass_weights(layer)
        return live

    def _run_fused(self, worker: Worker) -> None:
        call, stage = self.call, self.stage
        split = stage.stop - 1 if call.grain == "layer" else stage.start  # layers before it are recomputed
        pending = self._inputs(worker, 0, block=True)
        label = call.take_label(0).fetch(worker)
        for m in range(call.num_microbatch):
            call.check()
            self.place.at(self.phase.value, m, None)
            live = (pending or self._must(self._inputs(worker, m, block=True))).wait()
            label_value = label.wait().value()
            pending = None
            if m + 1 < call.num_microbatch:
                pending = self._inputs(worker, m + 1, block=False)
                label = call.take_label(m + 1).fetch(worker)
            live = layer_call.detach_tree(self._forward_layers(worker, m, live, range(stage.start, split)))
            entry = layer_call.enter_graph(live, worker)
            for layer in range(split, stage.stop):
                live = self._call_layer(worker, m, layer, live, recomputing=False, saves_graph=True)
            self.place.at(self.phase.value, m, None)
            losses = call_loss(call, worker, self.probe, m, live, label_value)
            self._kept.forget_written(live.known.values())
            if call.keeps_outputs:
                call.outputs[m] = layer_call.detach_tree(live).stash(worker)
            del live, label_value
            grads = self._backward(worker, m, losses, [None] * len(losses), entry, range(split, stage.stop))
            del losses, entry
            grads = self._backward_by_layer(worker, m, range(stage.start, split), grads)
            call.drop_boundary(m, stage.start)
            self._deliver(worker, m, stage.start, grads)
            del grads  # on their way down; the next microbatch needs the room
        self._hand_over_rest()

    def _arriving(self, worker: Worker, m: int, block: bool) -> ArrivingGradients | None:
        """Starts a backward microbatch's gradients and, for grain "stage", its input on their way up."""
        came, grads = self.call.gradient(m, self.stage.stop, block)
        if not came:
            return None
        if grads is None:
            return ArrivingGradients(None, None)
        tree = self._inputs(worker, m, block=True) if self.call.grain == "stage" else None
        return ArrivingGradients([None if g is None else g.fetch(worker) for g in grads], tree)

    def _run_backward(self, worker: Worker) -> None:
        call, stage = self.call, self.stage
        arriving = self._arriving(worker, 0, block=True)
        for m in range(call.num_microbatch):
            call.check()
            self.place.at(self.phase.value, m, None)
            present = arriving or self._arriving(worker, m, block=True)
            assert present is not None
            arriving = self._arriving(worker, m + 1, block=False) if m + 1 < call.num_microbatch else None
            if present.grads is None:  # nothing downstream depends on this stage for this microbatch
                for layer in stage:
                    call.drop_boundary(m, layer)
                call.put_gradient(m, stage.start, None)
                continue
            grads: list[torch.Tensor | None] | None = [None if g is None else g.wait() for g in present.grads]
            if present.tree is None:
                grads = self._backward_by_layer(worker, m, stage, grads)
            else:
                live = present.tree.wait()
                entry = layer_call.enter_graph(live, worker)
                for layer in stage:
                    live = self._call_layer(worker, m, layer, live, recomputing=True, saves_graph=True)
                outs = layer_call.distinct_tensors(live)
                del live
                grads = self._backward(worker, m, outs, grads, entry, stage)
                del outs
            call.drop_boundary(m, stage.start)
            self._deliver(worker, m, stage.start, grads)
        self._hand_over_rest()

    def _backward_by_layer(
        self, worker: Worker, m: int, layers: range, grads: list[torch.Tensor | None] | None
    ) -> list[torch.Tensor | None] | None:
        """Recompute and backward one layer at a time; ``grads`` belong to the output of the last of ``layers``, and the
        list is emptied: whoever called holds it, and the tensors in it are to go.
        """
        call = self.call
        pending: PendingTree | None = None
        for layer in reversed(layers):
            if grads is not None:
                live = (pending or self._saved(worker, m, layer)).wait()
                pending = self._saved(worker, m, layer - 1) if layer - 1 in layers else None
                entry = layer_call.enter_graph(live, worker)
                live = self._call_layer(worker, m, layer, live, recomputing=True, saves_graph=True)
                outs = layer_call.distinct_tensors(live)
                del live
                given, grads = grads, self._backward(worker, m, outs, grads, entry, range(layer, layer + 1))
                given.clear()
                del outs
            if layer != self.stage.start:
                call.drop_boundary(m, layer)
            if m == call.num_microbatch - 1:
                self._pass_weights(layer, descending=True)
        return grads

    def _saved(self, worker: Worker, m: int, layer: int) -> PendingTree:
        boundary = self.call.boundary(m, layer, block=True)
        assert boundary is not None
        return boundary.fetch(worker, self._kept)

    # -- one layer -----------------------------------------------------------------------------------------------
    def _call_layer(
        self, worker: Worker, m: int, layer: int, live: LiveTree, *, recomputing: bool, saves_graph: bool = False
    ) -> LiveTree:
        call = self.call
        self.place.at("recompute" if recomputing else self.phase.value, m, layer)
        replica = worker.replica(call.layers[layer])
        self._await_layer(worker, layer)
        noted = call.noted_buffers.pop((m, layer), _NO_BUFFERS) if recomputing else _NO_BUFFERS
        buffers = self._buffers.get(layer)
        if buffers is None:
            buffers = LayerBuffers(worker, replica, noted if recomputing else call.host_buffers)
            self._buffers[layer] = buffers
        will_recompute = call.keeps_graph and not saves_graph
        saved = None if recomputing else self.probe.saved_bytes(worker, m, layer, live)
        before: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if buffers:
            if recomputing:
                before = buffers.restored(noted)
            elif will_recompute or saved is not None:
                noted = buffers.snapshot()
                if will_recompute:
                    call.noted_buffers[m, layer] = noted
        facts = call.facts[layer]
        if facts.writes_input is not False:
            for leaf in live.leaves:
                if isinstance(leaf, torch.Tensor):
                    host = live.stored(leaf)
                    if host is not None and host.traffic is Traffic.ACTIVATIONS and leaf.device == worker.device:
                        host.order_after_read(worker)
        scope = RecomputeScope(recomputing, keeps=will_recompute)
        if recomputing:
            scope.data = call.recompute_data(worker, m, layer)
        entered = {leaf.grad_fn for leaf in live.leaves if isinstance(leaf, torch.Tensor)}
        known = live.known
        with before:
            live, drew = layer_call.call_layer(
                worker,
                replica,
                facts,
                live,
                first=layer == 0,
                seed=call.layer_seed(m, layer, recomputing),
                ambient=call.ambient,
                scope=scope,
                seeds=not recomputing or (m, layer) in call.drew,
                layer=layer,
                noted=call.attributes,
                notes=will_recompute and m == call.num_microbatch - 1,
                timed=self.probe.forward(m, layer, recomputing),
                hooks=layer_call.saved_tensors(facts, will_recompute, saved),
                undo=lambda: buffers.load(noted),
                hands_on=not recomputing and not self._goes_to_loss(layer),
            )
            buffers.note_silent_writes()
        self._kept.forget_written(known.values())
        if saved is not None:
            saved.note(live.leaves)
        if will_recompute and drew:
            call.drew.add((m, layer))
        if saves_graph:
            for leaf in live.leaves:
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and leaf.grad_fn not in entered:
                    entered.add(leaf.grad_fn)
                    self.place.follow(leaf.grad_fn, layer, self.probe.hook(m))
        if scope.saved:
            call.keep_recompute_data(worker, m, layer, scope.data)
        return live

    def _goes_to_loss(self, layer: int) -> bool:
        call = self.call
        return self.phase is Phase.FUSED and layer == len(call.layers) - 1 and not call.keeps_outputs

    # -- weights -------------------------------------------------------------------------------------------------
    def _await_layer(self, worker: Worker, layer: int) -> None:
        """The layer's weights are on the device, its parameters point to them, and gradients have their place."""
        for unit in self.call.units_of[layer]:
            if unit.key in self._ready:
                continue
            at = _ops.wait_place(self.handle, self.index[unit.key], check=worker.check)
            self._gradients_at[unit.key] = at[1]
            weights = worker.views((unit.key, "w"), unit.layouts, at[0])
            gradients = (
                worker.views((unit.key, "g", len(unit.trainable)), unit.gradient_layouts, at[1]) if at[1] >= 0 else []
            )
            position = {index: j for j, index in enumerate(unit.trainable)}
            for i, (host, view) in enumerate(zip(unit.parameters, weights, strict=True)):
                parameter = worker.parameters.get(host)
                parameter.data = view
                # As at the dispatch: the caller may have frozen or unfrozen it meanwhile.
                parameter.requires_grad_(i in position)
                torch.autograd.graph.increment_version(parameter)
                parameter.grad = None
                if gradients and i in position:
                    parameter.grad = gradients[position[i]]
                    self._owner[id(parameter)] = (unit, position[i])
            if gradients:
                self._gradients[unit.key] = gradients
            self._ready.add(unit.key)

    def _pass_weights(self, layer: int, descending: bool = False) -> None:
        """The last microbatch has passed ``layer``: units that no later layer of this job uses make room."""
        for unit in self.call.units_of[layer]:
            others = [x for x in self.call.layers_of[unit.key] if x in self.stage]
            if layer == (min(others) if descending else max(others)) and unit.key not in self._weights_done:
                self._weights_done.add(unit.key)
                _ops.job_weights_done(self.handle, self.index[unit.key])

    def _release_all(self, worker: Worker) -> None:
        for unit in self.units:
            for host in unit.parameters:
                parameter = worker.parameters.get(host)
                parameter.grad = None

    # -- backward and gradients ----------------------------------------------------------------------------------
    def _backward(
        self,
        worker: Worker,
        m: int,
        outs: list[torch.Tensor],
        grads: list[torch.Tensor | None] | None,
        entry: layer_call.EntryGrads | None,
        layers: range,
    ) -> list[torch.Tensor | None] | None:
        """Autograd through what was just computed; gives the gradients at the entry (None: none)."""
        assert grads is not None
        self.place.at(self.phase.value, m, layers.start if len(layers) == 1 else None)
        self._last = m == self.call.num_microbatch - 1
        if self._last:
            self.call.wait_predecessor()
            self._fired.clear()
        fused_loss = self.phase is Phase.FUSED and all(g is None for g in grads)
        pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad and (g is not None or fused_loss)]
        if pairs:
            with worker.compute_lock, self.probe.backward(m, layers.stop - 1):
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        if self._hook_failure is not None:
            raise self._hook_failure
        self._adopt_replaced(worker, layers)
        if self._last:
            self._hand_over(layers)
        if entry is None:
            return None
        found = list(entry.grads)
        return found if any(g is not None for g in found) else None

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd added to a gradient (on its own thread on a GPU); called once a backward and parameter."""
        owner = self._owner.get(id(parameter))
        if owner is None:
            self._hook_failure = foreign_gradient(parameter)
            return
        unit, position = owner
        self.call.touched.setdefault(unit.key, set()).add(position)
        if unit.key in self._handed:
            self._hook_failure = late_gradient(unit.names[unit.trainable[position]])
            return
        if not self._last or parameter.grad is not self._gradients[unit.key][position]:
            return
        fired = self._fired.setdefault(unit.key, set())
        fired.add(position)
        if len(fired) == len(unit.trainable) and self._single_pass(unit):
            self._start_down(unit)

    def _single_pass(self, unit: Unit) -> bool:
        """Whether one backward of this job brings all gradients of the unit."""
        if self.call.grain == "stage":
            return True
        return sum(1 for layer in self.call.layers_of[unit.key] if layer in self.stage) == 1

    def _start_down(self, unit: Unit) -> None:
        if unit.key not in self._handed:
            self._handed.add(unit.key)
            if self.call.gradient_stats is not None:
                self.call.gradient_stats.measure(self._worker, unit, self._gradients_at[unit.key])
            if self.call.announced is None or not self.call.announced.hand_over(self, unit):
                _ops.job_gradients_done(self.handle, self.index[unit.key])

    def _adopt_replaced(self, worker: Worker, layers: range) -> None:
        """A gradient that autograd or a hook replaced instead of adding to (sparse ones) goes into its place."""
        for layer in layers:
            for unit in self.call.units_of[layer]:
                views = self._gradients.get(unit.key)
                if views is None or unit.key in self._handed:
                    continue
                for view, host in zip(views, unit.trainable_parameters, strict=True):
                    parameter = worker.parameters.get(host)
                    if parameter.grad is not view:
                        with torch.no_grad():
                            if parameter.grad is None:
                                view.zero_()
                            else:
                                view.copy_(parameter.grad.to_dense())
                        parameter.grad = view

    def _hand_over(self, layers: range) -> None:
        """After the last microbatch's backward through ``layers``: units that no other layer of this job adds to."""
        for layer in layers:
            for unit in self.call.units_of[layer]:
                remaining = [x for x in self.call.layers_of[unit.key] if x in self.stage and x < layers.start]
                if unit.key in self._gradients and not remaining:
                    self._start_down(unit)

    def _hand_over_rest(self) -> None:
        self.call.wait_predecessor()
        for unit in self.units:
            if unit.gradient_bytes and self.with_gradients:
                if unit.key not in self._ready:
                    at = _ops.wait_place(self.handle, self.index[unit.key], check=self.call.check)
                    self._gradients_at[unit.key] = at[1]
                self._start_down(unit)

    def _deliver(self, worker: Worker, m: int, layer: int, grads: list[torch.Tensor | None] | None) -> None:
        down = None
        if grads is not None and (layer > 0 or self.call.wants_input_grads):
            down = [None if g is None else HostTensor.stash(worker, g, Traffic.ACTIVATIONS) for g in grads]
        self.call.put_gradient(m, layer, down)
