"""What a device's memory peaks at in a call: a pure function of sizes, plan, number of microbatches and grain.

Note [Peak of a job]
  A device holds the region (weights, and gradients in backward, of two consecutive jobs where both find room), copies
  of buffers, and the activations of one job. Those of a job, for one microbatch, are

    ring: the input and, in backward, the gradients of the output; the same of the next microbatch, which come up
          meanwhile; in the fused stage labels, likewise. With ``in_flight`` also as many outputs, or gradients of the
          input, of earlier microbatches, whose way down is not over.
    activations: forward: the largest layer's, with its input unless that is in the ring.
          backward by stage: graphs grow from layer to layer, and shrink again. While a layer runs backward there are
          the graphs of all layers below it, and its own most. The fused stage has the loss on top.
          backward by layer: the largest of one layer's, with the gradients of its output, beside the ring: the layer's
          input and the next one's. In the fused stage forward runs first, and keeps nothing but the last layer's graph.

  An input counts while somebody holds it: after the forward that is the graph, where it saved it.

  The peak of the device is that of its largest job: the region does not shrink from job to job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .layer_cost import LayerCost
from .layer_memory import LayerMemory, Measured
from .live_memory import MemoryUse

__all__ = ["DevicePeak", "JobPeak", "Run", "consecutive_jobs", "predict_peak", "region_bytes"]


@dataclass(frozen=True)
class Run:
    """The settings of a call that memory depends on.

    Attributes:
        run_type: "infer", "train" (forward, and backward later) or "fused" (``forward_backward``).
        forward, backward: the plan's stages, ascending and descending.
        num_microbatch: pieces of the batch.
        grain: "stage" or "layer", see RoundPipeRunConfig.recompute_grain.
        num_devices: jobs go round so many.
        lowest: the lowest layer that a gradient must reach; backward stages below it do not run.
        in_flight: boundary outputs of one job whose copies down may not be over; 1 where the host runs ahead of the
            device (a GPU), 0 on simulated devices.
    """

    run_type: str
    forward: Sequence[range]
    backward: Sequence[range]
    num_microbatch: int
    grain: str = "stage"
    num_devices: int = 1
    lowest: int = 0
    in_flight: int = 0


@dataclass(frozen=True)
class JobPeak:
    """Bytes of one job's activations at their most."""

    phase: str
    stage: range
    ring_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.ring_bytes + self.activations_bytes


@dataclass(frozen=True)
class DevicePeak:
    """A device's peak in bytes, by category, and the job that has it."""

    use: MemoryUse
    job: JobPeak

    @property
    def total_bytes(self) -> int:
        return self.use.total_bytes


def predict_peak(
    costs: Sequence[LayerCost], memory: Measured, run: Run, *, capacity_bytes: int | None = None
) -> DevicePeak:
    """The peak of the device that needs most.

    Args:
        costs: weights, gradients and buffers of each layer.
        memory: of each layer and the loss, for the call's largest microbatch.
        run: the rest.
        capacity_bytes: what the device has for all of it; None: no limit. Where two consecutive jobs' weights do not
            fit beside the activations, the region is smaller, down to the largest job's (see ``region_bytes``).
    """
    jobs = list(_jobs(run))
    peaks = [_job_peak(memory, run, phase, stage) for phase, stage in jobs]
    worst = max(peaks, key=lambda peak: peak.total_bytes)
    sizes = [_stage_sizes(costs, stage, phase != "forward") for phase, stage in jobs]
    # The backward of model(...) is dealt out by itself.
    dealt = [[i for i, (phase, _) in enumerate(jobs) if (phase == "backward") == later] for later in (False, True)]
    pairs = [
        (sizes[group[i]], sizes[group[j]])
        for group in ([list(range(len(jobs)))] if run.run_type == "fused" else dealt)
        for start in range(run.num_devices)
        for i, j in (consecutive_jobs(len(group), run.num_devices, start) if group else ())
    ]
    first, second = max(pairs, key=lambda pair: sum(map(sum, pair)))
    largest = max(sizes, key=sum)
    buffers = sum(_buffer_bytes(costs))
    region = region_bytes(sum(first) + sum(second), sum(largest), worst.total_bytes + buffers, capacity_bytes)
    gradients = min(max(first[1] + second[1], largest[1]), region)
    if region < sum(first) + sum(second):  # squeezed: both kinds give way alike
        gradients = min(region, region * largest[1] // max(sum(largest), 1))
    use = MemoryUse(region - gradients, gradients, worst.ring_bytes, worst.activations_bytes, buffers)
    return DevicePeak(use, worst)


def consecutive_jobs(count: int, num_devices: int, first: int) -> list[tuple[int, int]]:
    """Which of ``count`` jobs a device gets one after the other, when they are dealt out again and again; its first is
    number ``first``."""
    taken = [(first + k * num_devices) % count for k in range(count)]
    return [(i, (i + num_devices) % count) for i in taken]


def region_bytes(pair_bytes: int, largest_bytes: int, beside_bytes: int, capacity_bytes: int | None) -> int:
    """How large a device's region of weights and gradients is made.

    Args:
        pair_bytes: of the two largest consecutive jobs.
        largest_bytes: of the largest job, which must find room.
        beside_bytes: what else the device holds at its peak, as far as it is known.
        capacity_bytes: what there is for both; None: no limit.
    """
    if capacity_bytes is None:
        return pair_bytes
    return max(largest_bytes, min(pair_bytes, capacity_bytes - beside_bytes))


def _jobs(run: Run) -> Iterator[tuple[str, range]]:
    yield from (("forward", stage) for stage in run.forward)
    if run.run_type == "infer":
        return
    stages = [s for s in run.backward if s.stop > run.lowest] or list(run.backward[:1])
    for i, stage in enumerate(stages):
        yield ("fused" if run.run_type == "fused" and i == 0 else "backward"), stage


def _stage_sizes(costs: Sequence[LayerCost], stage: range, gradients: bool) -> tuple[int, int]:
    """(weights, gradients) of a job in the region; units that several of its layers share count once."""
    units = {}
    for layer in stage:
        for key, weights, grads in costs[layer].own_units(layer):
            if not _is_buffers(key):
                units[key] = (weights, grads if gradients else 0)
    return sum(weights for weights, _ in units.values()), sum(grads for _, grads in units.values())


def _buffer_bytes(costs: Sequence[LayerCost]) -> Iterator[int]:
    seen = {key: size for cost in costs for key, size, _ in cost.units if _is_buffers(key)}
    return iter(seen.values())


def _is_buffers(key: object) -> bool:
    return isinstance(key, tuple) and len(key) == 2 and key[0] == "buffers"


def _job_peak(memory: Measured, run: Run, phase: str, stage: range) -> JobPeak:
    layers = memory.layers
    first, last = layers[stage.start], layers[stage.stop - 1]
    following = int(run.num_microbatch > 1)  # what the next microbatch begins with is there already
    by_layer = run.grain == "layer"
    if phase == "forward":
        most = _forward(layers, stage, run.in_flight if by_layer and run.run_type != "infer" else 0)
        ring = (1 + following) * first.input_bytes + run.in_flight * last.output_bytes
        return JobPeak(phase, stage, ring, most)
    down = run.in_flight * first.input_grad_bytes
    if phase == "fused":
        # Labels of one microbatch: after the loss those of this one go, or stay where none come up behind them.
        ahead = following * first.input_bytes + memory.label_bytes + down
        moments = _fused_by_layer(memory, stage, run.in_flight) if by_layer else _by_stage(layers, stage, memory.loss)
        found = [(ring + following * memory.label_bytes * in_loss, own) for ring, own, in_loss in moments]
    else:
        gradients = last.output_bytes if last.backward_held_bytes else 0  # which came up, and stay
        ahead = (1 + following) * gradients + down
        if by_layer:
            found = [(ring, own) for ring, own, _ in _by_layer(layers, stage, on_top=True)]
        else:
            ahead += following * first.input_bytes
            found = [(first.input_bytes, own) for _, own, _ in _by_stage(layers, stage, None)]
    ring, own = max(found, key=sum)
    return JobPeak(phase, stage, ahead + ring, own)


def _forward(layers: Sequence[LayerMemory], stage: range, saving: int) -> int:
    """``saving``: how many inputs of layers, which go down for recompute, may still be there."""
    most = 0
    for layer in stage:
        before = 0 if layer == stage.start else layers[layer].input_bytes
        if layer - 1 > stage.start:
            before += saving * layers[layer - 1].input_bytes
        most = max(most, before + layers[layer].forward_bytes)
    return most


_Moment = tuple[int, int, bool]  # bytes in the ring, bytes of activations, whether the loss is being computed


def _by_stage(layers: Sequence[LayerMemory], stage: range, loss: LayerMemory | None) -> list[_Moment]:
    """The graph of the whole stage. The ring: the stage's input, as far as somebody holds it."""
    moments = []
    below = 0  # graphs of the layers below, and what they and this one hold of what lies between them
    input_kept = layers[stage.start].saved_input_bytes
    levels = []
    for layer in stage:
        own = layers[layer]
        inside = layer > stage.start
        entry = own.input_bytes if inside else 0
        moments.append(
            (
                layers[stage.start].input_bytes if not inside else input_kept,
                below + entry + own.forward_bytes,
                False,
            )
        )
        if inside:
            below += max(layers[layer - 1].saved_output_bytes, own.saved_input_bytes)
        levels.append(below)
        below += own.graph_bytes
    top = layers[stage.stop - 1]
    if loss is not None:
        moments.append((input_kept, below + top.output_bytes + loss.forward_bytes, True))
        moments.append(
            (input_kept, below + max(top.saved_output_bytes, loss.saved_input_bytes) + loss.backward_bytes, False)
        )
    for layer, level in zip(stage, levels, strict=True):
        own = layers[layer]
        held = loss is None and layer == stage.stop - 1  # its output's gradients came up
        moments.append((input_kept, level + (own.backward_held_bytes if held else own.backward_bytes), False))
    return moments


def _by_layer(layers: Sequence[LayerMemory], stage: range, *, on_top: bool) -> list[_Moment]:
    """One layer at a time. The ring: its input, and that of the layer below. ``on_top``: the gradients of the stage's
    output came up, and are in the ring too.
    """
    moments = []
    for layer in stage:
        own = layers[layer]
        below = layers[layer - 1].input_bytes if layer > stage.start else 0
        made = 0 if on_top and layer == stage.stop - 1 else own.output_bytes  # gradients that the layer above made
        moments.append((own.input_bytes + below, made + own.forward_bytes, False))
        moments.append((own.saved_input_bytes + below, made + own.backward_held_bytes, False))
    return moments


def _fused_by_layer(memory: Measured, stage: range, saving: int) -> list[_Moment]:
    """Forward, the graph of the last layer with the loss, and the layers below it one by one."""
    layers, top = memory.layers, stage.stop - 1
    first = layers[stage.start]
    below = range(stage.start, top)
    if not below:
        return _by_stage(layers, stage, memory.loss)
    moments = [(first.input_bytes, _forward(layers, below, saving), False)]
    # The last layer's input is made here, and no part of the ring.
    last = [(0, entry + most, in_loss) for entry, most, in_loss in _by_stage(layers, range(top, top + 1), memory.loss)]
    return moments + last + _by_layer(layers, below, on_top=False)
