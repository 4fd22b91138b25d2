"""RoundPipe: train models far larger than GPU memory on one machine.

Weights, gradients and optimizer state live in host memory; stages of layers are streamed to any GPU, or to simulated
devices where there is none.
"""

from __future__ import annotations

from . import data_plane, optim
from .activation_offload import offload_activations
from .checkpoint import load, save
from .devices import devices, use_devices
from .estimate import estimate_memory
from .grad_scaler import GradScaler
from .memory import memory_report
from .model import RoundPipe
from .optimizer_context import OptimizerCtx
from .plan import ModelExecutePlan
from .recompute import doing_recompute, get_recompute_data, save_for_recompute
from .run_config import RoundPipeRunConfig
from .timeline import trace
from .timer import ModelTimer
from .wrap import wrap_model_to_roundpipe

__version__ = "0.1.0"

__all__ = [
    "GradScaler",
    "ModelExecutePlan",
    "ModelTimer",
    "OptimizerCtx",
    "RoundPipe",
    "RoundPipeRunConfig",
    "data_plane",
    "devices",
    "doing_recompute",
    "estimate_memory",
    "get_recompute_data",
    "load",
    "memory_report",
    "offload_activations",
    "optim",
    "save",
    "save_for_recompute",
    "trace",
    "use_devices",
    "wrap_model_to_roundpipe",
]
