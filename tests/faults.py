"""Layers and functions that raise, hang, sleep or draw at a chosen moment, for tests of failures."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch import nn

from roundpipe import ModelExecutePlan, doing_recompute


class Trap:
    """Counts the visits of each kind ("forward", "recompute", "backward") since it was armed; acts on one of them.

    Visits of a kind come in the order of the microbatches, so the n-th one is microbatch n. Shared by a layer and its
    device copies, because attributes are. With ``hangs`` the visit ends (or raises) only after ``release``: what must
    come before that is then no matter of time.
    """

    PATIENCE_S = 100.0  # then a hanging visit ends in any case, so that a test that fails does not hang

    def __init__(self) -> None:
        self._lock = threading.Lock()  # covers the counts: a module may be visited by several workers
        self.released = threading.Event()
        self.hanging = False
        self.disarm()

    def arm(
        self,
        kind: str,
        microbatch: int,
        error: BaseException | None = None,
        sleep_s: float = 0.0,
        hangs: bool = False,
    ) -> None:
        self.disarm()
        self.kind, self.microbatch, self.error, self.sleep_s = kind, microbatch, error, sleep_s
        if hangs:
            self.released.clear()

    def disarm(self) -> None:
        self.release()
        self.kind, self.microbatch, self.error, self.sleep_s = "", 0, None, 0.0
        self.counts: dict[str, int] = {}
        self.sprung = threading.Event()
        self.released = threading.Event()
        self.released.set()

    def release(self) -> None:
        self.released.set()

    def visit(self, kind: str) -> None:
        with self._lock:
            count = self.counts.get(kind, 0)
            self.counts[kind] = count + 1
        if kind == self.kind and count == self.microbatch:
            error, released = self.error, self.released
            self.sprung.set()
            if self.sleep_s:
                time.sleep(self.sleep_s)
            self.hanging = not released.is_set()
            released.wait(self.PATIENCE_S)
            self.hanging = False
            if error is not None:
                raise error


class _VisitInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trap: Trap) -> torch.Tensor:  # type: ignore[override]
        ctx.trap = trap
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.trap.visit("backward")
        return grad, None


class Trapped(nn.Module):
    """A residual block with dropout and a trap at each of its moments; with statistics that a forward updates."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)  # a bias before the norm would get a gradient of 0
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(dropout)
        self.trap = Trap()

    def __deepcopy__(self, memo: Any) -> Trapped:
        twin = Trapped(self.linear.in_features, self.drop.p)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trap.visit("recompute" if doing_recompute() else "forward")
        return _VisitInBackward.apply(x + self.drop(torch.tanh(self.norm(self.linear(x)))), self.trap)


WIDTH = 6


def trapped_model(layers: int = 5, seed: int = 0, dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Trapped(WIDTH, dropout) for _ in range(layers)))


def plan_of(forward: list[tuple[int, int]], backward: list[tuple[int, int]]) -> ModelExecutePlan:
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(a, b) for a, b in forward]
    plan.bwd_plan = [range(a, b) for a, b in backward]
    return plan


def five_layer_plan() -> ModelExecutePlan:
    """Forward stages 0 and 1-2, fused 3-4, backward 1-2 and 0."""
    return plan_of([(0, 1), (1, 3)], [(3, 5), (1, 3), (0, 1)])
