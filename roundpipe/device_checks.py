"""What works on the engine's devices: each check runs the thing itself and compares with plain PyTorch on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

from .engine import Engine
from .model import RoundPipe
from .models.linear_cross_entropy import linear_cross_entropy
from .optim import AdamW
from .optimizer_context import OptimizerCtx
from .plan import ModelExecutePlan
from .run_config import RoundPipeRunConfig

__all__ = ["WORKS", "check_devices"]

WORKS = "works"
_WIDTH, _ROWS = 32, 8


def check_devices(engine: Engine) -> dict[str, str]:
    """:data:`WORKS`, or what went wrong, for each check. Every device takes part."""
    checks: dict[str, Callable[[Engine], str | None]] = {
        "training, float32": lambda e: _train(e, torch.float32, 1e-4),
        "training, bfloat16": lambda e: _train(e, torch.bfloat16, 5e-2),
        "training, float16": lambda e: _train(e, torch.float16, 2e-2),
        "optimizer on parameters": _step_of_torch,
        "compact optimizer": _step_in_place,
        "loss in chunks": _chunked_loss,
    }
    return {name: _outcome(check, engine) for name, check in checks.items()}


def _outcome(check: Callable[[Engine], str | None], engine: Engine) -> str:
    try:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always", RuntimeWarning)
            problem = check(engine)
        remarks = [str(w.message) for w in noted if issubclass(w.category, RuntimeWarning)]
        return problem or (f"{WORKS}; {remarks[0]}" if remarks else WORKS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _layers(count: int, dtype: torch.dtype) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*made).to(dtype)


def _wrapped(engine: Engine, dtype: torch.dtype) -> tuple[RoundPipe, nn.Sequential]:
    """A layer for each device at least, each a stage of its own; and the same model to compare with."""
    count = engine.device_count + 1
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(count - 1)]
    plan.bwd_plan = [range(i, i + 1) for i in reversed(range(count))]
    config = RoundPipeRunConfig(num_microbatch=2, execute_plan=plan)
    return RoundPipe(_layers(count, dtype), model_run_config=config), _layers(count, dtype)


def _loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.float() - label.float()).square().sum() / (_ROWS * _WIDTH)


def _run(engine: Engine, dtype: torch.dtype) -> tuple[RoundPipe, nn.Sequential, float, float]:
    """A wrapped and a plain model after one backward each, and their losses."""
    model, plain = _wrapped(engine, dtype)
    inputs = torch.linspace(-1, 1, _ROWS * _WIDTH).view(_ROWS, _WIDTH).to(dtype)
    label = inputs.flip(0)
    loss = model.forward_backward((inputs,), label=label, loss_fn=_loss)
    model.synchronize()
    wanted = _loss(plain(inputs), label)
    wanted.backward()
    return model, plain, float(loss), float(wanted.detach())


def _train(engine: Engine, dtype: torch.dtype, tolerance: float) -> str | None:
    model, plain, loss, wanted = _run(engine, dtype)
    if not abs(loss - wanted) <= tolerance * abs(wanted):
        return f"the loss is {loss}, on the CPU {wanted}"
    for (name, ours), theirs in zip(model.model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        difference = (ours.grad.float() - theirs.grad.float()).norm() / theirs.grad.float().norm()
        if not float(difference) <= tolerance:
            return f"the gradient of {name} is off by {float(difference):.1e} of its norm"
    return None


def _step_of_torch(engine: Engine) -> str | None:
    model, plain = _wrapped(engine, torch.float32)
    with OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return _compare_steps(model, plain, optimizer.step, torch.optim.SGD(plain.parameters(), lr=0.1))


def _step_in_place(engine: Engine) -> str | None:
    model, plain = _wrapped(engine, torch.float32)
    return _compare_steps(model, plain, AdamW(model, lr=0.01), torch.optim.AdamW(plain.parameters(), lr=0.01))


def _compare_steps(
    model: RoundPipe, plain: nn.Sequential, step: object, reference: torch.optim.Optimizer
) -> str | None:
    inputs = torch.linspace(-1, 1, _ROWS * _WIDTH).view(_ROWS, _WIDTH)
    label = inputs.flip(0)
    model.forward_backward((inputs,), label=label, loss_fn=_loss)
    model.step(step, is_async=False)  # type: ignore[arg-type]
    model.synchronize()
    _loss(plain(inputs), label).backward()
    reference.step()
    for (name, ours), theirs in zip(model.model.named_parameters(), plain.parameters(), strict=True):
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            return f"{name} is off by {float((ours - theirs).detach().abs().max()):.1e} after a step"
    return None


def _chunked_loss(engine: Engine) -> str | None:
    """On each device. A GPU's compiler is used here for the first time; without one the loss runs eagerly."""
    hidden, weight = torch.linspace(-1, 1, 64 * 16).view(64, 16), torch.linspace(-2, 2, 40 * 16).view(40, 16)
    targets = torch.arange(64) % 40
    wanted = nn.functional.cross_entropy(hidden @ weight.t(), targets)
    for worker in engine.workers:
        at = worker.device
        loss = linear_cross_entropy(hidden.to(at).requires_grad_(), weight.to(at), targets.to(at), chunk_tokens=16)
        loss.backward()
        if not torch.allclose(loss.detach().cpu(), wanted, rtol=1e-3):
            return f"{worker.name}: the loss is {float(loss.detach())}, on the CPU {float(wanted)}"
    return None
