"""The operators end to end on two simulated devices, under the happens-before checker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from roundpipe import _ops, errors

UPLOAD, PUBLISH, LOAD, WRITE, TAKE = range(5)
WEIGHTS, GRADIENTS, ACTIVATIONS, BUFFERS, INPUTS = range(5)
NONE = torch.empty(0, dtype=torch.uint8)


class Rig:
    """An engine of two simulated devices with a region each."""

    def __init__(self, region_bytes: int = 1 << 16) -> None:
        self.engine = _ops.engine_open("host", [0, 1], 0, True)
        self.regions = [torch.empty(region_bytes, dtype=torch.uint8) for _ in range(2)]
        for device, region in enumerate(self.regions):
            _ops.engine_set_region(self.engine, device, region)

    def view(self, device: int, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        size = count * torch.empty(0, dtype=dtype).element_size()
        return self.regions[device][offset : offset + size].view(dtype)

    def end(self) -> None:
        assert _ops.wait(_ops.engine_wait_idle, self.engine, timeout_s=20)
        assert _ops.engine_reports(self.engine) == ""
        _ops.engine_close(self.engine)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.end()


def image_of(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[int], int]:
    held, offsets, end = [], [], 0
    for tensor in tensors:
        copy = _ops.host_empty(list(tensor.shape), tensor.dtype)
        copy.copy_(tensor)
        held.append(copy)
        offsets.append(end)
        end += (copy.numel() * copy.element_size() + 255) // 256 * 256
    return held, offsets, end


def finish_job(job: int) -> None:
    _ops.job_close(job)
    assert _ops.wait(_ops.job_wait_gradients, job, timeout_s=20)
    _ops.job_forget(job)


def test_weights_go_up_and_gradients_come_down_and_accumulate(rig: Rig) -> None:
    weight, bias = torch.randn(24, 8), torch.randn(7).to(torch.bfloat16)
    held, offsets, size = image_of(weight, bias)
    unit = _ops.unit_open(rig.engine, held, offsets, size, 1024)
    store = _ops.host_empty([1024], torch.uint8)
    for device, load in ((0, NONE), (1, store)):
        job = _ops.job_open(rig.engine, device, [unit], [load], [store])
        weights_at, gradients_at = _ops.wait_place(job, 0)
        assert torch.equal(rig.view(device, weights_at, torch.float32, 192), weight.flatten())
        assert torch.equal(rig.view(device, weights_at + offsets[1], torch.bfloat16, 7), bias)
        gradients = rig.view(device, gradients_at, torch.float32, 256)
        gradients += 1.5
        _ops.job_weights_done(job, 0)
        _ops.job_gradients_done(job, 0)
        finish_job(job)
    assert torch.equal(store.view(torch.float32), torch.full((256,), 3.0))
    assert _ops.unit_counters(unit) == [2, 0, 1, 2, 0] * 2
    assert _ops.engine_bytes(rig.engine, 1)[:2] == [weight.nbytes + bias.nbytes, 1024]
    assert _ops.engine_bytes(rig.engine, 1)[5:7] == [0, 1024]
    _ops.engine_reset_bytes(rig.engine)
    assert _ops.engine_bytes(rig.engine, 1) == [0] * 10
    _ops.unit_close(unit)


def test_take_and_publish_through_tickets(rig: Rig) -> None:
    held, offsets, size = image_of(torch.zeros(128, dtype=torch.bfloat16))
    unit = _ops.unit_open(rig.engine, held, offsets, size, 256)
    store = _ops.host_empty([256], torch.uint8)
    master = _ops.host_empty([128], torch.float32)
    image = _ops.host_empty([256], torch.uint8)
    updates = []
    for step in range(4):
        job = _ops.job_open(rig.engine, step % 2, [unit], [NONE], [image if step % 2 else store])
        take = _ops.ticket_issue(unit, TAKE)
        publish = _ops.ticket_issue(unit, PUBLISH)
        source = (image if step % 2 else store).view(torch.bfloat16)
        updates += [_ops.update_convert(rig.engine, take, [source], [master], [1])]
        updates += [_ops.update_convert(rig.engine, publish, [master], [held[0]], [0])]
        weights_at, gradients_at = _ops.wait_place(job, 0)
        # Each upload sees exactly the steps before it.
        seen = rig.view(step % 2, weights_at, torch.bfloat16, 128)
        assert torch.equal(seen, torch.full((128,), float(step), dtype=torch.bfloat16))
        rig.view(step % 2, gradients_at, torch.bfloat16, 128).fill_(1.0)
        _ops.job_weights_done(job, 0)
        _ops.job_gradients_done(job, 0)
        finish_job(job)
    assert updates == sorted(updates)
    assert _ops.wait(_ops.update_wait, rig.engine, updates[-1], timeout_s=20)
    assert torch.equal(master, torch.full((128,), 4.0))
    assert torch.equal(held[0].float(), master)
    _ops.unit_close(unit)


def test_a_queued_step_is_the_step_of_the_drop_in_operators(rig: Rig) -> None:
    """In place and beside, split and not, several groups and steps, a moment that is not kept; behind two tickets."""
    torch.manual_seed(0)
    weights = [torch.randn(n) for n in (1000, 0, 3, 70_000)]
    upper, low = [torch.empty(1000, dtype=d) for d in (torch.bfloat16, torch.int16)]
    _ops.split_master(weights[0], upper, low)
    weights[0] = weights[0].clone()
    gradients = [torch.randn_like(w).to(torch.bfloat16) for w in weights]
    moments = [[torch.rand_like(w) for w in weights] for _ in range(3)]
    moments[2][0] = moments[2][2] = torch.empty(0)  # no amsgrad in the first group
    groups, steps, factor = [0, 1, 0, 1], [3.0, 1.0, 3.0, 9.0], 0.25
    rows = [(0.1, 0.9, 0.99, 1e-8, 0.1, True, False), (0.2, 0.8, 0.95, 1e-4, 0.01, False, True)]
    names = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
    want = [w.clone() for w in weights]
    want_moments = [[m.clone() for m in row] for row in moments]
    for i in range(4):
        largest = [want_moments[2][i]] if groups[i] else []
        _ops.adam_update(
            [want[i]], [], [gradients[i]], [want_moments[0][i]], [want_moments[1][i]], largest, [steps[i]],
            factor=factor, **dict(zip(names, rows[groups[i]], strict=True)),
        )  # fmt: skip
    held, offsets, size = image_of(torch.zeros(64))
    unit = _ops.unit_open(rig.engine, held, offsets, size, 256)
    beside, published = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(70_000, dtype=torch.bfloat16)
    masters = [low, weights[1], weights[2], torch.zeros(70_000)]
    update = _ops.update_fused(
        rig.engine, [_ops.ticket_issue(unit, TAKE), _ops.ticket_issue(unit, PUBLISH)], "adam", masters,
        [upper, *weights[1:]], [beside, weights[1], weights[2], published], gradients,
        [m for row in moments for m in row], [], steps, [], groups, [float(x) for row in rows for x in row], factor,
    )  # fmt: skip
    assert _ops.wait(_ops.update_wait, rig.engine, update, timeout_s=20)
    assert _ops.unit_counters(unit)[5:] == [0, 1, 0, 0, 1]
    joined = torch.empty(1000)
    _ops.join_master(beside, low, joined)
    for got, wanted in zip([joined, weights[1], weights[2], masters[3]], want, strict=True):
        assert torch.equal(got, wanted)
    for row, wanted_row in zip(moments, want_moments, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(row, wanted_row, strict=True))
    _ops.split_master(want[3], split := torch.empty_like(published), torch.empty(70_000, dtype=torch.int16))
    assert torch.equal(published, split)
    sums = torch.zeros(2, dtype=torch.float64)
    update = _ops.update_square_sum(rig.engine, [], gradients, sums)
    assert _ops.wait(_ops.update_wait, rig.engine, update, timeout_s=20)
    exact = sum(g.double().square().sum() for g in gradients)
    torch.testing.assert_close(sums.sum(), exact, rtol=1e-12, atol=0)
    _ops.unit_close(unit)


def test_stash_on_one_device_and_fetch_on_another(rig: Rig) -> None:
    sources = [torch.randn(5, 3), torch.arange(4), torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 2)]
    record = _ops.stash(rig.engine, 0, sources, ACTIVATIONS, 0)
    early = _ops.record_memory(record)
    targets = [torch.empty_like(t) for t in sources]
    fetch = _ops.fetch_start(rig.engine, 1, record, targets, ACTIVATIONS)
    assert _ops.wait(_ops.fetch_wait, fetch, timeout_s=20)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)
    assert _ops.wait(_ops.record_order_after_read, record, 0, timeout_s=20)
    _ops.declare_access(rig.engine, 0, sources[0], True)
    assert _ops.wait(_ops.record_wait, record, timeout_s=20)
    host = _ops.record_host(record)
    assert [(t.shape, t.dtype) for t in host] == [(t.shape, t.dtype) for t in sources]
    assert all(torch.equal(a, b) for a, b in zip(host, sources, strict=True))
    assert _ops.record_host(record)[0].data_ptr() == host[0].data_ptr()
    assert all(torch.equal(a, b) and a.data_ptr() == b.data_ptr() for a, b in zip(early, host, strict=True))
    del early
    live = _ops.engine_live(rig.engine)
    assert live[0] == 1 and live[2] >= live[1] > 0
    _ops.record_drop(record)
    assert _ops.engine_live(rig.engine)[0] == 1  # the host tensors still hold it
    del host
    assert _ops.engine_live(rig.engine)[:2] == [0, 0]


def test_recompute_gives_back_inputs_and_seed_and_drops_the_record(rig: Rig) -> None:
    x = torch.randn(33)
    record = _ops.stash(rig.engine, 1, [x], ACTIVATIONS, 1234567890123)
    target = torch.empty(33)
    recompute = _ops.recompute_begin(rig.engine, 0, record, [target])
    assert _ops.wait(_ops.recompute_end, recompute, timeout_s=20) == [1, 1234567890123]
    assert torch.equal(target, x)
    with pytest.raises(errors.ConfigError, match="stale"):
        _ops.record_drop(record)
    assert _ops.engine_live(rig.engine)[4] == 0


def test_a_host_record_is_a_copy(rig: Rig) -> None:
    x = torch.randn(9)
    record = _ops.stash_host(rig.engine, [x])
    before = x.clone()
    x.zero_()
    assert torch.equal(_ops.record_host(record)[0], before)
    fetch = _ops.fetch_start(rig.engine, 0, record, [torch.empty(9)], INPUTS)
    _ops.fetch_cancel(fetch)
    _ops.record_drop(record)


def test_handles_end_with_their_keeper(rig: Rig) -> None:
    """Records, fetches and jobs; what has ended before is left alone."""
    x = torch.randn(9)
    weights, offsets, nbytes = image_of(x)
    unit = _ops.unit_open(rig.engine, weights, offsets, nbytes, 0)
    before = _ops.engine_live(rig.engine)
    record, early = _ops.stash_host(rig.engine, [x]), _ops.stash_host(rig.engine, [x])
    fetch = _ops.fetch_start(rig.engine, 0, record, [torch.empty(9)], INPUTS)
    job = _ops.job_open(rig.engine, 1, [unit], [NONE], [NONE])
    keeper = _ops.handle_keeper(record, early, fetch, job)
    assert keeper.tolist() == [record, early, fetch, job]
    also = keeper[1:]
    _ops.record_drop(early)
    again = _ops.stash_host(rig.engine, [x])  # in its place
    _ops.job_abort(job)
    del keeper
    assert torch.equal(_ops.record_host(record)[0], x)
    del also
    for ended, handle in ((_ops.record_drop, record), (_ops.fetch_cancel, fetch), (_ops.job_forget, job)):
        with pytest.raises(errors.ConfigError, match="stale"):
            ended(handle)
    _ops.record_drop(again)
    assert _ops.wait(_ops.engine_wait_idle, rig.engine, timeout_s=20)
    assert _ops.engine_live(rig.engine)[3:] == before[3:]
    _ops.unit_close(unit)


def test_host_memory_is_zero_filled_aligned_and_outlives_its_engine() -> None:
    rig = Rig()
    kept = _ops.host_empty([3, 5], torch.int32)
    dirty = _ops.host_empty([1 << 20], torch.float32)
    dirty.fill_(7)
    del dirty
    again = _ops.host_empty([1 << 20], torch.float32)
    assert not again.any() and not kept.any()
    assert kept.data_ptr() % 256 == 0 and kept.is_contiguous()
    assert _ops.host_empty([], torch.float64).item() == 0
    assert _ops.host_empty([4, 0], torch.float64).shape == (4, 0)
    reserved, registered, used, _, peak, count = _ops.host_stats()
    assert reserved >= used >= again.nbytes and peak >= used and registered >= again.nbytes and count >= 2
    rig.end()
    kept.fill_(3)
    assert kept.sum().item() == 45
    del again
    assert not _ops.host_empty([10], torch.int8).any()  # without an engine too


def test_a_wait_releases_the_interpreter_lock(rig: Rig) -> None:
    held, offsets, size = image_of(torch.zeros(64))
    unit = _ops.unit_open(rig.engine, held, offsets, size, 0)
    publish = _ops.ticket_issue(unit, PUBLISH)  # never ready for the upload below until finished
    job = _ops.job_open(rig.engine, 0, [unit], [NONE], [NONE])
    done = threading.Event()
    results: list[list[int]] = []

    def waits() -> None:
        results.append(_ops.job_wait_unit(job, 0, 30_000))
        done.set()

    thread = threading.Thread(target=waits)
    thread.start()
    steps, begin = 0, time.monotonic()
    while steps <= 1000 or time.monotonic() - begin < 0.3:
        steps += 1
    assert not done.is_set()
    _ops.ticket_finish(publish, False)
    assert done.wait(20)
    thread.join()
    assert results[0][0] == 1 and results[0][2] == -1
    _ops.job_close(job)
    _ops.job_forget(job)


def test_a_signal_ends_a_wait() -> None:
    rig = Rig()
    held, offsets, size = image_of(torch.zeros(64))
    unit = _ops.unit_open(rig.engine, held, offsets, size, 0)
    publish = _ops.ticket_issue(unit, PUBLISH)
    job = _ops.job_open(rig.engine, 0, [unit], [NONE], [NONE])
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        _ops.wait_place(job, 0)  # nothing else ends it
    assert time.monotonic() - begin < 5
    timer.join()
    with pytest.raises(errors.StallError, match="job_wait_unit"):
        _ops.wait(_ops.job_wait_unit, job, 0, timeout_s=0.05)
    with pytest.raises(ZeroDivisionError):
        _ops.wait_place(job, 0, check=lambda: 1 // 0)
    _ops.job_abort(job)
    _ops.job_abort(job)
    _ops.job_forget(job)
    _ops.ticket_finish(publish, True)
    rig.end()


def test_a_failed_copy_reaches_whoever_waits_and_the_next_call_works() -> None:
    rig = Rig()
    _ops.engine_inject(rig.engine, "fail_copy", 0)
    record = _ops.stash(rig.engine, 0, [torch.ones(8)], ACTIVATIONS, 0)
    with pytest.raises(errors.RoundPipeError) as caught:
        _ops.wait(_ops.record_wait, record, timeout_s=20)
    assert isinstance(caught.value.code, int)
    _ops.record_drop(record)
    record = _ops.stash(rig.engine, 0, [torch.ones(8)], ACTIVATIONS, 0)
    assert _ops.wait(_ops.record_wait, record, timeout_s=20)
    assert _ops.record_host(record)[0].sum() == 8
    rig.end()


def test_closing_with_work_under_way_ends_every_wait() -> None:
    rig = Rig()
    _ops.engine_inject(rig.engine, "delay", 1, 2000)
    held, offsets, size = image_of(torch.zeros(64))
    unit = _ops.unit_open(rig.engine, held, offsets, size, 256)
    publish = _ops.ticket_issue(unit, PUBLISH)
    job = _ops.job_open(rig.engine, 0, [unit], [NONE], [_ops.host_empty([256], torch.uint8)])
    failures: list[BaseException] = []

    def waits() -> None:
        try:
            _ops.wait_place(job, 0)
        except errors.RoundPipeError as error:
            failures.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.1)
    begin = time.monotonic()
    _ops.engine_close(rig.engine)
    thread.join(20)
    assert time.monotonic() - begin < 10 and len(failures) == 1
    # What is left ends quietly.
    _ops.job_abort(job)
    _ops.job_forget(job)
    _ops.ticket_finish(publish, True)
    _ops.unit_close(unit)
    with pytest.raises(errors.ConfigError, match="live engine"):
        _ops.engine_poke(rig.engine)


def run_script(text: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=str(Path(_ops.__file__).parents[1]))
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(text)],
        capture_output=True, text=True, timeout=90, env=environment,
    )  # fmt: skip


SCRIPT = """
    import os, threading, torch
    from roundpipe import _ops, errors
    none = torch.empty(0, dtype=torch.uint8)
    engine = _ops.engine_open("host", [0, 1], 0, True)
    region = torch.empty(1 << 20, dtype=torch.uint8)
    _ops.engine_set_region(engine, 0, region)
    weights = _ops.host_empty([1 << 16], torch.float32)
    unit = _ops.unit_open(engine, [weights], [0], 1 << 18, 0)
"""


def test_the_interpreter_exits_with_work_under_way() -> None:
    result = run_script(
        SCRIPT
        + """
    _ops.engine_inject(engine, "delay", 1, 20000)
    publish = _ops.ticket_issue(unit, 1)
    job = _ops.job_open(engine, 0, [unit], [none], [none])
    records = [_ops.stash(engine, 1, [torch.ones(1 << 16)], 2, 0) for _ in range(8)]
    threading.Thread(target=lambda: _ops.drop_quietly(_ops.wait_place, job, 0), daemon=True).start()
    print("leaving")
    """
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "leaving\n"


def test_a_forked_child_never_touches_the_engine() -> None:
    result = run_script(
        SCRIPT
        + """
    import gc, warnings
    warnings.simplefilter("ignore")
    child = os.fork()
    if child == 0:
        try:
            _ops.engine_poke(engine)
        except errors.ConfigError as error:
            assert "forked" in str(error)
        else:
            raise SystemExit("an inherited handle was taken")
        fresh = _ops.host_empty([8], torch.float32)
        assert fresh.sum() == 0
        del fresh, weights
        own = _ops.engine_open("host", [0])
        assert own != engine
        _ops.engine_close(own)
        raise SystemExit(7)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7, status
    weights.fill_(1)
    assert weights.sum() == 1 << 16
    """
    )
    assert result.returncode == 0, result.stderr


def test_convert_and_instruction_sets() -> None:
    source = torch.randn(1000)
    names = _ops.isa_names()
    try:
        for name in names:
            _ops.isa_force(name)
            assert _ops.isa_active() == name
            target = torch.zeros(1000, dtype=torch.bfloat16)
            version = target._version
            _ops.convert(source, target)
            assert torch.equal(target, source.to(torch.bfloat16)) and target._version > version
    finally:
        _ops.isa_force("")
    assert _ops.isa_active() == names[0]


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_conversions_equal_torch(source: torch.dtype, target: torch.dtype) -> None:
    x = (torch.randn(777, dtype=torch.float64) * 100).to(source)
    y = torch.randn(777, dtype=torch.float64).to(target)
    copied = torch.empty(777, dtype=target)
    _ops.convert(x, copied)
    assert torch.equal(copied, x.to(target))
    wide = torch.float64 if torch.float64 in (source, target) else torch.float32
    expected = (y.to(wide) + x.to(wide)).to(target)
    _ops.convert(x, y, accumulate=True)
    assert torch.equal(y, expected)


def test_convert_copies_any_dtype_and_accumulates_complex() -> None:
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64):
        source = torch.randint(0, 2, (64,)).to(dtype)
        target = torch.empty(64, dtype=dtype)
        _ops.convert(source, target)
        assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))
    z = torch.randn(50, dtype=torch.complex64)
    total = torch.ones(50, dtype=torch.complex64)
    _ops.convert(z, total, accumulate=True)
    assert torch.equal(total, z + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_gradient_stats(device: str, dtype: torch.dtype) -> None:
    for count in (0, 1, 7, 4096, 5_000_001):
        values = torch.randn(count, device=device).to(dtype)
        region = values.view(torch.uint8)
        squares, bad = _ops.gradient_stats(region, dtype).tolist()
        assert squares == pytest.approx(values.double().square().sum().item(), rel=1e-12) and bad == 0
        assert _ops.gradient_stats(region, dtype)[0].item() == squares  # the same bits again
    values[[0, 5, -1]] = torch.tensor([float("inf"), float("nan"), float("-inf")], dtype=dtype, device=device)
    assert _ops.gradient_stats(region, dtype)[1].item() == 3
    with pytest.raises(RuntimeError, match="dtype"):
        _ops.gradient_stats(region, torch.float64)


@pytest.mark.needs_cuda
def test_fetches_of_a_host_that_runs_ahead_do_not_pile_up() -> None:
    engine, stream = _ops.engine_open("cuda", [0]), torch.cuda.Stream()
    size = 16 << 20  # bytes of float32, which sum() adds without a converted copy
    with torch.cuda.stream(stream):
        _ops.engine_set_stream(engine, 0, stream.cuda_stream)
        record = _ops.stash_host(engine, [torch.ones(size // 4)])
        sums = torch.zeros(6, device="cuda")
        torch.cuda._sleep(1_000_000_000)  # half a second: no copy up can be over before
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for i in range(6):
            target = torch.empty(size // 4, device="cuda")
            fetch = _ops.fetch_start(engine, 0, record, [target], ACTIVATIONS)
            assert _ops.wait(_ops.fetch_wait, fetch, timeout_s=20)
            sums[i] = target.sum()
            del target
        assert torch.cuda.max_memory_allocated() - before < 3 * size
        assert sums.tolist() == [size // 4] * 6  # on the stream that added them
    _ops.record_drop(record)
    assert _ops.wait(_ops.engine_wait_idle, engine, timeout_s=20)
    _ops.engine_close(engine)


def test_trace(rig: Rig) -> None:
    _ops.trace_start(1000)
    record = _ops.stash(rig.engine, 0, [torch.ones(8)], ACTIVATIONS, 0)
    _ops.wait(_ops.record_wait, record, timeout_s=20)
    _ops.record_drop(record)
    _ops.wait(_ops.engine_wait_idle, rig.engine, timeout_s=20)
    spans, threads = _ops.trace_stop()
    assert any(span[0] == "copy" for span in spans)
    assert all(len(span) == 6 and int(span[3]) <= int(span[4]) for span in spans)
    assert {span[2] for span in spans} <= threads.keys()
    assert all(threads[span[2]][1].startswith("rp") for span in spans if span[0] == "copy")


def test_facts() -> None:
    assert "stable ABI target: 2.11" in _ops.build_facts()
    assert isinstance(_ops.cuda_driver(), str)
