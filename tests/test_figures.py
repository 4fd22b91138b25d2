"""benchmarks/figures.py: its runs are runs that the benchmarks know, its goals are read from results as they are."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = BENCHMARKS / "results"
PUBLISHED = {
    "W2": "step_time-W2-compact-h200",
    "W1": "step_time-W1-compact-h200",
    "W6": "optimizer-h200",
    "step": "optimizer-step-2cores",
    "W7": "memory_per_parameter-2cores",
    "scaling-q17": "scaling-q17-2xh200",
    "scaling-moe": "scaling-moe-2xh200",
    "scaling-lora": "scaling-lora-2xh200",
}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module("figures")
    for name in set(sys.modules) - before:  # benchmarks have names that anybody may use
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == BENCHMARKS:
            del sys.modules[name]


def test_every_run_is_one_that_its_benchmark_takes(figures: Any) -> None:
    for name, figure in figures.FIGURES.items():
        script, *arguments = figure.command.split()
        benchmark = importlib.import_module(script.removesuffix(".py"))
        assert benchmark.parse_arguments([*arguments, "--results", "there"]).results == Path("there"), name


def test_goals_are_read_from_published_results(figures: Any) -> None:
    for name, published in PUBLISHED.items():
        result = json.loads((RESULTS / f"{published}.json").read_text())
        for goal in figures.FIGURES[name].goals:
            value = goal.read(result)
            assert isinstance(value, float) and value == value, (name, goal.what)
            edge = goal.bound
            assert goal.met(edge) and goal.met(edge + 0.01) is goal.least and goal.met(edge - 0.01) is not goal.least


def test_a_table_is_made_of_runs_that_end_well_and_others(
    figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent))
    small = "optimizer.py --parameters 1e4 --repeats 1 --threads 1"
    goals = figures.FIGURES["W6"].goals
    hopeless = figures.Goal("nobody is so fast", figures.split_seconds, 0.0)
    monkeypatch.setattr(
        figures,
        "FIGURES",
        {
            "ours": figures.Figure(small, [goals[1], hopeless], seconds=1, gpus=0),
            "wrong": figures.Figure(f"{small} --isa abacus", goals, seconds=1, gpus=0),
            "partial": figures.Figure(f"{small} --variants split", goals, seconds=1, gpus=0),
            "long": figures.Figure(small, goals, seconds=1e6, gpus=0),
            "many": figures.Figure(small, goals, seconds=1, gpus=1000),
        },
    )
    everything = ["--only", "ours,wrong,partial,long,many", "--seconds", "100", "--results", str(tmp_path)]
    assert figures.main(everything) == 1
    (written,) = tmp_path.glob("figures-*.json")
    table = json.loads(written.read_text())["figures"]
    kept = [json.loads(path.read_text()) for path in tmp_path.glob("optimizer-*.json")]
    found = table["ours"]["goals"]["nobody is so fast"]
    assert found["measured"] in [figures.split_seconds(one) for one in kept]
    assert (found["goal"], found["least"]) == (0.0, False)
    assert table["partial"]["failed"] == "its result has no 'torch'" and "goals" not in table["partial"]
    assert "abacus" in table["wrong"]["failed"] and "exit status" in table["wrong"]["failed"]
    assert "would take" in table["long"]["left_out"] and "1000 GPUs" in table["many"]["left_out"]
    out = capsys.readouterr().out
    assert out.count("MISSED") >= 1 and str(tmp_path) in out
