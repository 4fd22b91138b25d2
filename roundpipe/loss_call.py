"""The caller's loss function, called for one microbatch on its device."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from . import layer_call, loss_scope
from .boundary import HostTensor, LiveTree, Traffic
from .errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    from .call import Call
    from .engine import Worker
    from .job_probe import JobProbe


_USAGE = (
    "model.forward_backward((inputs,), label=labels, loss_fn=lambda output, label: nn.functional.cross_entropy("
    'output, label, reduction="sum") / len(inputs))'
)
_USAGE_OF_LOSS = (
    "model.forward_backward(input_kwargs=dict(input_ids=tokens, labels=tokens), loss_fn=lambda output, _: output.loss)"
)


def output_as_loss(output: Any, label: Any) -> Any:
    """The default: the model's output is the loss."""
    del label
    return output


def check_loss_fn(loss_fn: object) -> None:
    """Raises ConfigTypeError for what cannot be called with an output and a label."""
    if not callable(loss_fn):
        raise ConfigTypeError(f"forward_backward(loss_fn=...): got {type(loss_fn).__name__}, expected a callable")
    try:
        signature = inspect.signature(loss_fn, follow_wrapped=False)
    except (TypeError, ValueError):  # it tells nobody
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        if not _is_told_by(loss_fn):
            return
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise ConfigTypeError(
            f"forward_backward(loss_fn=...): got {name}{signature}, which cannot be called as loss_fn(output, label) "
            f"({error}); expected a function of a microbatch's output and its part of label= (None without one), such "
            "as lambda output, label: ... or lambda output, _: ..."
        ) from error


def _is_told_by(function: Any) -> bool:
    """Whether the signature that ``inspect`` gives is what a call takes. It is not where a decorator has set another
    one, nor of an object whose class has a static ``__call__``, which is taken for a method.
    """
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    called = (
        function if type(function) is types.FunctionType else inspect.getattr_static(type(function), "__call__", None)
    )
    return type(called) is types.FunctionType and not any(
        "__signature__" in getattr(f, "__dict__", ()) for f in (function, called)
    )


def call_loss(
    call: Call, worker: Worker, probe: JobProbe, microbatch: int, live: LiveTree, label: Any
) -> list[torch.Tensor]:
    """The losses of a microbatch; their values are on their way to the caller."""
    out = live.value()
    last = len(call.layers) - 1
    saved = probe.saved_bytes(worker, microbatch, last, live, more=True)
    facts, seed = call.loss_facts, call.layer_seed(microbatch, len(call.layers), False)

    def run() -> tuple[Any, bool]:
        with loss_scope.of_call(announced=call.announced is not None):
            return layer_call.call_seeded(worker, facts, seed, call.ambient, lambda: call.loss_fn(out, label))

    with worker.compute_lock, probe.loss(microbatch, last):
        hooks = layer_call.saved_tensors(facts, False, saved)
        try:
            value, _ = layer_call.call_hooked(facts, hooks, run, lambda: True)
        except torch.OutOfMemoryError:
            out = label = None  # the traceback's frames hold the closure, see call_layer
            raise
    if isinstance(value, (list, tuple)) and not value:
        raise ConfigError("loss_fn returned no loss in its list; expected a one-element tensor, or several in a list.")
    losses = list(value) if isinstance(value, (list, tuple)) else [value]
    for loss in losses:
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError(_no_loss(loss, out, label, is_default=call.loss_fn is output_as_loss))
    if not any(loss.requires_grad for loss in losses):
        raise ConfigError(
            "the loss does not depend on any parameter or input that requires grad, so there is nothing to train; "
            "check requires_grad of the parameters and that loss_fn uses the model's output without detach()."
        )
    if saved is not None:
        saved.note(losses)
    call.losses[microbatch] = (
        [HostTensor.stash(worker, loss, Traffic.ACTIVATIONS) for loss in losses],
        isinstance(value, (list, tuple)),
    )
    return losses


def _no_loss(found: Any, output: Any, label: Any, *, is_default: bool) -> str:
    """What to say of ``found``, which stands where a loss should. ``is_default``: there is no ``loss_fn``."""
    got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
    by_key = isinstance(output, Mapping) and "loss" in output
    has_loss = by_key or (not isinstance(output, torch.Tensor) and hasattr(output, "loss"))
    loss = (output["loss"] if by_key else output.loss) if has_loss else None
    labels = f"The model's output has a loss of None, since it got no labels: {_USAGE_OF_LOSS}"
    if not is_default:
        text = f"loss_fn returned {got}; expected a one-element tensor, or several of them in a list."
        return f"{text} {labels}" if has_loss and loss is None and found is None else text
    if has_loss:
        field = "output.loss" if hasattr(output, "loss") else "output['loss']"
        remedy = labels if loss is None else f"The output holds a loss: pass loss_fn=lambda output, _: {field}"
    elif label is None:
        remedy = f"Pass label and loss_fn: {_USAGE}"
    else:
        remedy = f"label was given, but not the loss_fn that takes it: {_USAGE}"
    return (
        "forward_backward got no loss_fn, so the model's output must be its loss: expected a one-element tensor, or "
        f"several of them in a list, got {got}. {remedy}"
    )
