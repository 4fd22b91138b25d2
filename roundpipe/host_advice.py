"""When host memory runs out: who holds how much, and what each remedy saves.

Savings are differences of what this process's models hold now; each is exact in the bytes that we allocate ourselves.
The states of torch's own optimizers count as the two moments of Adam in float32.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from . import _ops
from .errors import HostOutOfMemory
from .gradient_pool import pool_bytes

if TYPE_CHECKING:
    from .training_state import TrainingState

__all__ = ["Remedy", "explain", "remedies"]

Remedy = tuple[str, int]
"""What to write, and how many bytes it saves."""

_explaining = threading.local()


def explain(error: HostOutOfMemory, more: Iterable[Remedy] = ()) -> HostOutOfMemory:
    """The same failure with holders and remedies in its text and attributes; ``more`` come first.

    Never fails: what cannot be found out is left out.
    """
    found: list[Remedy] = list(more)
    holders: dict[str, int] = dict(error.holders)
    models: dict[str, int] = {}
    available = limit = None
    with _once() as first:
        if first:
            with contextlib.suppress(Exception):
                total, _, group, _, available, *_ = _ops.host_limits()
                limit = group or total
            with contextlib.suppress(Exception):
                from .memory import host_memory, model_memory  # not at the top: they need what needs the operators

                if not holders:
                    models = model_memory()
                    holders = host_memory().by_purpose()
            with contextlib.suppress(Exception):
                from .training_state import living_states

                found += remedies(living_states())
    known = {what for what, _ in error.remedies}
    remaining = [r for r in found if r[1] > 0 and r[0] not in known]
    text = str(error)
    if holders and not error.holders:
        text += "\nHost memory now: " + ", ".join(f"{k} {format_bytes(v)}" for k, v in holders.items() if v) + "."
    if models:
        text += "\nModels that live: " + ", ".join(f"{k} {format_bytes(v)}" for k, v in models.items()) + "."
    if remaining:
        text += (
            "\nWhat would need less: "
            + "; ".join(f"{what} saves {format_bytes(size)}" for what, size in remaining)
            + "."
        )
    made = HostOutOfMemory(
        text,
        asked_bytes=error.asked_bytes,
        device=error.device,
        phase=error.phase,
        stage=error.stage,
        layer=error.layer,
        microbatch=error.microbatch,
        available_bytes=available if error.available_bytes is None else error.available_bytes,
        limit_bytes=limit if error.limit_bytes is None else error.limit_bytes,
        holders=holders,
        remedies=(*remaining, *error.remedies),
    )
    made.__cause__ = error.__cause__
    return made


@contextlib.contextmanager
def _once() -> Iterator[bool]:
    """Whether this is not an explanation inside an explanation, whose own questions may fail in the same way."""
    first = not getattr(_explaining, "now", False)
    _explaining.now = True
    try:
        yield first
    finally:
        if first:
            _explaining.now = False


def remedies(states: Iterable[TrainingState]) -> list[Remedy]:
    """What the living models could do without, the simplest first; only what saves something."""
    states = list(states)
    found = [
        ("half the rows a call, and two forward_backward calls a step,", _fewer_rows(states)),
        ("one forward_backward call a step", _one_image(states)),
        ("exact steps (is_async=False)", sum(_shadows(s) for s in states)),
        ("announced steps (forward_backward(..., step=optimizer))", sum(_passing(s) for s in states)),
        ("a compact optimizer (roundpipe.optim.AdamW(model, ...))", sum(_compact(s) for s in states)),
        ('state_dtype="int8" of the compact optimizer', sum(_coded(s) for s in states)),
        ('pin_model="off" for frozen weights that lie in files', sum(_mapped(s) for s in states)),
    ]
    return [remedy for remedy in found if remedy[1] > 0]


def _fewer_rows(states: list[TrainingState]) -> int:
    """Half of what was kept for backward at the peak, less a second gradient image where there is none yet."""
    engines = {id(s.engine): s.engine for s in states if s.engine is not None and not s.engine.closed}
    kept = sum(_ops.engine_live(engine.handle)[2] for engine in engines.values())
    second = sum(unit.gradient_bytes for s in states for unit in s.units if unit.host_gradient_bytes)
    return kept // 2 - (second if _one_image(states) == 0 else 0)


def _one_image(states: list[TrainingState]) -> int:
    """The second gradient images, that accumulation over several calls takes."""
    return sum(max(0, unit.host_gradient_bytes - unit.gradient_bytes) for s in states for unit in s.units)


def _shadows(state: TrainingState) -> int:
    return 0 if state.compact.memory is None else state.compact.memory.shadow_bytes


def _passing(state: TrainingState) -> int:
    """Gradient images, less the pool through which gradients pass that announced steps take; where nothing measures
    all gradients together, and one call precedes a step."""
    memory, engine = state.compact.memory, state.engine
    if memory is None or memory.measures or engine is None:
        return 0
    passing = [
        u.gradient_bytes for u in state.units if len(u.layers) == 1 and u.host_gradient_bytes == u.gradient_bytes
    ]
    return sum(passing) - max(0, pool_bytes(passing, engine.device_count) - state.gradient_pool.host_bytes)


def _compact(state: TrainingState) -> int:
    """An optimizer of torch's kind holds its own copy and gradient of each weight; a compact one a master beside it."""
    if not state.optimizer:
        return 0
    saved = 0
    for unit in state.units:
        for parameter in unit.trainable_parameters:
            own = state.optimizer.get(parameter)
            if own is None:
                continue
            master = {torch.bfloat16: 2, torch.float16: 4}.get(parameter.dtype, 0)
            saved += own.numel() * (2 * own.element_size() - master)
    return saved


def _coded(state: TrainingState) -> int:
    """Moments as eight-bit codes with a float32 scale for every 256 of them."""
    memory = state.compact.memory
    if memory is None or memory.coded:
        return 0
    moments = [moment for slot in memory.slots.values() for moment in slot.moments]
    return sum(moment.nbytes - moment.numel() - 4 * -(-moment.numel() // 256) for moment in moments)


def _mapped(state: TrainingState) -> int:
    """Frozen weights that were mapped from files and copied: in place they would cost nothing."""
    return 0 if state.placement.mode == "off" else state.placement.needs.frozen_mapped_bytes


def format_bytes(size_bytes: int) -> str:
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:.2f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
