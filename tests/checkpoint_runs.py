"""Training that can be stopped, saved and resumed, and all bits of what it trains."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import roundpipe
from roundpipe import GradScaler, OptimizerCtx, RoundPipe, RoundPipeRunConfig, optim

from .plans import one_layer_stages

WIDTH = 8
COMPACT: dict[str, Any] = {
    "split": dict(master="split"),
    "float32": dict(master="float32"),
    "bfloat16 moments": dict(state_dtype="bfloat16", seed=3),
    "int8 moments": dict(state_dtype="int8"),
}


class Block(nn.Module):
    """With dropout, a buffer that its forward changes, and a weight in an order of memory that is not row-major."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.across = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x).float()).to(x.dtype)
        return x + self.drop(torch.tanh(y) @ self.across) * self.gain


def network(dtype: torch.dtype, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4)).to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
    return model


class Run:
    """A model with its optimizer, loss scale and schedule.

    ``how``: a key of COMPACT, or "adamw" (torch's, on a float32 copy), "sgd" (with momentum, on a copy of the weights'
    own dtype) or "lists" (an optimizer with lists and numbers in its state). ``mode``: "exact", "async", "mixed" or
    "announced".
    """

    def __init__(
        self, how: str, mode: str, dtype: torch.dtype = torch.bfloat16, scaled: bool = False, seed: int = 0, **rest: Any
    ) -> None:
        self.how, self.mode = how, mode
        self.dtype = dtype
        optim_dtype = torch.float32 if how == "adamw" else None
        self.model = RoundPipe(network(dtype, seed), optim_dtype=optim_dtype, **rest)
        if how in COMPACT:
            options = dict(max_grad_norm=1.0) if mode != "announced" else {}
            self.optimizer: torch.optim.Optimizer = optim.AdamW(
                self.model, lr=1e-2, groups=[{"params": "*bias", "weight_decay": 0.0}], **options, **COMPACT[how]
            )
        else:
            with OptimizerCtx():
                make: Any = {
                    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
                    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
                    "lists": Lists,
                }[how]
                self.optimizer = make(self.model.parameters())
        self.scaler = GradScaler(init_scale=8.0, growth_interval=2) if scaled else None
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.losses: list[float] = []

    def update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        self.scheduler.step()  # here, for the optimizer reads its rates when the step runs

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            number = len(self.losses)
            # Inputs from the process's generator: a resumed run must find it as it was.
            x, y = torch.randn(6, WIDTH).to(self.dtype), torch.randn(6, 4)
            is_async = self.mode == "async" or (self.mode == "mixed" and number % 2 == 0)

            def loss_fn(out: Any, label: Any, number: int = number) -> Any:
                loss = nn.functional.mse_loss(out.float(), label, reduction="sum") / 24
                if self.scaler is None:
                    return loss
                return [self.scaler.scale(loss * (math.inf if number == 4 else 1.0)), loss.detach()]

            arguments: dict[str, Any] = dict(step=self.optimizer) if self.mode == "announced" else {}
            config = RoundPipeRunConfig(num_microbatch=2, execute_plan=one_layer_stages(self.model.num_layers))
            loss = self.model.forward_backward((x,), label=y, loss_fn=loss_fn, run_config=config, **arguments)
            self.losses.append(float(loss[1] if self.scaler is not None else loss))
            if self.how in COMPACT and not arguments:
                self.model.step(self.optimizer, is_async, **({} if self.scaler is None else dict(scaler=self.scaler)))
            elif not arguments:
                self.model.step(self.update, is_async)
            if self.scaler is not None:
                self.scaler.update(is_async=is_async)
            if self.how in COMPACT:  # a compact step has read them at its call
                with warnings.catch_warnings():  # the step has been dispatched, but may not have begun
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
                    self.scheduler.step()
        return self

    def save(self, directory: Path, **options: Any) -> roundpipe.checkpoint.SaveHandle:
        extra = dict(scheduler=self.scheduler, metadata={"losses": self.losses})
        return roundpipe.save(self.model, self.optimizer, self.scaler, directory, **{**extra, **options})

    def load(self, directory: Path) -> Run:
        metadata = roundpipe.load(self.model, self.optimizer, self.scaler, directory, scheduler=self.scheduler)
        self.losses = metadata["losses"]
        return self

    def bits(self) -> dict[str, Any]:
        """Everything that training has changed, copied; waits for it, and publishes."""
        found: dict[str, Any] = {f"weight {k}": v.clone() for k, v in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{key} {number}": copy.deepcopy(value) for key, value in state.items()}
        if self.how not in COMPACT:
            found |= {f"copy {k}": p.detach().clone() for k, p in self.model.optim_named_parameters()}
        found["losses"] = list(self.losses)
        found["rate"] = [group["lr"] for group in self.optimizer.param_groups]
        if self.scaler is not None:
            found["scaler"] = [self.scaler.state_dict(), self.scaler.views()]
        found["random"] = torch.get_rng_state()
        return found


class Lists(torch.optim.Optimizer):
    """Keeps tensors in lists and dictionaries, beside numbers and None, as some optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, dict(lr=1e-2))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(past=[torch.zeros_like(p), torch.zeros_like(p)], count=0, nothing=None)
                    state["more"] = {"square": torch.zeros_like(p)}
                state["count"] += 1
                state["past"][state["count"] % 2].copy_(p.grad)
                state["more"]["square"].addcmul_(p.grad, p.grad)
                direction = state["past"][0] + state["past"][1]
                p.addcdiv_(direction, state["more"]["square"].sqrt() + 1e-3, value=-group["lr"])


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    different = [k for k in want if not _same(got[k], want[k])]
    assert different == []


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return bool(a == b)
