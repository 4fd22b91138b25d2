"""The caller's loss function, called for one microbatch on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import layer_call, loss_scope
from .boundary import HostTensor, LiveTree, Traffic
from .errors import ConfigError

if TYPE_CHECKING:
    from .call import Call
    from .engine import Worker
    from .job_probe import JobProbe


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
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"loss_fn returned {got}; expected a one-element tensor, or several of them in a list.")
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
