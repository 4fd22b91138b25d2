"""Does one step of staleness cost loss? The demo's model, trained with exact and with asynchronous steps.

    python benchmarks/convergence.py --steps 100 --lr 0.003,0.01
    python benchmarks/convergence.py --plot benchmarks/results/convergence-2cores.json --to docs/convergence.svg

All runs start from the same weights and see the same batches: only the learning rate and the mode differ. Losses are
those of the training batches, in nats a token; the held-out loss is taken at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine_facts, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from finetune import build_model
from finetune_options import SIZES, Size
from heldout import heldout_loss
from stdlib_corpus import read_corpus, to_rows, train_tokenizer, unigram_loss

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe

PIECES = 2
COLOURS = ("#1b6ca8", "#c4451c", "#3a7d44", "#8a5a9e")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host:1", help="devices as in roundpipe.use_devices")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", default="0.003,0.01", help="peak learning rates, comma separated")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, help="draw this result instead of training")
    parser.add_argument("--to", type=Path, help="the SVG file to write")
    return parser.parse_args(argv)


def train(
    size: Size, tokenizer: Any, rows: torch.Tensor, kept: torch.Tensor, lr: float, steps: int, is_async: bool
) -> Any:
    """One run from the same beginning; the loss of every step and the held-out loss after the last."""
    model = wrap_model_to_roundpipe(build_model(size, tokenizer), use_sequential_preset=True, name="convergence")
    optimizer = roundpipe.optim.AdamW(model, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=1.0)
    order = torch.Generator().manual_seed(0)
    warmup = max(1, steps // 10)
    losses = []
    for step in range(steps):
        batch = rows[torch.randint(len(rows), (size.batch,), generator=order)]
        loss = model.forward_backward(
            input_kwargs=dict(input_ids=batch, labels=batch, return_logits=False),
            loss_fn=lambda output, _: output.loss / PIECES,
            run_config=RoundPipeRunConfig(num_microbatch=PIECES),
        )
        progress = (step - warmup) / max(1, steps - warmup)
        scale = (step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr * scale
        model.step(optimizer, is_async=is_async)
        losses.append(round(loss.item(), 4))
    return {"lr": lr, "async": is_async, "losses": losses, "heldout": heldout_loss(model, kept, size.batch)}


def measure(args: argparse.Namespace) -> None:
    roundpipe.use_devices(args.device)
    size = SIZES["tiny"]
    corpus = read_corpus(size.corpus_bytes)
    tokenizer = train_tokenizer(corpus.train, size.vocabulary)
    rows, kept = to_rows(tokenizer, corpus.train, size.seq), to_rows(tokenizer, corpus.heldout, size.seq)
    kept = kept[:: max(1, len(kept) * size.seq // 8_192)]
    print(machine_facts())
    runs = []
    for lr in map(float, args.lr.split(",")):
        for is_async in (False, True):
            runs.append(train(size, tokenizer, rows, kept, lr, args.steps, is_async))
            print(f"lr {lr}, {'async' if is_async else 'exact'}: held-out loss {runs[-1]['heldout']:.3f}", flush=True)
    settings = {"steps": args.steps, "device": args.device, "size": "tiny", "batch": size.batch, "seq": size.seq}
    unigram = unigram_loss(rows, kept, len(tokenizer))
    result = {"settings": settings, "token_frequencies": unigram, "runs": runs}
    print(f"written: {write_result('convergence', result, args.results)}")


def smooth(losses: list[float], width: int = 5) -> list[float]:
    """The mean of the last few steps."""
    return [
        sum(losses[max(0, i - width + 1) : i + 1]) / len(losses[max(0, i - width + 1) : i + 1])
        for i in range(len(losses))
    ]


def draw(result: dict[str, Any]) -> str:
    """An SVG: exact runs as lines, asynchronous ones dashed, a colour for each learning rate."""
    runs = [(run, smooth(run["losses"])) for run in result["runs"]]
    low, high = (f(value for _, curve in runs for value in curve) for f in (min, max))
    low, high, steps = math.floor(low), math.ceil(high), result["settings"]["steps"]
    left, top, width, height = 50, 20, 560, 300

    def at(step: float, loss: float) -> str:
        return f"{left + width * step / (steps - 1):.1f},{top + height * (high - loss) / (high - low):.1f}"

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 370" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="640" height="370" fill="white"/>')
    for loss in range(low, high + 1):
        (x0, y), (x1, _) = (point.split(",") for point in (at(0, loss), at(steps - 1, loss)))
        parts.append(
            f'<path d="M{x0} {y}H{x1}" stroke="#ddd"/><text x="{left - 8}" y="{y}" text-anchor="end">{loss}</text>'
        )
    rates = sorted({run["lr"] for run, _ in runs})
    for index, (run, curve) in enumerate(runs):
        colour = COLOURS[rates.index(run["lr"]) % len(COLOURS)]
        dashes = ' stroke-dasharray="5 3"' if run["async"] else ""
        points = " ".join(at(step, loss) for step, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        y = top + 16 + 18 * index
        mode = "asynchronous" if run["async"] else "exact"
        parts.append(f'<path d="M400 {y - 4}h30" stroke="{colour}" stroke-width="1.6"{dashes}/>')
        parts.append(f'<text x="438" y="{y}">lr {run["lr"]:g}, {mode}: {run["heldout"]:.3f} held out</text>')
    parts.append(f'<text x="{left}" y="{top + height + 22}">step 1</text>')
    parts.append(f'<text x="{left + width}" y="{top + height + 22}" text-anchor="end">step {steps}</text>')
    parts.append(
        f'<text x="{left + width / 2}" y="{top + height + 40}" text-anchor="middle">training loss, nats a token</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.plot is not None:
        args.to.write_text(draw(json.loads(args.plot.read_text())))
    else:
        measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
