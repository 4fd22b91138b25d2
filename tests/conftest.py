"""Every test runs with the happens-before checker on; what it finds fails the test that was running."""

from __future__ import annotations

import os
import random
import signal
import sys

os.environ.setdefault("ROUNDPIPE_CHECK", "1")
os.environ.setdefault("ROUNDPIPE_STALL_SECONDS", "120")
# Processes of pytest-xdist share the cores. With as many threads in each as there are cores, every operator waits until
# the system has run them all: twenty times as long on a machine that does other things as well. Read when torch loads.
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(workers))))

from collections.abc import Iterator  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

# A shell starts its background jobs with Ctrl-C ignored, and so would we and every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REQUIRE_CUDA = os.environ.get("ROUNDPIPE_REQUIRE_CUDA") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, least in (("needs_cuda", 1), ("needs_multi_gpu", 2)):
        if torch.cuda.device_count() >= least:
            continue
        for item in items:
            if item.get_closest_marker(marker):
                if not (REQUIRE_CUDA and marker == "needs_cuda"):
                    item.add_marker(pytest.mark.skip(reason=f"needs {least} GPU(s)"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if REQUIRE_CUDA and item.get_closest_marker("needs_cuda") and not torch.cuda.is_available():
        pytest.fail("ROUNDPIPE_REQUIRE_CUDA=1, but torch sees no GPU")
    torch.manual_seed(0)  # or what a test draws would go by the tests before it
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


@pytest.fixture(autouse=True)
def engine_stays_clean() -> Iterator[None]:
    """No unordered access, no open job and no activation left behind."""
    yield
    from roundpipe import _ops
    from roundpipe import engine as engines

    reports = torch.ops.roundpipe.data_plane_reports()
    assert not reports, f"the happens-before checker reports of data-plane copies:\n{reports}"
    engine = engines._engine
    if engine is None or engine.closed:
        return
    engine.wait_idle()
    if engine.simulated:
        reports = _ops.engine_reports(engine.handle)
        assert not reports, f"the happens-before checker reports:\n{reports}"
    assert _ops.engine_live(engine.handle)[3] == 0, "a job is still open"


@pytest.fixture(autouse=True)
def compiler_forgets() -> Iterator[None]:
    """torch.compile counts recompilations of a function for the whole process, and gives up on it after some: PyTorch
    wraps every module of torch.nn in one and the same.
    """
    yield
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is not None and compiler.input_codes.seen:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def memory_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a machine that runs the other tests without; processes inherit it."""
    monkeypatch.delenv("ROUNDPIPE_SKIP_MEMORY_CHECK", raising=False)
