"""Command line of `finetune.py`: what may be asked for, and one-line errors for what may not."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from command_line import Parser, UsageError, count, positive

from roundpipe import ModelExecutePlan


@dataclass(frozen=True)
class Size:
    """A model and the run that suits it. Widths in elements, seq in tokens, batch in rows."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    corpus_bytes: int
    seq: int
    batch: int
    steps: int
    lr: float


SIZES = {
    "tiny": Size(128, 4, 4, 2, 32, 384, 2048, 2_000_000, 128, 8, 200, 3e-3),
    "small": Size(512, 8, 8, 4, 64, 1536, 8192, 12_000_000, 512, 32, 250, 1e-3),
    "medium": Size(1024, 16, 16, 8, 64, 3072, 16384, 12_000_000, 1024, 32, 250, 5e-4),
    "large": Size(2048, 28, 16, 8, 128, 6144, 16384, 12_000_000, 2048, 16, 250, 3e-4),
}


def parse_arguments(argv: list[str] | None, description: str) -> argparse.Namespace:
    parser = Parser(description=description)
    parser.add_argument("--size", choices=SIZES, help="model size (default: small with a GPU, else tiny)")
    parser.add_argument("--seq", type=count, help="tokens a row")
    parser.add_argument("--batch", type=count, help="rows an iteration")
    parser.add_argument("--steps", type=count, help="iterations")
    parser.add_argument("--lr", type=positive, help="peak learning rate")
    parser.add_argument("--microbatches", type=count, help="pieces of a batch (default: up to devices + 1)")
    parser.add_argument("--grain", choices=("stage", "layer"), default="stage", help="recompute grain")
    parser.add_argument(
        "--plan", default="auto", help='auto, or "FORWARD|BACKWARD" stages, the fused one first: "0-1,2|3-5,1-2,0"'
    )
    parser.add_argument("--devices", help='"cuda:0,cuda:1", "host:4", "host:2@512MiB" (default: all GPUs)')
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--async", dest="is_async", action="store_true", default=True, help="optimizer beside the GPUs")
    mode.add_argument("--exact", dest="is_async", action="store_false", help="results as in plain PyTorch")
    parser.add_argument("--output", type=Path, default=Path("outputs/finetune"), help="directory of the checkpoint")
    return parser.parse_args(argv)


def parse_plan(text: str, num_layers: int) -> ModelExecutePlan | None:
    """The plan that `--plan` describes; None for "auto"."""
    if text == "auto":
        return None
    forward, bar, backward = text.partition("|")
    plan = ModelExecutePlan()
    try:
        if not bar:
            raise ValueError("there is no '|' between forward and backward stages")
        for part, stages in ((forward, plan.fwd_plan), (backward, plan.bwd_plan)):
            for piece in filter(None, part.split(",")):
                first, _, last = piece.partition("-")
                stages.append(range(int(first), int(last or first) + 1))
        plan.check_valid(num_layers, "fused")
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--plan {text!r} for {num_layers} layers (0-{num_layers - 1}): {reason}") from error
    return plan
