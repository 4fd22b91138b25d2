"""Does everything hold on this machine's GPUs?

Runs the whole test suite with skipped GPU tests counted as failures, the GPU tests under compute-sanitizer's memcheck,
and the demo, and writes what came out as JSON. `--steps` chooses some of them.

    python benchmarks/gpu_suite.py --jobs 14
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import torch
from common import write_result

ROOT = Path(__file__).parent.parent
# Without cases that run out of memory on purpose: failing driver calls are what they are about. Random plans would take
# half an hour, and each process first instruments torch's kernels for itself: those of cuDNN's recurrent layers alone
# take it minutes.
MEMCHECKED = "not random_plans and not out_of_memory and not recurrent"
MEMCHECK_JOBS = 5


def pytest_counts(arguments: list[str], command: list[str], limit_s: float, env: dict[str, str]) -> dict[str, Any]:
    """Runs pytest, possibly under another program; counts from its junit file, which a killed run lacks."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        start = time.perf_counter()
        full = [*command, sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *arguments]
        exit_code, output = run(full, limit_s, env)
        counts: dict[str, Any] = {"exit_code": exit_code, "wall_s": round(time.perf_counter() - start, 1)}
        if report.exists():
            suite = ElementTree.parse(report).getroot().find("testsuite")
            assert suite is not None
            number = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
            counts |= number | {"passed": number["tests"] - sum(number[n] for n in ("failures", "errors", "skipped"))}
            cases = [c for c in suite if c.find("failure") is not None or c.find("error") is not None]
            counts["failed"] = [f"{c.get('classname')}::{c.get('name')}" for c in cases]
        if exit_code:
            print(output, file=sys.stderr)
        counts["output"] = output
        return counts


def run(command: list[str], limit_s: float, env: dict[str, str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | env,
            timeout=limit_s,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return 124, output if isinstance(output, str) else output.decode(errors="replace")


def suite(args: argparse.Namespace) -> dict[str, Any]:
    arguments = ["-n", str(args.jobs), "--dist", "loadfile", *(args.tests or ["tests"])]
    counts = pytest_counts(arguments, [], args.limit, {"ROUNDPIPE_REQUIRE_CUDA": "1"})
    return counts | {"output": counts["output"].strip().splitlines()[-1:]}


def sanitizer(args: argparse.Namespace) -> dict[str, Any]:
    # With the caching allocator off every tensor is an allocation of its own, so that memcheck sees its bounds.
    env = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ROUNDPIPE_REQUIRE_CUDA": "1", "ROUNDPIPE_STALL_SECONDS": "600"}
    with tempfile.TemporaryDirectory() as folder:  # a log for each process of xdist
        tool = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--log-file", f"{folder}/%p"]
        tests = ["tests/test_cuda.py", "-n", str(min(args.jobs, MEMCHECK_JOBS)), "-k", MEMCHECKED]
        counts = pytest_counts(tests, tool, args.limit, env)
        logs = "".join(path.read_text(errors="replace") for path in Path(folder).iterdir())
    del counts["output"]
    found = [int(errors) for errors in re.findall(r"ERROR SUMMARY: (\d+) error", logs)]
    if sum(found):
        counts["exit_code"] = counts["exit_code"] or 9
        print(logs[:20_000], file=sys.stderr)
    return counts | {"processes": len(found), "memcheck_errors": sum(found) if found else None}


def demo(args: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        exit_code, output = run([sys.executable, "examples/finetune.py", "--output", folder], args.limit, {})
    lines = [line for line in output.splitlines() if "loss" in line or "equal" in line]
    return {"exit_code": exit_code, "wall_s": round(time.perf_counter() - start, 1), "lines": lines[-8:]}


STEPS = {"suite": suite, "sanitizer": sanitizer, "demo": demo}


def commit() -> str:
    exit_code, output = run(["git", "describe", "--always", "--dirty", "--abbrev=12"], 30, {})
    return output.strip() if exit_code == 0 else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(STEPS), help="which of suite, sanitizer, demo")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2), help="test processes")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds that one step may take")
    parser.add_argument("--tests", nargs="*", help="test files instead of the whole suite")
    parser.add_argument("--output", type=Path, help="directory of the result (default: benchmarks/results)")
    args = parser.parse_args()
    chosen = args.steps.split(",")
    if unknown := [name for name in chosen if name not in STEPS]:
        parser.error(f"--steps: unknown {unknown}; known: {list(STEPS)}")
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU; the suite on simulated devices is `make test`")
    results: dict[str, Any] = {}
    for name in chosen:
        results[name] = STEPS[name](args)
        print(name, {key: value for key, value in results[name].items() if key != "output"}, flush=True)
    result = {"commit": commit(), "steps": results}
    print(write_result("gpu_suite", result, args.output) if args.output else write_result("gpu_suite", result))
    return int(any(step["exit_code"] for step in results.values()))


if __name__ == "__main__":
    sys.exit(main())
