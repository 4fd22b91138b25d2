"""Host memory that runs out or cannot be locked: what is said, what each remedy saves, and what still works."""

from __future__ import annotations

import copy
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines
from roundpipe.errors import HostOutOfMemory, RoundPipeError
from roundpipe.host_advice import remedies

from .at_rest import at_rest, fresh_engine
from .plans import one_layer_stages
from .test_pin_model import (  # noqa: F401 (a fixture)
    PAGEABLE,
    PINNED,
    REGISTERED,
    REGISTRATIONS,
    nothing_stays_claimed,
)

pytestmark = pytest.mark.usefixtures("memory_is_checked")

WIDE = 256
ONE = WIDE * WIDE * 4  # bytes of one weight


def linears(count: int = 4, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDE, WIDE, bias=False) for _ in range(count)]).to(dtype)


def call(model: RoundPipe, rows: int = 8, step: Any = None, **config: Any) -> None:
    dtype = next(model.model.parameters()).dtype
    model.forward_backward(
        (torch.randn(rows, WIDE, dtype=dtype),),
        loss_fn=lambda out, _: out.square().mean(),
        run_config=RoundPipeRunConfig(num_microbatch=2, **config),
        step=step,
    )
    model.synchronize()


# -- registrations ---------------------------------------------------------------------------------------------------
class Many(nn.Module):
    """Thousands of small weights, some empty, some slices of one buffer, and one that is worth locking."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        buffer = torch.randn(count * 8)
        small = [torch.randn(1 + i % 30) for i in range(count)]
        sliced = [buffer[8 * i : 8 * i + 5] for i in range(count)]
        self.small = nn.ParameterList([*small, *sliced, torch.empty(0), torch.empty(3, 0)])
        self.large = nn.Parameter(torch.randn(2 * ONE // 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.stack([p.sum() for p in self.small]).sum()
        return x * (total + self.large.sum()).tanh()


def test_thousands_of_small_weights_take_few_registrations(caplog: pytest.LogCaptureFixture) -> None:
    roundpipe.use_devices("host:1")
    outputs = []
    x = torch.randn(4, 3)
    for pin_model in ("alloc", "register", "off"):
        layers = nn.Sequential(Many(550, 1), Many(550, 2))
        with caplog.at_level(logging.INFO, logger="roundpipe"):
            model = RoundPipe(layers, pin_model=pin_model)
        if pin_model == "register":
            stats = _ops.host_claim_stats(model._state.placement.claim)
            assert 1 <= stats[REGISTRATIONS] <= 4
            assert stats[REGISTERED] >= 2 * (2 * ONE - 4096) and stats[PAGEABLE] > 0
        model.forward_backward((x,), loss_fn=lambda out, _: out.sum())
        model.synchronize()
        gradients = [p.grad.clone() for p in layers.parameters() if p.numel() and p.grad is not None]
        with torch.no_grad():
            outputs.append([model(x), *gradients])
        del model
    assert len(outputs[0]) == 1 + 2 * 1101
    for other in outputs[1:]:
        assert all(map(torch.equal, outputs[0], other))


def test_a_driver_that_takes_no_more_registrations_leaves_the_rest_to_bounce_buffers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    roundpipe.use_devices("host:1")
    handle = engines.current().handle
    count, step = 1200, WIDE * WIDE + 4096  # floats from one to the next: a gap of four pages
    layer = nn.Module()
    whole = torch.randn(count * step)
    layer.weights = nn.ParameterList([whole[i * step : i * step + WIDE * WIDE] for i in range(count)])
    layer.requires_grad_(False)
    layer.forward = lambda x: x + torch.stack([w[7] for w in layer.weights]).sum()  # type: ignore[assignment]
    before = _registered_ranges()
    _ops.engine_inject(handle, "limit_registrations", before + 1030)
    try:
        with caplog.at_level(logging.INFO, logger="roundpipe"):
            model = RoundPipe(nn.Sequential(layer), pin_model="register")
        stats = _ops.host_claim_stats(model._state.placement.claim)
        assert 1024 <= stats[REGISTRATIONS] <= 1030
        assert stats[PAGEABLE] >= (count - 1030) * (ONE - 2 * 4096)
        assert "stay pageable" in caplog.text
        _ops.engine_inject(handle, "limit_registrations", -1)  # the region and the bounce buffers are others' concern
        with torch.no_grad():
            out = model(torch.zeros(2, 1))
        assert torch.equal(out, torch.stack([w[7] for w in layer.weights]).sum().expand(2, 1))
        assert _ops.engine_bounced_bytes(handle, 0) >= stats[PAGEABLE]
    finally:
        _ops.engine_inject(handle, "limit_registrations", -1)


def _registered_ranges() -> int:
    """How many ranges the arenas have locked: the limit below which the next registration is refused."""
    handle = engines.current().handle
    memory = torch.empty(ONE)
    low, high = 0, 4096
    while low < high:
        middle = (low + high) // 2
        _ops.engine_inject(handle, "limit_registrations", middle)
        try:
            _ops.host_claim_drop(_ops.host_claim(handle, [memory], True))
            high = middle
        except HostOutOfMemory:
            low = middle + 1
    _ops.engine_inject(handle, "limit_registrations", -1)
    return low - 1


def test_weights_that_somebody_pinned_are_left_alone() -> None:
    roundpipe.use_devices("host:1")
    engines.current()
    at_rest()
    layers = linears(2)
    mine = _ops.host_empty([2 * WIDE * WIDE], torch.float32).normal_()
    for i, layer in enumerate(layers):
        layer.weight.data = mine[i * WIDE * WIDE : (i + 1) * WIDE * WIDE].view(WIDE, WIDE)  # type: ignore[union-attr]
    locked = _ops.host_stats()[1]
    model = RoundPipe(layers, pin_model="register")
    stats = _ops.host_claim_stats(model._state.placement.claim)
    assert stats[PINNED] == 2 * ONE and stats[REGISTERED] == stats[PAGEABLE] == 0
    _ops.engine_reset_bytes(engines.current().handle)
    call(model)
    assert _ops.engine_bounced_bytes(engines.current().handle, 0) == 0
    del model
    at_rest()
    assert _ops.host_stats()[1] >= locked and torch.isfinite(mine).all()


def test_what_was_locked_in_place_is_unlocked_at_exit() -> None:
    code = """
import atexit
atexit.register(lambda: print(torch.ops.roundpipe.host_claim_stats(0)))  # runs after what is registered later
import torch, roundpipe
from torch import nn
roundpipe.use_devices("host:2")
models = [roundpipe.RoundPipe(nn.Linear(512, 512), pin_model=mode) for mode in ("register", "off")]
for model in models:
    model.forward_backward((torch.randn(4, 512),), loss_fn=lambda out, _: out.mean())
print(torch.ops.roundpipe.host_claim_stats(0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    during, after = map(eval, done.stdout.splitlines())
    assert during[REGISTERED] > 2**20 - 8192 and during[REGISTRATIONS] >= 1
    assert after == [0, 0, 0, 0, 0]


# -- before anything is taken ----------------------------------------------------------------------------------------
def scarce(monkeypatch: pytest.MonkeyPatch, room: int, lockable: int = 1 << 62) -> None:
    monkeypatch.setattr(_ops, "host_limits", lambda: [1 << 40, room, 0, 0, room, lockable, 8 << 20])


def in_one_storage(count: int = 4) -> nn.Sequential:
    """Copying these takes a second copy of all at the peak: their storage goes with the last of them."""
    layers = linears(count)
    whole = torch.randn(count * WIDE * WIDE)
    for i, layer in enumerate(layers):
        layer.weight.data = whole[i * WIDE * WIDE : (i + 1) * WIDE * WIDE].view(WIDE, WIDE)  # type: ignore[union-attr]
    return layers


def test_wrapping_fails_before_anything_moves_and_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:1")
    engines.current()
    layers = in_one_storage()
    places = [p.data_ptr() for p in layers.parameters()]
    used = _ops.host_stats()[2]
    with monkeypatch.context() as patched:
        scarce(patched, 3 * ONE)
        with pytest.raises(HostOutOfMemory) as caught:
            RoundPipe(layers, pin_model="alloc", name="mine")
        error = caught.value
        assert (error.asked_bytes, error.available_bytes, error.limit_bytes) == (4 * ONE, 3 * ONE, 1 << 40)
        assert error.remedies[:2] == (('pin_model="register"', 4 * ONE), ('pin_model="off"', 4 * ONE))
        assert "process" in error.holders and "weights" in error.holders
        text = str(error)
        for part in ("mine", str(4 * ONE), "1.00 MiB", "no cgroup limit", 'pin_model="register" saves 1.00 MiB'):
            assert part in text, (part, text)
        assert isinstance(error, MemoryError) and "DefaultCPUAllocator: can't allocate memory" in text
        again = pickle.loads(pickle.dumps(error))
        assert again.remedies == error.remedies and copy.copy(error).holders == error.holders
        assert places == [p.data_ptr() for p in layers.parameters()] and _ops.host_stats()[2] == used
        patched.setenv("ROUNDPIPE_SKIP_MEMORY_CHECK", "1")  # memory that grows as it is used
        assert RoundPipe(copy.deepcopy(layers), pin_model="auto")._state.placement.mode == "alloc"
        patched.delenv("ROUNDPIPE_SKIP_MEMORY_CHECK")
        call(RoundPipe(layers, pin_model="register"))  # the remedy
    assert places == [p.data_ptr() for p in layers.parameters()]


def test_a_wall_of_page_locking_counts_like_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    roundpipe.use_devices("host:1")
    scarce(monkeypatch, 1 << 39, 3 * ONE)
    with pytest.raises(HostOutOfMemory, match="can still be page-locked") as caught:
        RoundPipe(in_one_storage())
    assert caught.value.available_bytes == 3 * ONE
    with caplog.at_level(logging.INFO, logger="roundpipe"):
        model = RoundPipe(in_one_storage(), pin_model="auto")
    assert model._state.placement.mode == "off" and "can be page-locked" in caplog.text


def test_too_large_a_request_names_holders_and_remedies() -> None:
    roundpipe.use_devices("host:1")
    model = RoundPipe(linears())
    call(model)
    call(model)  # a second gradient image
    with pytest.raises(HostOutOfMemory) as caught:
        _ops.host_empty([1 << 45], torch.uint8)
    error = caught.value
    assert error.asked_bytes == 1 << 45 and 0 < error.available_bytes < 1 << 45
    assert error.limit_bytes is not None and error.holders["weights"] >= 4 * ONE
    assert error.holders["gradients"] >= 8 * ONE
    assert dict(error.remedies)["one forward_backward call a step"] >= 4 * ONE
    for part in ("weights", "gradients", "one forward_backward call a step saves"):
        assert part in str(error)
    call(model)  # the model works on


# -- each remedy saves what it says ----------------------------------------------------------------------------------
def saving(model: RoundPipe, what: str) -> int:
    return next((size for name, size in remedies([model._state]) if what in name), 0)


def torch_trained(model: RoundPipe) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)

    return optimizer, step


def host_bytes(model: RoundPipe) -> int:
    """Of the optimizer, whichever it is."""
    memory = model._state.compact.memory
    return model._state.optimizer.host_bytes + (0 if memory is None else memory.host_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_compact_optimizer_saves_what_is_said(dtype: torch.dtype) -> None:
    roundpipe.use_devices("host:1")
    model = RoundPipe(linears(dtype=dtype), optim_dtype=torch.float32)
    optimizer, step = torch_trained(model)
    call(model)
    step()
    states = [t for s in optimizer.state.values() for t in s.values() if t.numel() > 1]
    before = host_bytes(model) + sum(t.nbytes for t in states)
    said = saving(model, "compact optimizer (")
    model = RoundPipe(linears(dtype=dtype))
    compact = roundpipe.optim.AdamW(model, lr=1e-3)
    call(model)
    model.step(compact, is_async=False)
    model.synchronize()
    assert before - host_bytes(model) == pytest.approx(said, rel=0.01)
    assert said == (6 if dtype == torch.bfloat16 else 8) * 4 * WIDE * WIDE


def test_formats_and_exact_steps_save_what_is_said() -> None:
    roundpipe.use_devices("host:1")

    kept = []  # a compact optimizer's memory ends with it

    def trained(state_dtype: str, is_async: bool) -> RoundPipe:
        model = RoundPipe(linears(dtype=torch.bfloat16))
        optimizer = roundpipe.optim.AdamW(model, lr=1e-3, state_dtype=state_dtype)
        kept.append(optimizer)
        call(model)
        model.step(optimizer, is_async)
        model.synchronize()
        return model

    model = trained("float32", True)
    before, coded, exact = host_bytes(model), saving(model, "int8"), saving(model, "exact steps")
    assert coded > 0 and exact == 4 * WIDE * WIDE * 2
    model = trained("float32", False)
    assert before - host_bytes(model) == exact and saving(model, "exact steps") == 0
    model = trained("int8", True)
    assert before - host_bytes(model) == pytest.approx(coded, rel=0.01) and saving(model, "int8") == 0


def test_announced_steps_save_what_is_said() -> None:
    roundpipe.use_devices("host:1")
    model = RoundPipe(linears(12, dtype=torch.bfloat16))
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)

    def gradients() -> int:
        return sum(u.host_gradient_bytes for u in model._state.units) + model._state.gradient_pool.host_bytes

    call(model)
    model.step(optimizer, False)
    model.synchronize()
    before, said = gradients(), saving(model, "announced steps")
    assert said > before / 2
    for _ in range(2):
        call(model, step=optimizer)
    model.synchronize()
    assert before - gradients() == said and saving(model, "announced steps") == 0
    for refusing in (dict(max_grad_norm=1.0), None):  # where all gradients are measured together, and without a step
        other = RoundPipe(linears(12, dtype=torch.bfloat16))
        kept = roundpipe.optim.AdamW(other, lr=1e-3, **refusing) if refusing is not None else None
        call(other)
        assert saving(other, "announced steps") == 0
        del kept


def test_fewer_rows_and_fewer_calls_save_what_is_said() -> None:
    peaks, said, gradients = [], [], []
    plan = one_layer_stages(6)
    for rows, calls in ((4096, 1), (2048, 2)):
        fresh_engine("host:1")
        model = RoundPipe(linears(6))
        for _ in range(calls):
            call(model, rows, execute_plan=plan)
        peaks.append(_ops.engine_live(engines.current().handle)[2])
        gradients.append(sum(u.host_gradient_bytes for u in model._state.units))
        said.append((saving(model, "half the rows"), saving(model, "one forward_backward")))
    less = peaks[0] + gradients[0] - peaks[1] - gradients[1]
    assert less == pytest.approx(said[0][0], rel=0.05) and less > 0
    assert said[0][1] == 0 and said[1][1] == gradients[1] - gradients[0] == 6 * ONE


def test_registering_more_than_can_be_locked_names_off() -> None:
    roundpipe.use_devices("host:1")
    handle = engines.current().handle
    layers = in_one_storage(8)
    _ops.engine_inject(handle, "limit_registrations", 0)
    try:
        with pytest.raises(RoundPipeError, match='pin_model="off"'):
            RoundPipe(layers, pin_model="register")
    finally:
        _ops.engine_inject(handle, "limit_registrations", -1)
    call(RoundPipe(layers, pin_model="off"))


def test_a_simulated_region_that_the_host_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_engine("host:2")
    model = RoundPipe(linears())
    empty = torch.empty

    def refuses(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8 and size[0]:
            raise RuntimeError(f"[enforce fail at alloc_cpu.cpp:131] . {HostOutOfMemory._PHRASE}: you tried to")
        return empty(*size, **options)

    with monkeypatch.context() as patched, pytest.raises(HostOutOfMemory) as caught:
        patched.setattr(torch, "empty", refuses)
        call(model)
    error = caught.value
    assert error.device == "host:0" and error.asked_bytes is not None and error.asked_bytes >= ONE
    for part in ("simulated device", f"takes {error.asked_bytes} bytes", "host:1@4GiB", "Host memory now"):
        assert part in str(error)
    call(model)  # the next one works
