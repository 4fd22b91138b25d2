"""``estimate``: the memory of training a language model, from its configuration alone."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import warnings
from typing import Any

import torch

from roundpipe.errors import ConfigError
from roundpipe.estimate import estimate_memory
from roundpipe.hf.meta_model import load_config, meta_model
from roundpipe.host_placement import MODES

__all__ = ["add", "run"]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MOST_GIB = 1 << 20


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "estimate",
        help="memory on devices and host, before a run",
        description="The memory that training a language model takes on each device and on the host, whether it fits, "
        "and the settings that should be quickest. Memory is given and printed in GiB. Exit code 1: nothing fits.",
    )
    parser.add_argument("--config", required=True, help="a folder, a JSON file, or a name on the hub (when online)")
    parser.add_argument("--seq", type=_count, required=True, help="tokens of a row")
    parser.add_argument("--batch", type=_count, default=1, help="rows of a forward_backward (default 1)")
    parser.add_argument("--gpu-memory", type=_gib, required=True, metavar="GIB", help="of each device")
    parser.add_argument("--host-memory", type=_gib, metavar="GIB", help="default: this machine's")
    parser.add_argument("--gpus", type=_count, default=1, help="devices (default 1)")
    parser.add_argument("--lora", type=_count, metavar="RANK", help="train adapters of this rank; the rest is frozen")
    parser.add_argument(
        "--optimizer",
        default="compact",
        help="compact:MASTER/STATE as in roundpipe.optim.AdamW(model, master=, state_dtype=), such as "
        "compact:split/int8 (default compact:split/float32); or adamw, adam, lion, sgd, sgd-momentum on parameters",
    )
    parser.add_argument("--optim-dtype", choices=_DTYPES, default="float32", help="of an optimizer on parameters")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights (default: the configuration's, or bfloat16)")
    parser.add_argument("--num-microbatch", type=_count, metavar="N", help="default: one more than devices")
    parser.add_argument("--recompute-grain", choices=("stage", "layer"), default="stage")
    parser.add_argument("--pin-model", choices=MODES, default="alloc")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("--exact", action="store_true", help="exact steps (default: asynchronous)")
    steps.add_argument(
        "--announced",
        action="store_true",
        help="steps announced with their call: forward_backward(..., step=optimizer)",
    )
    parser.add_argument("--accumulate", action="store_true", help="a step takes several forward_backward calls")
    parser.add_argument("--simulated", action="store_true", help="simulated devices' kernels instead of a GPU's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():  # libraries chat; stdout is ours
            warnings.simplefilter("ignore")
            found = _estimate(arguments)
    except ConfigError as error:
        raise ConfigError(f"estimate: {error}") from error
    print(json.dumps(found.as_dict(), indent=2) if arguments.json else found)
    return 0 if found.fastest is not None or found.fits else 1


def _estimate(arguments: argparse.Namespace) -> Any:
    model = meta_model(load_config(arguments.config), _DTYPES.get(arguments.dtype))
    return estimate_memory(
        model,
        arguments.batch,
        arguments.seq,
        num_microbatch=arguments.num_microbatch,
        recompute_grain=arguments.recompute_grain,
        pin_model=arguments.pin_model,
        optimizer=arguments.optimizer,
        optim_dtype=_DTYPES[arguments.optim_dtype],
        is_async=not arguments.exact,
        accumulates=arguments.accumulate,
        announced=arguments.announced,
        lora=arguments.lora,
        device_kind="host" if arguments.simulated else "cuda",
        num_devices=arguments.gpus,
        device_memory_bytes=arguments.gpu_memory,
        host_memory_bytes=arguments.host_memory,
    )


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 1 << 40:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive whole number")
    return int(text)


def _gib(text: str) -> int:
    """Bytes."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST_GIB:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of GiB")
    return int(value * 2**30)
