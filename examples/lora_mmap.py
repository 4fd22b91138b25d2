"""Trains LoRA adapters on a model whose weights stay in their safetensors files, mapped and never copied to memory.

    python examples/lora_mmap.py --model path/to/a/model         a folder that transformers can load
    python examples/lora_mmap.py --devices host:2 --steps 20     without one: a small model with random weights

The frozen weights are read from the page cache, or from the disk where they are larger than memory; only adapters have
gradients and optimizer state. The text is the source of Python's standard library; the loss is of files that were kept
out of training.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from command_line import Parser, UsageError, choose_devices, choose_pieces, count, positive, run_main
from heldout import heldout_loss
from peft import LoraConfig, PeftModel, get_peft_model
from stdlib_corpus import read_corpus, to_rows, train_tokenizer

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe

CORPUS_BYTES = 1_000_000


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with config, tokenizer and safetensors files")
    parser.add_argument("--rank", type=count, default=8, help="of the adapters (default: 8)")
    parser.add_argument("--seq", type=count, default=128, help="tokens a row (default: 128)")
    parser.add_argument("--batch", type=count, default=8, help="rows an iteration (default: 8)")
    parser.add_argument("--steps", type=count, default=100, help="iterations (default: 100)")
    parser.add_argument("--lr", type=positive, default=1e-3, help="learning rate (default: 1e-3)")
    parser.add_argument("--microbatches", type=count, help="pieces of a batch (default: up to devices + 1)")
    parser.add_argument("--devices", help='"cuda:0,cuda:1", "host:4" (default: all GPUs, or one simulated device)')
    parser.add_argument("--output", type=Path, default=Path("outputs/lora_mmap"), help="directory of the adapter")
    return parser.parse_args(argv)


def random_base(folder: Path, texts: list[str]) -> None:
    """A small model with random weights and a tokenizer of its own, saved as any other."""
    tokenizer = train_tokenizer(texts, 2048)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        head_dim=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load_mapped(folder: Path) -> transformers.PreTrainedModel:
    """The model, frozen, its weights over the mapped files. The dtype is the one in which they are saved:
    converting them would copy them."""
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").requires_grad_(False)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {folder}: {' '.join(str(error).split())[:300]}") from error


def train(model, rows: torch.Tensor, args: argparse.Namespace, pieces: int) -> None:
    optimizer = roundpipe.optim.AdamW(model, lr=args.lr, weight_decay=0.0, max_grad_norm=1.0)  # of the adapters alone
    config = RoundPipeRunConfig(num_microbatch=pieces)
    order = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        batch = rows[torch.randint(len(rows), (args.batch,), generator=order)]
        loss = model.forward_backward(
            input_kwargs=dict(input_ids=batch, labels=batch, return_logits=False),
            loss_fn=lambda output, _: output.loss / pieces,
            run_config=config,
        )
        model.step(optimizer)
        if (step + 1) % max(1, args.steps // 10) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.synchronize()


def save_and_check(model, adapted: PeftModel, folder: Path, output: Path, rows: torch.Tensor) -> None:
    """Writes the adapter; what PEFT makes of it and the base must compute the same."""
    adapted.save_pretrained(output)
    again = PeftModel.from_pretrained(load_mapped(folder), output)
    config = RoundPipeRunConfig(num_microbatch=len(rows))
    with torch.no_grad():
        got = model(input_ids=rows, roundpipe_run_config=config).logits.float()
        want = again(input_ids=rows).logits.float()
    difference = ((got - want).abs().max() / want.abs().max()).item()
    if difference > 0.05:
        raise RuntimeError(f"streamed and reloaded logits differ by {difference:.3g} of the largest")
    print(f"adapter: {output}, loaded again by PEFT: logits within {difference:.1e} of the largest")


def run(args: argparse.Namespace) -> None:
    devices = choose_devices(args.devices)
    pieces = choose_pieces(args.microbatches, args.batch)
    if args.model is not None and not args.model.is_dir():
        raise UsageError(f"--model {args.model}: is no directory; expected a folder with a model's files")
    if args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output}: is a file, expected a directory")
    corpus = read_corpus(CORPUS_BYTES)
    folder = args.model
    if folder is None:
        folder = args.output / "base"
        random_base(folder, corpus.train)
    base = load_mapped(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows, kept = to_rows(tokenizer, corpus.train, args.seq), to_rows(tokenizer, corpus.heldout, args.seq)
    if len(rows) == 0 or len(kept) == 0:
        raise UsageError(f"--seq {args.seq}: longer than the texts there are to train on or to test with")
    kept = kept[:: max(1, len(kept) * args.seq // 4096)]

    adapted = get_peft_model(base, LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"))
    # "off": nothing is page-locked. Mapped weights go up through pinned buffers that threads fill, reading files ahead.
    model = wrap_model_to_roundpipe(adapted, use_sequential_preset=True, pin_model="off")
    frozen = sum(p.numel() * p.element_size() for p in adapted.parameters() if not p.requires_grad)
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    mapped = roundpipe.memory_report().host.mapped_bytes
    print(
        f"frozen: {frozen / 1e6:.1f} MB, of which {mapped / 1e6:.1f} MB mapped from {folder}; "
        f"trained: {trained:,} parameters of adapters; devices: {', '.join(d.name for d in devices)}"
    )
    before = heldout_loss(model, kept, args.batch)
    train(model, rows, args, pieces)
    print(f"held-out loss after: {heldout_loss(model, kept, args.batch):.3f}  (before: {before:.3f})")
    save_and_check(model, adapted, folder, args.output, kept[:2])


def main(argv: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    return run_main("lora_mmap.py", lambda: run(parse_arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
