"""What the command lines of these examples share: kinds of numbers, devices, and errors of one line."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable

import torch

import roundpipe


class UsageError(Exception):
    """A wrong option: reported in one line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        # argparse prints its usage before an error; one line is easier to find.
        raise UsageError(message)


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def choose_devices(wanted: str | None) -> list:
    """The devices of `--devices`; without it all GPUs, or one simulated device."""
    try:
        # Without a GPU the examples run on a simulated device; said here, it needs no warning.
        simulated = not torch.cuda.is_available() and "ROUNDPIPE_DEVICES" not in os.environ
        if wanted := wanted or ("host:1" if simulated else None):
            roundpipe.use_devices(wanted)
        return list(roundpipe.devices())
    except ValueError as error:
        raise UsageError(f"--devices {wanted}: {' '.join(str(error).split())}") from error


def choose_pieces(wanted: int | None, batch: int) -> int:
    """Microbatches of a batch: `--microbatches`, else up to devices + 1. They divide the rows, so that all weigh
    alike."""
    if wanted is None:
        return max(n for n in range(1, len(roundpipe.devices()) + 2) if batch % n == 0)
    pieces = wanted
    if pieces > batch:
        raise UsageError(f"--microbatches {pieces}: a batch has only {batch} rows (--batch)")
    if batch % pieces:
        raise UsageError(f"--microbatches {pieces}: does not divide the {batch} rows of a batch (--batch)")
    return pieces


def run_main(name: str, run: Callable[[], None]) -> int:
    """Runs an example; gives its exit status."""
    try:
        run()
    except UsageError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    return 0
