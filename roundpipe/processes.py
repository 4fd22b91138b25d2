"""How many processes share the work: one, so far."""

from __future__ import annotations

import os

import torch

from .errors import ConfigError


def refuse_several_processes() -> None:
    """Raises ConfigError in a process that a launcher (torchrun) started as one of several.

    Each of them would train a model of its own on the same GPUs, and nobody would add their gradients.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    count = int(launched) if launched.isdigit() else 1
    said_by = "WORLD_SIZE"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        count, said_by = torch.distributed.get_world_size(), "the process group"
    if count > 1:
        raise ConfigError(
            f"this is one of {count} processes (so says {said_by}), but RoundPipe uses all GPUs of the machine from a "
            "single process and does not train over several. Start it with plain `python` instead of torchrun (or with "
            "--nproc-per-node=1); choose GPUs by CUDA_VISIBLE_DEVICES."
        )
