"""The public interface as a table: every name, every signature with its defaults, every rule is one row."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import roundpipe

from . import api_batches, api_model, api_rest, api_wrapping
from .api_rows import ROWS

assert api_batches and api_model and api_rest and api_wrapping  # imported for their rows

PLACES = [
    *(("roundpipe", name) for name in roundpipe.__all__),
    ("roundpipe", "doing_recompute"),
    ("roundpipe", "OptimizerCtx"),
    ("roundpipe", "get_recompute_data"),
    ("roundpipe", "save_for_recompute"),
    ("roundpipe", "optim"),
    ("roundpipe", "RoundPipe"),
    ("roundpipe", "RoundPipeRunConfig"),
    ("roundpipe", "ModelExecutePlan"),
    ("roundpipe", "wrap_model_to_roundpipe"),
    ("roundpipe", "GradScaler"),
    ("roundpipe", "ModelTimer"),
    ("roundpipe", "devices"),
    ("roundpipe", "use_devices"),
    ("roundpipe", "errors"),
    ("roundpipe.timer", "ModelTimer"),
    ("roundpipe.batch", "RoundPipePackedData"),
    ("roundpipe.roundpipe", "RoundPipe"),
    ("roundpipe.roundpipe", "AutoRoundPipe"),
    ("roundpipe.models.function", "ChunkedCompileLinearForCausalLMLoss"),
    ("roundpipe.device", "device_list"),
    *(("roundpipe.optim", name) for name in ("Adam", "AdamW", "SGD", "Lion")),
]


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


@pytest.mark.parametrize(("module", "name"), dict.fromkeys(PLACES))
def test_names(module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name)
    if module == "roundpipe" and name != "errors":
        assert name in roundpipe.__all__


NOTHING = inspect.Parameter.empty
SIGNATURES: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (
        roundpipe.RoundPipe,
        {
            "model": NOTHING,
            "optim_dtype": None,
            "name": None,
            "model_run_config": None,
            "pin_model": "alloc",
            "compile": False,
        },
    ),
    (
        roundpipe.RoundPipe.forward,
        {"self": NOTHING, "*args": NOTHING, "roundpipe_run_config": None, "**kwargs": NOTHING},
    ),
    (
        roundpipe.RoundPipe.forward_backward,
        {
            "self": NOTHING,
            "input_args": (),
            "input_kwargs": None,
            "label": None,
            "loss_fn": "a function",
            "return_outputs": False,
            "run_config": None,
            "step": None,
        },
    ),
    (
        roundpipe.RoundPipe.step,
        {"self": NOTHING, "step_fn": NOTHING, "is_async": True, "*args": NOTHING, "**kwargs": NOTHING},
    ),
    (roundpipe.RoundPipe.synchronize, {"self": NOTHING}),
    (roundpipe.RoundPipe.optim_parameters, {"self": NOTHING}),
    (roundpipe.RoundPipe.optim_named_parameters, {"self": NOTHING, "prefix": "", "remove_duplicate": True}),
    (roundpipe.RoundPipe.set_original_model, {"self": NOTHING, "model": NOTHING}),
    (
        roundpipe.RoundPipeRunConfig,
        dict.fromkeys(
            (
                "requires_grad",
                "output_device",
                "preserve_rng_state",
                "recompute_grain",
                "num_microbatch",
                "split_input",
                "split_label",
                "merge_output",
                "execute_plan",
                "on_oom",
            )
        ),
    ),
    (roundpipe.ModelExecutePlan, {}),
    (roundpipe.ModelExecutePlan.check_valid, {"self": NOTHING, "num_layers": NOTHING, "run_type": NOTHING}),
    (
        roundpipe.ModelExecutePlan.auto,
        {
            "run_type": NOTHING,
            "*models": NOTHING,
            "min_stages": None,
            "upper_threshold": 1.1,
            "model_memory_limit": None,
        },
    ),
    (roundpipe.ModelExecutePlan.explain, {"self": NOTHING}),
    (roundpipe.save_for_recompute, {"*data": NOTHING}),
    (roundpipe.doing_recompute, {}),
    (roundpipe.get_recompute_data, {}),
    (roundpipe.OptimizerCtx, {}),
    (
        roundpipe.save,
        {
            "model": NOTHING,
            "optimizer": NOTHING,
            "scaler": NOTHING,
            "directory": NOTHING,
            "scheduler": None,
            "metadata": None,
            "rng_state": True,
            "trainable_only": False,
            "overwrite": False,
            "max_shard_bytes": 5_000_000_000,
        },
    ),
    (
        roundpipe.load,
        {
            "model": NOTHING,
            "optimizer": NOTHING,
            "scaler": NOTHING,
            "directory": NOTHING,
            "scheduler": None,
            "rng_state": None,
        },
    ),
    (roundpipe.devices, {}),
    (roundpipe.use_devices, {"spec": NOTHING}),
    (
        roundpipe.optim.Adam,
        {
            "params": NOTHING,
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0,
            "amsgrad": False,
            "foreach": None,
            "maximize": False,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": False,
        },
    ),
    (
        roundpipe.GradScaler,
        {
            "init_scale": 2.0**16,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": 2000,
            "enabled": True,
        },
    ),
    (roundpipe.GradScaler.update, {"self": NOTHING, "new_scale": None, "is_async": True}),
    *(
        (getattr(roundpipe.GradScaler, f"get_{name}"), {"self": NOTHING, "up_to_date": False})
        for name in ("scale", "growth_factor", "backoff_factor", "growth_interval")
    ),
    (
        roundpipe.wrap_model_to_roundpipe,
        {
            "model": NOTHING,
            "use_sequential_preset": None,
            "lower_threshold": 16 * 1024,
            "upper_threshold": None,
            "skip_modules": (),
            "override_config": {},
            "model_run_config": None,
            "name": None,
            "**roundpipe_kwargs": NOTHING,
        },
    ),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=[f.__qualname__ for f, _ in SIGNATURES])
def test_signatures(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    """Arguments in their order with their defaults; what is ours may follow behind."""
    prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = {
        prefix.get(p.kind, "") + p.name: "a function" if callable(p.default) and p.default is not NOTHING else p.default
        for p in inspect.signature(function).parameters.values()
    }
    assert {name: value for name, value in found.items() if name in expected} == expected
    named = [name for name in found if not name.startswith("**")]
    assert named[: len([n for n in expected if not n.startswith("**")])] == [n for n in expected if n[:2] != "**"]


@pytest.mark.parametrize("name", ROWS)
def test_rules(name: str) -> None:
    ROWS[name]()


def test_importing_prints_nothing_and_decides_nothing() -> None:
    code = (
        "import roundpipe, roundpipe.device, roundpipe.roundpipe, roundpipe.batch, roundpipe.timer\n"
        "roundpipe.use_devices('host:2')\n"
        "assert len(roundpipe.device.device_list) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
