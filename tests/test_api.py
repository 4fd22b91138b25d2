"""Names, places and signatures that scripts rely on, one row each."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

import roundpipe

PLACES = [
    ("roundpipe", "RoundPipe"),
    ("roundpipe", "RoundPipeRunConfig"),
    ("roundpipe", "ModelExecutePlan"),
    ("roundpipe", "OptimizerCtx"),
    ("roundpipe", "wrap_model_to_roundpipe"),
    ("roundpipe", "save_for_recompute"),
    ("roundpipe", "doing_recompute"),
    ("roundpipe", "get_recompute_data"),
    ("roundpipe", "optim"),
    ("roundpipe", "devices"),
    ("roundpipe", "use_devices"),
    ("roundpipe.roundpipe", "RoundPipe"),
    ("roundpipe.roundpipe", "AutoRoundPipe"),
    ("roundpipe.batch", "RoundPipePackedData"),
    ("roundpipe.device", "device_list"),
    ("roundpipe.models.function", "ChunkedCompileLinearForCausalLMLoss"),
    ("roundpipe.errors", "StageError"),
]


@pytest.mark.parametrize(("module", "name"), PLACES)
def test_names_are_where_scripts_look(module: str, name: str) -> None:
    roundpipe.use_devices("host:1")
    assert hasattr(importlib.import_module(module), name)
    if module == "roundpipe":
        assert name in roundpipe.__all__


SIGNATURES: list[tuple[Any, str]] = [
    (
        roundpipe.RoundPipe.forward_backward,
        "self, input_args, input_kwargs, label, loss_fn, return_outputs, run_config",
    ),
    (roundpipe.RoundPipe.forward, "self, *args, roundpipe_run_config, **kwargs"),
    (roundpipe.RoundPipe.step, "self, step_fn, is_async, *args, **kwargs"),
    (roundpipe.RoundPipe.optim_named_parameters, "self, prefix, remove_duplicate"),
    (roundpipe.RoundPipe.named_parameters, "self, prefix, recurse, remove_duplicate"),
    (roundpipe.ModelExecutePlan.check_valid, "self, num_layers, run_type"),
    (
        roundpipe.wrap_model_to_roundpipe,
        "model, use_sequential_preset, lower_threshold, upper_threshold, skip_modules, override_config, "
        "model_run_config, name, **roundpipe_kwargs",
    ),
    (
        roundpipe.RoundPipeRunConfig,
        "requires_grad, output_device, preserve_rng_state, recompute_grain, num_microbatch, split_input, split_label, "
        "merge_output, execute_plan",
    ),
    (roundpipe.RoundPipe, "model, optim_dtype, name, model_run_config, pin_model"),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_parameters_in_order(function: Any, expected: str) -> None:
    """What a script may pass by position or by name; more may follow."""
    prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [prefix.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values()]
    wanted = expected.split(", ")
    rest = [name for name in found if name not in wanted]
    assert [name for name in found if name in wanted] == wanted
    assert not rest or found.index(rest[0]) >= len([n for n in wanted if not n.startswith("**")])


def test_devices_of_the_list() -> None:
    from roundpipe import device

    roundpipe.use_devices("host:3")
    assert [one.device.type for one in device.device_list] == ["cpu"] * 3
    roundpipe.use_devices("host:2")
    assert len(device.device_list) == 2
    with pytest.raises(AttributeError, match="nothing"):
        _ = device.nothing


def test_importing_prints_nothing_and_decides_nothing() -> None:
    code = (
        "import roundpipe, roundpipe.device, roundpipe.roundpipe, roundpipe.batch\n"
        "roundpipe.use_devices('host:2')\n"
        "assert len(roundpipe.device.device_list) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
