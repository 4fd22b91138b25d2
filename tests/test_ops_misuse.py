"""Every operator, misused: a typed error that names the operator and the argument, and the process lives on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roundpipe import _ops, errors
from tests.test_data_plane import MISUSED as DATA_PLANE_MISUSES
from tests.test_update_ops import MISUSES as UPDATE_MISUSES

NONE = torch.empty(0, dtype=torch.uint8)
X = torch.zeros(4)


@pytest.fixture(scope="module")
def rig() -> Iterator[SimpleNamespace]:
    """Two engines with one live object of every kind in the first, and a record and a unit of the second."""
    r = SimpleNamespace(engine=_ops.engine_open("host", [0, 1], 0, True), other=_ops.engine_open("host", [0], 0, True))
    r.region = torch.empty(4096, dtype=torch.uint8)
    _ops.engine_set_region(r.engine, 0, r.region)
    r.weight = _ops.host_empty([64], torch.float32)
    r.unit = _ops.unit_open(r.engine, [r.weight], [0], 256, 256)
    r.big = _ops.unit_open(r.engine, [_ops.host_empty([4096], torch.float32)], [0], 16384, 0)
    r.foreign_unit = _ops.unit_open(r.other, [r.weight], [0], 256, 256)
    r.foreign_claim = _ops.host_claim(r.other, [X], False)
    r.image = _ops.host_empty([256], torch.uint8)
    r.idle = _ops.unit_open(r.engine, [r.weight], [0], 256, 0)
    r.ticket = _ops.ticket_issue(r.idle, 1)
    r.waiting = _ops.ticket_issue(r.idle, 1)
    r.foreign_ticket = _ops.ticket_issue(r.foreign_unit, 4)
    r.job = _ops.job_open(r.engine, 0, [r.unit], [NONE], [NONE])
    r.pool = _ops.gradient_pool_open(r.engine, _ops.host_empty([256], torch.uint8))
    r.small_pool = _ops.gradient_pool_open(r.engine, _ops.host_empty([128], torch.uint8))
    r.foreign_pool = _ops.gradient_pool_open(r.other, _ops.host_empty([256], torch.uint8))
    _ops.engine_set_region(r.engine, 1, torch.empty(4096, dtype=torch.uint8))
    r.writing_job = _ops.job_open(r.engine, 1, [r.unit], [NONE], [r.image])
    r.pooled_job = _ops.job_open(r.engine, 1, [r.unit], [NONE], [NONE], [0], r.pool)
    r.record = _ops.stash_host(r.engine, [X])
    r.foreign_record = _ops.stash_host(r.other, [X])
    r.gone = _ops.stash_host(r.engine, [X])
    _ops.record_drop(r.gone)
    r.fetch = _ops.fetch_start(r.engine, 0, r.record, [torch.empty(4)], 2)
    yield r
    _ops.host_claim_drop(r.foreign_claim)
    _ops.fetch_cancel(r.fetch)
    for job in (r.job, r.writing_job, r.pooled_job):
        _ops.job_abort(job)
    for engine in (r.engine, r.other):
        _ops.engine_close(engine)


def fused(r: SimpleNamespace, **changed: Any) -> tuple[Any, ...]:
    """Arguments of update_fused that are right but for ``changed``."""
    arguments: dict[str, Any] = dict(
        tickets=[], algorithm="adam", masters=[X.clone()], sources=[], published=[], gradients=[X],
        moments=[X.clone(), X.clone()], scales=[], steps=[1.0], seeds=[], groups=[0],
        options=[0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 0.0], factor=1.0,
    )  # fmt: skip
    return r.engine, *(arguments | changed).values()


def behind(
    r: SimpleNamespace, job: int, index: int = 0, offsets: Sequence[int] = (), **changed: Any
) -> tuple[Any, ...]:
    """Arguments of job_gradients_update."""
    _, tickets, algorithm, masters, sources, published, gradients, *rest = fused(r, **changed)
    return job, index, tickets, algorithm, masters, sources, published, gradients, offsets, *rest


BAD_INDEX = r"an index from 0 to \d+ \(exclusive\), got -?\d+"
# operator -> calls that must fail with a ConfigError of this text. A call gets the rig and returns the arguments.
CASES: dict[str, list[tuple[Callable[[SimpleNamespace], tuple[Any, ...]], str]]] = {
    "host_empty": [
        (lambda r: ([-1], torch.float32), r"'size\[0\]'.*got -1"),
        (lambda r: ([1 << 40, 1 << 40], torch.float32), "2\\^63 bytes"),
    ],
    "host_claim": [
        (lambda r: (r.engine, [torch.zeros(4, 4).t()], True), r"'tensors\[0\]'.*non-contiguous"),
        (lambda r: (r.engine, [X, torch.zeros(4, device="meta")], False), r"'tensors\[1\]'.*on meta"),
        (lambda r: (r.unit, [X], True), "a handle of a unit"),
    ],
    "handle_keeper": [(lambda r: (), "one or more")],
    "host_claim_drop": [(lambda r: (r.unit,), "a live claim, got a handle of a unit")],
    "host_claim_stats": [(lambda r: (r.engine,), "a handle of a engine"), (lambda r: (9,), "the number 9")],
    "host_file_bytes": [(lambda r: ([torch.zeros(4)[::2]],), r"'tensors\[0\]'.*non-contiguous")],
    "engine_open": [
        (lambda r: ("tpu", [0], 0, False), "'cuda' or 'host', got 'tpu'"),
        (lambda r: ("host", [], 0, False), "at least one device"),
        (lambda r: ("host", [1], 0, False), r"'devices\[0\]'"),
        (lambda r: ("host", [0], -1, False), "'memory_limit_bytes'"),
        (lambda r: ("cuda", [0], 5, False), "set_per_process_memory_fraction"),
        (lambda r: ("cuda", [0], 0, True), "'check'"),
        (lambda r: ("cuda", [-3], 0, False), r"'devices\[0\]'.*got -3"),
    ],
    "engine_close": [(lambda r: (0,), "got 0, which is no handle"), (lambda r: (r.unit,), "a handle of a unit")],
    "engine_set_stream": [
        (lambda r: (r.engine, 2, 0), BAD_INDEX),
        (lambda r: (r.engine, 0, 0), "no open job on this device"),
    ],
    "engine_set_region": [
        (lambda r: (r.engine, -1, NONE), BAD_INDEX),
        (lambda r: (r.engine, 0, NONE), "no open job on this device"),
        (lambda r: (r.engine, 1, X), r"contiguous uint8 tensor on cpu, got Float\[4\] on cpu"),
        (lambda r: (r.engine, 1, torch.empty(8, dtype=torch.uint8)[::2]), "got a non-contiguous Byte"),
        (lambda r: (r.engine, 1, torch.empty(8, dtype=torch.uint8, device="meta")), "on meta"),
    ],
    "engine_bytes": [(lambda r: (r.engine, 2), BAD_INDEX), (lambda r: (r.job, 0), "a handle of a job")],
    "engine_bounced_bytes": [(lambda r: (r.engine, 2), BAD_INDEX), (lambda r: (r.job, 0), "a handle of a job")],
    "engine_reset_bytes": [(lambda r: (r.record,), "a handle of a record")],
    "engine_poke": [(lambda r: (-5,), "the number -5")],
    "engine_wait_idle": [(lambda r: (r.engine, -1), "'timeout_ms'"), (lambda r: (r.fetch, 0), "a handle of a fetch")],
    "engine_reports": [(lambda r: (1 << 62,), "no operator has returned")],
    "engine_inject": [
        (lambda r: (r.engine, "fire", 0, 0), "'fail_registration' or 'limit_registrations', got 'fire'"),
        (lambda r: (r.engine, "delay", 0, -1), "microseconds, got -1"),
    ],
    "engine_live": [(lambda r: (r.ticket,), "a handle of a ticket")],
    "unit_open": [
        (lambda r: (r.engine, [X], [], 256, 0), "'offsets'.*1 elements.*got 0"),
        (lambda r: (r.engine, [X], [0], 255, 0), "'weight_bytes'.*multiple of 256.*got 255"),
        (lambda r: (r.engine, [X], [0], 256, -256), "'gradient_bytes'"),
        (lambda r: (r.engine, [X], [250], 256, 0), r"'offsets\[0\]'.*inside the 256 bytes"),
        (lambda r: (r.engine, [X], [-1], 256, 0), r"'offsets\[0\]'"),
        (lambda r: (r.engine, [X, X], [0, 8], 256, 0), r"'offsets\[1\]'.*do not overlap"),
        (lambda r: (r.engine, [torch.zeros(4, 4).t()], [0], 256, 0), r"'weights\[0\]'.*non-contiguous"),
        (lambda r: (r.engine, [torch.zeros(4).to_sparse()], [0], 256, 0), r"'weights\[0\]'.*sparse"),
        (lambda r: (r.unit, [X], [0], 256, 0), "a handle of a unit"),
        (lambda r: (r.engine, [X], [0], 256, 0, r.idle), "'claim'.*a handle of a unit"),
        (lambda r: (r.engine, [X], [0], 256, 0, r.foreign_claim), "'claim'.*another engine"),
    ],
    "unit_close": [(lambda r: (r.engine,), "a live unit, got a handle of a engine")],
    "unit_counters": [(lambda r: (7,), "the number 7")],
    "unit_new_epoch": [(lambda r: (r.gone,), "a handle of a record"), (lambda r: (r.idle,), "ticket")],
    "unit_drop_rule": [(lambda r: (r.unit, 0), "1 to 5, got 0"), (lambda r: (r.unit, 6), "1 to 5, got 6")],
    "ticket_issue": [(lambda r: (r.unit, 5), BAD_INDEX), (lambda r: (r.ticket, 0), "a handle of a ticket")],
    "ticket_wait": [(lambda r: (r.unit, 0), "a handle of a unit"), (lambda r: (r.ticket, 1 << 60), "'timeout_ms'")],
    "ticket_finish": [(lambda r: (r.waiting, False), "one that still waits"), (lambda r: (0, True), "no handle")],
    "job_open": [
        (lambda r: (r.engine, 0, [r.unit], [], [NONE]), "'loads'"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], []), "'stores'"),
        (lambda r: (r.engine, 9, [], [], []), BAD_INDEX),
        (lambda r: (r.engine, 0, [r.job], [NONE], [NONE]), r"'units\[0\]'.*a handle of a job"),
        (lambda r: (r.engine, 0, [r.foreign_unit], [NONE], [NONE]), "another engine"),
        (lambda r: (r.engine, 0, [r.unit] * 2, [NONE] * 2, [NONE] * 2), "each unit once"),
        (lambda r: (r.engine, 0, [r.unit], [r.image], [NONE]), r"'loads\[0\]'.*empty tensor where the store is empty"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [r.image[:100]]), r"'stores\[0\]'.*256 bytes.*got 100 bytes"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [X]), r"'stores\[0\]'.*uint8"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [NONE], [0], 0), "'pool'.*a pool for the units of 'pooled'"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [NONE], [1], r.pool), r"'pooled\[0\]'"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [r.image], [0], r.pool), r"'stores\[0\]'.*an empty tensor"),
        (lambda r: (r.engine, 0, [r.idle], [NONE], [NONE], [0], r.pool), r"'pooled\[0\]'.*a frozen one"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [NONE], [0], r.foreign_pool), "'pool'.*another engine"),
        (lambda r: (r.engine, 0, [r.unit], [NONE], [NONE], [0], r.unit), "gradient pool, got a handle of a unit"),
    ],
    "gradient_pool_open": [
        (lambda r: (r.engine, X), "'memory'.*uint8"),
        (lambda r: (r.unit, NONE), "a handle of a unit"),
    ],
    "gradient_pool_close": [(lambda r: (r.job,), "a live gradient pool, got a handle of a job")],
    "gradient_pool_stats": [(lambda r: (0,), "no handle")],
    "job_wait_unit": [(lambda r: (r.job, 1, 0), BAD_INDEX), (lambda r: (r.job, 0, -1), "'timeout_ms'")],
    "job_weights_done": [(lambda r: (r.job, -1), BAD_INDEX), (lambda r: (r.engine, 0), "a handle of a engine")],
    "job_gradients_done": [
        (lambda r: (r.job, 0), "with a gradient store for, got unit 0"),
        (lambda r: (r.pooled_job, 0), "job_gradients_update takes one whose gradients go to a pool"),
    ],
    "job_gradients_update": [
        (lambda r: behind(r, r.job), "with a gradient store for, got unit 0"),
        (lambda r: behind(r, r.unit), "a handle of a unit"),
        (lambda r: behind(r, r.writing_job, 1), BAD_INDEX),
        (lambda r: behind(r, r.writing_job, 0, [0]), "'offsets'.*none"),
        (lambda r: behind(r, r.writing_job, algorithm="adagrad"), "'algorithm'"),
        (lambda r: behind(r, r.writing_job, tickets=[r.foreign_ticket]), "another engine"),
        (lambda r: behind(r, r.pooled_job), "'offsets'.*1 elements.*got 0"),
        (lambda r: behind(r, r.pooled_job, 0, [248]), r"'offsets\[0\]'.*inside the 256 bytes.*got 248 for 16 bytes"),
        (lambda r: behind(r, r.pooled_job, 0, [2]), r"'offsets\[0\]'.*aligned to 4"),
        (lambda r: behind(r, r.pooled_job, 0, [0], gradients=[torch.zeros(5)]), r"'gradients\[0\]'.*4 elements"),
    ],
    "job_close": [(lambda r: (r.unit,), "a handle of a unit")],
    "job_abort": [(lambda r: (0,), "no handle")],
    "job_wait_gradients": [(lambda r: (r.record, 0), "a handle of a record")],
    "job_forget": [(lambda r: (r.job,), "close or abort it first")],
    "stash": [
        (lambda r: (r.engine, 0, [X], 5, 0), "'traffic'"),
        (lambda r: (r.engine, 2, [X], 0, 0), "'device'"),
        (lambda r: (r.engine, 0, [X, torch.zeros(4, 4).t()], 0, 0), r"'tensors\[1\]'.*non-contiguous"),
        (lambda r: (r.engine, 0, [X.to("meta")], 0, 0), r"'tensors\[0\]'.*on meta"),
    ],
    "stash_host": [(lambda r: (r.engine, [torch.zeros(8)[::2]]), r"'tensors\[0\]'.*non-contiguous")],
    "record_order_after_read": [(lambda r: (r.record, 2, 0), BAD_INDEX), (lambda r: (r.gone, 0, 0), "stale handle")],
    "record_wait": [(lambda r: (r.gone, 0), "stale handle: that record has ended"), (lambda r: (r.record, -1), "ms")],
    "record_host": [(lambda r: (r.gone,), "stale handle")],
    "record_memory": [(lambda r: (r.gone,), "stale handle"), (lambda r: (r.fetch,), "a handle of a fetch")],
    "record_drop": [(lambda r: (r.gone,), "stale handle"), (lambda r: (r.fetch,), "a handle of a fetch")],
    "fetch_start": [
        (lambda r: (r.engine, 0, r.record, [], 2), "'targets'.*1 elements.*got 0"),
        (lambda r: (r.engine, 0, r.record, [torch.zeros(5)], 2), r"'targets\[0\]'.*16 bytes.*got 20 bytes"),
        (lambda r: (r.engine, 0, r.foreign_record, [X], 2), "another engine"),
        (lambda r: (r.engine, 0, r.record, [torch.zeros(8)[::2]], 2), "non-contiguous"),
        (lambda r: (r.engine, 0, r.record, [X], -1), "'traffic'"),
    ],
    "fetch_wait": [(lambda r: (r.record, 0), "a handle of a record"), (lambda r: (r.fetch, -2), "'timeout_ms'")],
    "fetch_cancel": [(lambda r: (r.job,), "a handle of a job")],
    "recompute_begin": [(lambda r: (r.engine, 0, r.record, [torch.zeros(3)]), "16 bytes.*got 12 bytes")],
    "recompute_end": [(lambda r: (r.fetch, 0), "a live recompute, got a handle of a fetch")],
    "declare_access": [(lambda r: (r.engine, 0, torch.zeros(8)[::2], True), "'tensor'.*non-contiguous")],
    "update_convert": [
        (lambda r: (r.engine, 0, [X], [], [0]), "'targets'"),
        (lambda r: (r.engine, 0, [X], [X.clone()], []), "'accumulate'"),
        (lambda r: (r.engine, 0, [X], [torch.zeros(5)], [0]), r"'targets\[0\]'.*4 elements.*got 5"),
        (lambda r: (r.engine, 0, [X], [X], [0]), "tensors that overlap"),
        (lambda r: (r.engine, 0, [X], [torch.zeros(4, dtype=torch.int32)], [0]), "float dtypes on both sides"),
        (lambda r: (r.engine, r.foreign_ticket, [X], [X.clone()], [0]), "another engine"),
        (lambda r: (r.engine, r.unit, [X], [X.clone()], [0]), "a handle of a unit"),
        (lambda r: (r.engine, 0, [X], [X.clone()], [0], NONE), "'non_finite'.*1 elements.*got 0"),
        (lambda r: (r.engine, 0, [X], [X.clone()], [0], X), "'non_finite'.*uint8"),
        (lambda r: (r.engine, 0, [X], [X.clone()], [1], NONE.new_zeros(1)), r"'sources\[0\]'.*for 'non_finite'"),
    ],
    "update_fused": [
        (lambda r: fused(r, algorithm="adagrad"), "'algorithm'.*'adam', 'sgd' or 'lion', got 'adagrad'"),
        (lambda r: fused(r, gradients=[]), "'gradients'.*1 elements.*got 0"),
        (lambda r: fused(r, moments=[X.clone()] * 4), "'moments'.*at most 3, got 4 for 1"),
        (lambda r: fused(r, moments=[torch.zeros(5)]), r"'moments\[0\]'.*4 elements"),
        (lambda r: fused(r, moments=[X.byte()]), r"'moments\[0\]'.*float32, bfloat16"),
        (lambda r: fused(r, moments=[X.byte()], scales=[]), r"'moments\[0\]'.*float32, bfloat16"),
        (lambda r: fused(r, moments=[X.byte()], scales=[torch.zeros(2)]), r"'scales\[0\]'.*1 float32, one for 256"),
        (lambda r: fused(r, moments=[X.byte(), X.byte()], scales=[torch.zeros(1)]), "'scales'.*2 elements.*got 1"),
        (lambda r: fused(r, moments=[torch.zeros(5).byte()], scales=[torch.zeros(1)]), r"'moments\[0\]'.*4 elements"),
        (lambda r: fused(r, steps=[0.0]), r"'steps\[0\]'.*1 or more"),
        (lambda r: fused(r, groups=[1]), "'groups'.*from 0 to 1"),
        (lambda r: fused(r, options=[0.1] * 6), "'options'.*7 numbers a group, got 6"),
        (lambda r: fused(r, options=[0.1, 1.0, 0.9, 0.0, 0.0, 0.0, 0.0]), r"'options\[1\]'.*from 0 to 1"),
        (lambda r: fused(r, options=[float("nan"), 0.9, 0.9, 0.0, 0.0, 0.0, 0.0]), r"'options\[0\]'.*finite"),
        (lambda r: fused(r, sources=[X.bfloat16()]), r"'sources\[0\]'.*dtype of its master"),
        (lambda r: fused(r, masters=[X.short()], sources=[X], published=[X.bfloat16()]), r"'sources\[0\]'.*bfloat16"),
        (lambda r: fused(r, tickets=[r.foreign_ticket]), "another engine"),
        (lambda r: fused(r, tickets=[r.unit]), "a handle of a unit"),
    ],
    "update_square_sum": [
        (lambda r: (r.engine, [], [X], torch.zeros(2, dtype=torch.float64)), "'sums'.*1 float64, got Double"),
        (lambda r: (r.engine, [], [X], torch.zeros(1)), "'sums'.*1 float64, got Float"),
        (lambda r: (r.engine, [], [X.int()], torch.zeros(1, dtype=torch.float64)), r"\[0\]'.*float32, bfloat16"),
    ],
    "update_wait": [(lambda r: (r.engine, -1, 0), "'update'"), (lambda r: (r.engine, 10**6, 0), "1000000")],
    "encode_moment": [
        (lambda r: (X.double(), X.byte(), torch.zeros(1), 0), "'source'.*float32"),
        (lambda r: (X, torch.zeros(5).byte(), torch.zeros(1), 0), "'codes'.*4 uint8"),
        (lambda r: (X, X.byte(), torch.zeros(2), 0), "'scales'.*1 float32, one for 256"),
        (lambda r: (X, X.byte(), torch.zeros(1), 3), "'moment'.*0 to 3"),
    ],
    "decode_moment": [(lambda r: (X, torch.zeros(1), X.clone(), 0), "'codes'.*uint8")],
    "isa_force": [(lambda r: ("sse9",), "sse9")],
    "convert": [
        (lambda r: (torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), True), "float dtypes"),
        (lambda r: (X, torch.zeros(8)[::2], False), "'target'.*non-contiguous"),
        (lambda r: (torch.zeros(4, dtype=torch.complex64), torch.zeros(4), False), "both"),
    ],
    "trace_start": [(lambda r: (0,), "'capacity'")],
}  # fmt: skip
NOTHING_TO_MISUSE = {
    "host_stats", "error_take", "build_facts", "cuda_driver", "isa_names", "isa_active", "trace_stop",
    "data_plane_reports", "host_limits",
}  # fmt: skip


def test_every_operator_has_a_case() -> None:
    elsewhere = UPDATE_MISUSES | DATA_PLANE_MISUSES | {"linear_cross_entropy"}
    schemas = (Path(__file__).parents[1] / "csrc/ops/schemas.h").read_text()
    assert set(re.findall(r'def\("(\w+)\(', schemas)) == set(CASES) | elsewhere | NOTHING_TO_MISUSE


@pytest.mark.parametrize(
    ("name", "make", "text"), [(name, *case) for name, cases in CASES.items() for case in cases],
    ids=[f"{name}-{i}" for name, cases in CASES.items() for i in range(len(cases))],
)  # fmt: skip
def test_misuse(rig: SimpleNamespace, name: str, make: Callable[[SimpleNamespace], tuple[Any, ...]], text: str) -> None:
    before = _ops.engine_live(rig.engine)
    with pytest.raises(errors.ConfigError, match=text) as caught:
        getattr(_ops, name)(*make(rig))
    assert str(caught.value).startswith(f"roundpipe::{name}")
    assert isinstance(caught.value, ValueError)
    assert _ops.engine_live(rig.engine) == before  # nothing was left behind
    assert torch.ops.roundpipe.error_take() == ""  # and the failure was taken


def test_arguments_of_wrong_types_are_rejected_by_torch(rig: SimpleNamespace) -> None:
    with pytest.raises(errors.ConfigError):
        _ops.unit_close(rig.gone)
    for arguments in (("a",), (X,), (1.5,)):
        with pytest.raises((RuntimeError, TypeError), match="unit_close") as caught:
            _ops.unit_close(*arguments)
        assert not isinstance(caught.value, errors.RoundPipeError)


def test_a_raw_call_raises_runtime_error_and_leaves_a_record(rig: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="stale handle"):
        torch.ops.roundpipe.record_drop(rig.gone)
    kind, number, message = torch.ops.roundpipe.error_take().split("\x1f")
    assert (kind, number) == ("InvalidArgument", "0")
    assert message.startswith("roundpipe::record_drop: argument 'record'")
    assert torch.ops.roundpipe.error_take() == ""


def test_a_job_larger_than_the_region_is_out_of_device_memory(rig: SimpleNamespace) -> None:
    with pytest.raises(errors.DeviceOutOfMemory, match="CUDA out of memory") as caught:
        _ops.job_open(rig.engine, 0, [rig.big], [NONE], [NONE])
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.asked_bytes and caught.value.asked_bytes >= 16384


def test_a_region_above_the_devices_limit_is_out_of_device_memory() -> None:
    engine = _ops.engine_open("host", [0], 1 << 20, False)
    with pytest.raises(errors.DeviceOutOfMemory):
        _ops.engine_set_region(engine, 0, torch.empty(2 << 20, dtype=torch.uint8))
    _ops.engine_set_region(engine, 0, torch.empty(1 << 20, dtype=torch.uint8))
    _ops.engine_close(engine)


def test_a_pool_smaller_than_a_unit_is_refused(rig: SimpleNamespace) -> None:
    live = _ops.engine_live(rig.engine)
    with pytest.raises(errors.ConfigError, match="more than their pool has"):
        _ops.job_open(rig.engine, 0, [rig.unit], [NONE], [NONE], [0], rig.small_pool)
    assert _ops.engine_live(rig.engine) == live


def test_more_host_memory_than_there_is() -> None:
    with pytest.raises(errors.HostOutOfMemory, match="can't allocate memory") as caught:
        _ops.host_empty([1 << 50], torch.uint8)
    assert isinstance(caught.value, MemoryError) and caught.value.asked_bytes == 1 << 50


def test_an_aborted_job_poisons_who_waits_for_it() -> None:
    engine, image = _ops.engine_open("host", [0], 0, True), _ops.host_empty([256], torch.uint8)
    _ops.engine_set_region(engine, 0, torch.empty(4096, dtype=torch.uint8))
    unit = _ops.unit_open(engine, [_ops.host_empty([64], torch.float32)], [0], 256, 256)
    job = _ops.job_open(engine, 0, [unit], [NONE], [image])
    take = _ops.ticket_issue(unit, 4)
    update = _ops.update_convert(engine, take, [image.view(torch.float32)], [torch.zeros(64)], [0])
    _ops.job_abort(job)
    with pytest.raises(_ops.Poisoned):
        _ops.wait(_ops.update_wait, engine, update, timeout_s=20)
    for call in (_ops.job_close, lambda job: _ops.job_wait_unit(job, 0, 0)):
        with pytest.raises(errors.ConfigError, match="closed or aborted"):
            call(job)
    _ops.job_forget(job)
    with pytest.raises(errors.ConfigError, match="stale"):
        _ops.job_abort(job)
    _ops.wait(_ops.engine_wait_idle, engine, timeout_s=20)  # the lane ends the request that the job left behind
    _ops.unit_new_epoch(unit)
    _ops.unit_close(unit)
    _ops.engine_close(engine)
