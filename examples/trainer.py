"""Trains a small language model with RoundPipeTrainer: the Trainer of transformers, with the model streamed.

    python examples/trainer.py                                  on all GPUs, or on a simulated device without one
    python examples/trainer.py --devices host:2 --optimizer compact
    python examples/trainer.py --steps 200 --resume             goes on from the newest checkpoint in --output

The text is the source of Python's standard library; the evaluation loss is of files that were kept out of training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from command_line import Parser, UsageError, choose_devices, choose_pieces, count, positive, run_main
from finetune import build_model
from finetune_options import SIZES
from stdlib_corpus import read_corpus, to_rows, train_tokenizer

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.hf import RoundPipeTrainer


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="model size (default: tiny)")
    parser.add_argument("--seq", type=count, default=128, help="tokens a row (default: 128)")
    parser.add_argument("--batch", type=count, default=8, help="rows of one call (default: 8)")
    parser.add_argument("--accumulate", type=count, default=1, help="calls a step (default: 1)")
    parser.add_argument("--steps", type=count, default=100, help="steps (default: 100)")
    parser.add_argument("--lr", type=positive, default=3e-3, help="peak learning rate (default: 3e-3)")
    parser.add_argument("--microbatches", type=count, help="pieces of a batch (default: up to devices + 1)")
    parser.add_argument(
        "--optimizer",
        choices=("adamw", "compact"),
        default="compact",
        help="adamw: torch's, on a float32 copy of the weights; compact: roundpipe.optim.AdamW, in half of the memory",
    )
    parser.add_argument("--devices", help='"cuda:0,cuda:1", "host:4" (default: all GPUs, or one simulated device)')
    parser.add_argument("--output", type=Path, default=Path("outputs/trainer"), help="directory of the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --output")
    return parser.parse_args(argv)


class Rows(torch.utils.data.Dataset):
    """Rows of tokens, int64 [rows, length], whose labels are the tokens themselves."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


def training_arguments(args: argparse.Namespace) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        str(args.output),
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 10),
        weight_decay=0.1,
        logging_steps=max(1, args.steps // 10),
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 2),
        save_steps=max(1, args.steps // 2),
        save_total_limit=2,
        report_to=[],
        dataloader_pin_memory=False,  # RoundPipe copies batches into pinned memory itself
        seed=0,
    )


def run(args: argparse.Namespace) -> None:
    devices = choose_devices(args.devices)
    pieces = choose_pieces(args.microbatches, args.batch)
    if args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output}: is a file, expected a directory")
    if args.resume and not list(args.output.glob("checkpoint-*")):
        raise UsageError(f"--resume: there is no checkpoint in {args.output} (--output)")
    size = SIZES[args.size]
    corpus = read_corpus(size.corpus_bytes)
    tokenizer = train_tokenizer(corpus.train, size.vocabulary)
    rows, kept = to_rows(tokenizer, corpus.train, args.seq), to_rows(tokenizer, corpus.heldout, args.seq)
    if len(rows) == 0 or len(kept) == 0:
        raise UsageError(f"--seq {args.seq}: longer than the texts there are to train on or to test with")
    kept = kept[:: max(1, len(kept) * args.seq // 8192)]
    model = build_model(size, tokenizer)
    count_ = sum(p.numel() for p in model.parameters())
    print(f"model: {args.size}, {count_ / 1e6:.1f} M parameters; devices: {', '.join(d.name for d in devices)}")

    compact = dict(optimizer_cls_and_kwargs=(roundpipe.optim.AdamW, {"betas": (0.9, 0.95)}))
    trainer = RoundPipeTrainer(
        model=model,  # on the CPU, and it stays there
        args=training_arguments(args),
        train_dataset=Rows(rows),
        eval_dataset=Rows(kept),
        processing_class=tokenizer,
        run_config=RoundPipeRunConfig(num_microbatch=pieces),
        **(compact if args.optimizer == "compact" else {}),
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=args.resume or None)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    print(f"held-out loss after: {after:.3f}  (before: {before:.3f}); {trainer.state.global_step} steps in all")
    print(f"model: {args.output}, for plain transformers to load")


def main(argv: list[str] | None = None) -> int:
    return run_main("trainer.py", lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
