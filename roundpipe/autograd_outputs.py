"""The outputs of a forward as part of the caller's autograd graph, and the backward stages behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .boundary import Boundary, HostTensor, Traffic
from .caller_tensors import handed_out
from .interrupts import uninterrupted

if TYPE_CHECKING:
    from .call import Call
    from .training_state import TrainingState


class LaterBackward:
    """Waits for the caller's ``backward`` and turns it into the backward stages of the call.

    One graph node stands for all microbatches: its outputs are their outputs that require grad, its inputs are their
    inputs that require grad, and an anchor, so that it is part of a graph even where no input requires grad.
    """

    def __init__(
        self,
        state: TrainingState,
        entered: Callable[[], contextlib.AbstractContextManager[object]],
        call: Call,
        pieces: list[Any],
        boundaries: list[Boundary],
    ) -> None:
        from .runs import wanted_inputs

        self.state = state
        self._entered = entered
        self.call = call
        self.inputs = [wanted_inputs(piece) for piece in pieces]
        # For each microbatch the leaves that require grad, by their host tensor: each counts once.
        self._wanted = [
            list(
                dict.fromkeys(
                    id(leaf)
                    for leaf, wanted in zip(b.leaves, b.requires_grad, strict=True)
                    if wanted and isinstance(leaf, HostTensor)
                )
            )
            for b in boundaries
        ]
        self._boundaries = boundaries
        self._generation = state.generation
        self._anchor = torch.zeros((), requires_grad=True)
        self._anchor_node: Any = self._anchor.expand_as(self._anchor).grad_fn.next_functions[0][0]  # type: ignore

    def attach(self, values: list[list[Any]]) -> list[list[Any]]:
        """``values``: the leaves of each microbatch, on the host. The same, those that require grad in the graph."""
        firsts: list[torch.Tensor] = []
        for leaves, boundary, wanted in zip(values, self._boundaries, self._wanted, strict=True):
            place = {id(host): leaf for host, leaf in zip(boundary.leaves, leaves, strict=True)}
            # Not views of a record: the caller could not write such an output in place.
            firsts += [t.clone() if (t := place[key])._is_view() else t for key in wanted]
        if not firsts:
            return values
        inputs = [tensor for of_piece in self.inputs for tensor in of_piece]
        made = iter(_Outputs.apply(self, firsts, self._anchor, *inputs))
        result = []
        for leaves, boundary, wanted in zip(values, self._boundaries, self._wanted, strict=True):
            attached = {key: next(made) for key in wanted}
            result.append(
                [
                    attached.get(id(host), leaf) if needs else leaf
                    for host, leaf, needs in zip(boundary.leaves, leaves, boundary.requires_grad, strict=True)
                ]
            )
        return result

    def backward(self, grads: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
        """Runs the backward stages; waits for them when the caller wants input gradients."""
        from .runs import abandoned_on_error

        if not self.call.awaits_backward:
            raise RuntimeError(
                "backward was called a second time on an output of a RoundPipe model, whose saved activations are gone "
                "after the first; run the forward again (retain_graph does not keep them)."
            )
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True cannot go through a RoundPipe model: its backward runs on the devices and leaves no "
                "graph of its own. Second derivatives need a plain module."
            )
        if not torch._C._will_engine_execute_node(self._anchor_node):
            raise RuntimeError(
                "torch.autograd.grad and backward(inputs=...) cannot go through a RoundPipe model: its backward always "
                "brings the gradients of all its parameters. Call loss.backward() and read .grad of the inputs."
            )
        with self._entered():
            state, call = self.state, self.call
            state.raise_failures()
            if state.generation != self._generation:
                raise RuntimeError(
                    "the weights changed between a forward and its backward (a step was published, or weights were "
                    "edited); run backward before the step that follows, as in plain PyTorch."
                )
            arrived = iter(grads)
            down = []
            for wanted in self._wanted:
                found = [next(arrived) for _ in wanted]
                host = [None if g is None else self._host_tensor(g) for g in found]
                down.append(host if any(g is not None for g in host) else None)
            with abandoned_on_error(call):
                return self._run(down)

    def _host_tensor(self, gradient: torch.Tensor) -> HostTensor:
        source = handed_out.source(gradient, self.call.engine)
        return HostTensor.from_host(self.call.engine, gradient, Traffic.ACTIVATIONS) if source is None else source

    def _run(self, grads: list[list[HostTensor | None] | None]) -> list[torch.Tensor | None]:
        from .runs import input_grads

        state, call = self.state, self.call
        predecessor = state.unsettled_training_call()
        with uninterrupted():
            state.window.calls.append(call)
            state.began(call)
        call.dispatch_backward(state.window, predecessor, grads)
        if call.drew:  # layers will draw again, from a generator that the caller uses too
            call.wait_jobs()
        elif call.wants_input_grads:
            call.wait_for(call.has_input_gradients, "the gradients of the inputs")
        if call.error is not None and (call.drew or call.wants_input_grads):
            state.raise_failures()
        result: list[torch.Tensor | None] = []
        for microbatch, inputs in enumerate(self.inputs):
            result += input_grads(state, call, microbatch, inputs) if inputs else []
        return result


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, later: LaterBackward, outputs: list[torch.Tensor], anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.later = later
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        return None, None, None, *ctx.later.backward(grads)
