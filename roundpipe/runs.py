"""The kinds of call, from arguments to results: inference, forward for a later backward, and both at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from .announced_step import announce, dispatched
from .autograd_outputs import LaterBackward
from .batch import InputPieces, RoundPipePackedData, merge_outputs, split_inputs, split_label
from .boundary import Boundary, HostTensor
from .call import Call
from .caller_tensors import handed_out, host_boundary, pack, unread_leaves
from .engine import Engine
from .errors import ConfigError, RoundPipeError, StallError
from .gradient_stats import GradientStats
from .interrupts import uninterrupted
from .oom_adapt import adapting
from .oom_advice import OomAdvisor
from .output_merge import with_loss_of_batch
from .plan import ModelExecutePlan
from .region_room import watch
from .run_config import ResolvedConfig
from .training_state import TrainingState

if TYPE_CHECKING:
    from .optim.compact import CompactOptimizer


def infer(state: TrainingState, config: ResolvedConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward without backward; gives the merged outputs on the host."""
    return adapting(state, config, "infer", lambda chosen, made: _infer(state, chosen, args, kwargs, made))


def _infer(
    state: TrainingState, config: ResolvedConfig, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Call]
) -> Any:
    engine = state.prepare(trains=False)
    with torch.no_grad():
        pieces = split_inputs(args, kwargs, config.num_microbatch, config.split_input)
        inputs = _inputs(engine, pieces)
        call = _make_call(state, engine, config, inputs, [], _no_loss, keeps_graph=False, keeps_outputs=True)
        call.advisor = OomAdvisor(state, config, "infer", args, kwargs, None, None)
        made.append(call)
        with abandoned_on_error(call):
            _dispatch(state, call, config, "infer")
            end = len(state.layers)
            call.wait_for(lambda: all(call.has_boundary(m, end) for m in range(call.num_microbatch)), "the outputs")
            _raise_if_failed(state, call)
            call.wait_jobs()
            _raise_if_failed(state, call)
            boundaries = [call.take_boundary(m, end) for m in range(call.num_microbatch)]
            merged = _merged(state, call, boundaries, config, pieces)
            _apply_buffers(state, call)
            return merged


def forward(
    state: TrainingState,
    entered: Callable[[], contextlib.AbstractContextManager[object]],
    config: ResolvedConfig,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Forward whose outputs take part in autograd: ``backward`` on them runs the backward stages."""
    return adapting(state, config, "train", lambda chosen, made: _forward(state, entered, chosen, args, kwargs, made))


def _forward(
    state: TrainingState,
    entered: Callable[[], contextlib.AbstractContextManager[object]],
    config: ResolvedConfig,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: list[Call],
) -> Any:
    engine = state.prepare()
    pieces = split_inputs(args, kwargs, config.num_microbatch, config.split_input)
    inputs = _inputs(engine, pieces)
    call = _make_call(state, engine, config, inputs, [], _no_loss, keeps_graph=True, keeps_outputs=True)
    call.window, call.joined = None, False  # it joins one at the time of the backward
    call.advisor = OomAdvisor(state, config, "train", args, kwargs, None, None)
    made.append(call)
    with abandoned_on_error(call):
        _dispatch(state, call, config, "train")
        end = len(state.layers)
        call.wait_for(lambda: call.forward_done() and call.has_boundary(call.num_microbatch - 1, end), "the outputs")
        call.wait_jobs()
        _raise_if_failed(state, call)
        boundaries = [call.take_boundary(m, end) for m in range(call.num_microbatch)]
        packed = config.merge_output is False
        values = [unread_leaves(b, call.is_saved) if packed else _received_leaves(state, call, b) for b in boundaries]
        _apply_buffers(state, call)
    outputs = LaterBackward(state, entered, call, list(pieces), boundaries).attach(values)
    if packed:
        return pack(engine, boundaries, outputs, _rows(config, pieces))
    trees = [pytree.tree_unflatten(leaves, b.spec) for leaves, b in zip(outputs, boundaries, strict=True)]
    return _placed(_merge(trees, config, pieces), config)


def _inputs(engine: Engine, pieces: InputPieces) -> list[Boundary]:
    return [
        host_boundary(engine, piece, events=events)
        for piece, events in zip(pieces, pieces.transfer_events, strict=True)
    ]


def _merged(
    state: TrainingState, call: Call, boundaries: list[Boundary], config: ResolvedConfig, pieces: InputPieces
) -> Any:
    """The outputs as the caller wants them, outside any graph. Packed ones may still be on their way."""
    if config.merge_output is False:
        leaves = [unread_leaves(b, call.is_saved) for b in boundaries]
        return pack(call.engine, boundaries, leaves, _rows(config, pieces))
    trees = [pytree.tree_unflatten(_received_leaves(state, call, b), b.spec) for b in boundaries]
    return _placed(_merge(trees, config, pieces), config)


def _merge(trees: list[Any], config: ResolvedConfig, pieces: InputPieces) -> Any:
    merged = merge_outputs(trees, config.merge_output, rows=_rows(config, pieces))
    counted = any(kwargs.get("num_items_in_batch") is not None for _, kwargs in pieces)
    automatic = config.merge_output is None or config.merge_output is True
    return with_loss_of_batch(merged, trees) if counted and automatic else merged


def _rows(config: ResolvedConfig, pieces: InputPieces) -> list[int] | None:
    return pieces.row_counts if config.merges_unbatched else None


def _placed(tree: Any, config: ResolvedConfig) -> Any:
    """Merged outputs on the device that the configuration names."""
    if config.output_device.type == "cpu":
        return tree
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(config.output_device), tree)


def train(
    state: TrainingState,
    config: ResolvedConfig,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: Any,
    loss_fn: Callable[[Any, Any], Any],
    return_outputs: bool,
    step: CompactOptimizer | None,
) -> Any:
    """Forward, loss and backward of every microbatch; gives the summed losses, and the outputs if asked for."""

    def attempt(chosen: ResolvedConfig, made: list[Call]) -> Any:
        return _train(state, chosen, args, kwargs, label, loss_fn, return_outputs, step, made)

    if step is not None and config.on_oom == "adapt":
        raise ConfigError(
            'forward_backward(step=...) with on_oom="adapt": layers are updated before the call has ended, so that a '
            'failure cannot be rolled back. Use on_oom="raise", or call model.step(optimizer) after forward_backward.'
        )
    return adapting(state, config, "fused", attempt)


def _train(
    state: TrainingState,
    config: ResolvedConfig,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    label: Any,
    loss_fn: Callable[[Any, Any], Any],
    return_outputs: bool,
    step: CompactOptimizer | None,
    made: list[Call],
) -> Any:
    engine = state.prepare()
    pieces = split_inputs(args, kwargs, config.num_microbatch, config.split_input)
    count = len(pieces)
    labels = split_label(label, count, config.split_label, pieces.row_counts)
    inputs = _inputs(engine, pieces)
    events = [
        event
        for leaf in pytree.tree_leaves(label)
        if isinstance(leaf, RoundPipePackedData)
        for event in leaf.transfer_event
        if event is not None
    ]
    label_trees = [host_boundary(engine, piece, events=events) for piece in labels]
    call = _make_call(
        state, engine, config, inputs, label_trees, loss_fn, keeps_graph=True, keeps_outputs=return_outputs
    )
    call.advisor = OomAdvisor(state, config, "fused", args, kwargs, label, loss_fn)
    made.append(call)
    if step is not None:
        call.announced = announce(state, step)
    with abandoned_on_error(call):
        try:
            _dispatch(state, call, config, "fused")
        finally:
            if call.announced is not None:
                dispatched(state, call.announced, call)
        return _results(state, call, config, pieces, return_outputs)


def _results(state: TrainingState, call: Call, config: ResolvedConfig, pieces: Any, return_outputs: bool) -> Any:
    count = call.num_microbatch
    call.wait_for(lambda: len(call.losses) == count and call.forward_done(), "the losses")
    if config.on_oom == "adapt":  # nothing may reach the caller that would have to be taken back
        call.wait_jobs()
    _raise_if_failed(state, call)
    total = _sum_losses(state, call)
    outputs = None
    if return_outputs:
        outputs = _merged(state, call, [call.outputs.pop(m) for m in range(count)], config, pieces)
    # A layer that drew will draw again in its recompute, from a generator that the caller uses too.
    if call.drew:
        call.wait_jobs()
        _raise_if_failed(state, call)
    if call.wants_input_grads:
        _deliver_input_grads(state, call, pieces)
    _apply_buffers(state, call)
    return (total, outputs) if return_outputs else total


@contextlib.contextmanager
def abandoned_on_error(call: Call) -> Iterator[None]:
    """Whatever makes the caller leave, his own functions and Ctrl-C included, the call counts as failed."""
    try:
        yield
    except BaseException as error:
        call.abandon(error)
        # Its jobs stop at their next safe point. Until then a recompute may have the process-wide generator seeded, and
        # what the caller draws next would be lost. Ctrl-C and a stalled job cannot be waited for.
        if isinstance(error, Exception) and not isinstance(error, StallError):
            with contextlib.suppress(StallError):
                call.wait_jobs()
        raise


def _no_loss(output: Any, label: Any) -> Any:
    raise AssertionError("inference has no loss")


def _make_call(
    state: TrainingState,
    engine: Engine,
    config: ResolvedConfig,
    inputs: list[Boundary],
    labels: list[Boundary],
    loss_fn: Callable[[Any, Any], Any],
    *,
    keeps_graph: bool,
    keeps_outputs: bool,
) -> Call:
    call = Call(
        engine,
        state.layers,
        state.units_of,
        state.host_buffers,
        state.facts,
        state.loss_facts,
        inputs=inputs,
        labels=labels,
        loss_fn=loss_fn,
        grain=config.recompute_grain,
        preserve_rng=config.preserve_rng_state,
        keeps_graph=keeps_graph,
        keeps_outputs=keeps_outputs,
        window=state.window if keeps_graph else None,
        predecessor=state.unsettled_training_call(),
        probe=state.measurements.probe(inputs, labels, keeps_graph=keeps_graph, simulated=engine.simulated),
    )
    if keeps_graph and state.compact.measures:
        call.gradient_stats = GradientStats()
    return call


def _dispatch(state: TrainingState, call: Call, config: ResolvedConfig, run_type: str) -> None:
    plan: ModelExecutePlan | None = config.execute_plan
    if plan is None:
        plan = state.plans.plan(run_type, call.num_microbatch, config.recompute_grain)
    plan.check_valid(len(state.layers), run_type)
    if call.advisor is not None:
        call.advisor.plan = plan
    watch(state, call, run_type, plan)
    state.began(call)
    if call.window is not None:
        call.window.calls.append(call)
    call.dispatch(plan, run_type)


def _raise_if_failed(state: TrainingState, call: Call) -> None:
    if call.error is not None:
        state.raise_failures()


def _received(state: TrainingState, call: Call, value: HostTensor) -> torch.Tensor:
    """The tensor, over memory that is the record's own, once it has arrived."""
    try:
        value.wait()
    except RoundPipeError as error:
        call.lost(error)
        state.raise_failures()
    return value.host()


def _sum_losses(state: TrainingState, call: Call) -> Any:
    sums: list[torch.Tensor] = []
    several = False
    for m in range(call.num_microbatch):
        losses, several = call.losses[m]
        for i, loss in enumerate(losses):
            value = _received(state, call, loss).clone()
            if m == 0:
                sums.append(value)
            else:
                sums[i] = sums[i] + value
    call.losses.clear()
    return sums if several else sums[0]


def _received_leaves(state: TrainingState, call: Call, boundary: Boundary) -> list[Any]:
    return [_received(state, call, leaf) if isinstance(leaf, HostTensor) else leaf for leaf in boundary.leaves]


def _apply_buffers(state: TrainingState, call: Call) -> None:
    updates, call.buffer_updates = call.buffer_updates, []
    for update in updates:
        _received(state, call, update.value)
    with uninterrupted():
        for update in updates:
            call.buffer_undos.append(update.apply())


def _deliver_input_grads(state: TrainingState, call: Call, pieces: Any) -> None:
    """Runs the caller's own graph backward from the pieces of his inputs."""
    call.wait_for(call.has_input_gradients, "the gradients of the inputs")
    _raise_if_failed(state, call)
    tensors, grads = [], []
    for m, piece in enumerate(pieces):
        wanted = wanted_inputs(piece)
        for tensor, grad in zip(wanted, input_grads(state, call, m, wanted), strict=True):
            if grad is not None:
                tensors.append(tensor)
                grads.append(grad)
    if tensors:
        torch.autograd.backward(tensors, grads)


def wanted_inputs(piece: Any) -> list[torch.Tensor]:
    """The tensors of a microbatch's arguments that require grad, each once."""
    found = {id(t): t for t in pytree.tree_leaves(piece) if isinstance(t, torch.Tensor) and t.requires_grad}
    return list(found.values())


def input_grads(
    state: TrainingState, call: Call, microbatch: int, wanted: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients of ``wanted_inputs``, each on its tensor's device; they are known."""
    _, found = call.gradient(microbatch, 0, block=True)
    if found is None:
        return [None] * len(wanted)
    grads: list[torch.Tensor | None] = []
    for tensor, grad in zip(wanted, found, strict=True):
        value = None if grad is None else _received(state, call, grad)
        if grad is not None and value is not None:
            if handed_out.source(tensor, call.engine) is None:
                value = value.clone().to(tensor.device)
            else:  # the model that put the input out takes the gradient from where it is
                value = value.data
                handed_out.note(value, grad, call.engine)
        grads.append(value)
    return grads
