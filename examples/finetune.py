"""Trains a small language model with RoundPipe, from tokenizer to a checkpoint that plain transformers loads.

    python examples/finetune.py                              on all GPUs, or on a simulated device without one
    python examples/finetune.py --devices host:2 --plan "0-1,2|3-5,1-2,0"

Every number it prints is measured in this run, on files that were kept out of training.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from command_line import UsageError, choose_devices, choose_pieces, run_main
from finetune_options import SIZES, Size, parse_arguments, parse_plan
from heldout import heldout_loss
from stdlib_corpus import read_corpus, to_rows, train_tokenizer, unigram_loss
from tqdm import tqdm

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe


def build_model(size: Size, tokenizer) -> transformers.PreTrainedModel:
    """A Qwen3 with fresh weights: float32 on the CPU, bfloat16 for GPUs (the optimizer keeps float32 either way)."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        intermediate_size=size.mlp,
        max_position_embeddings=max(4096, size.seq),
        tie_word_embeddings=True,
        # The usual 0.02 suits wide models; a narrow one starts so small that a short run would end on a plateau.
        initializer_range=0.7 / math.sqrt(size.hidden),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # Not `.to(torch.bfloat16)`, which would also round the rotary frequencies that loading a checkpoint keeps exact.
    dtype = torch.bfloat16 if _on_gpu() else torch.float32
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _on_gpu() -> bool:
    return any(device.kind == "cuda" for device in roundpipe.devices())


def memory_text() -> dict[str, str]:
    """What this process holds, for the progress bar."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    text = {"host": f"{pages * 4096 / 1e9:.2f}GB"}
    if _on_gpu():
        peak = max(torch.cuda.max_memory_reserved(d.ordinal) for d in roundpipe.devices() if d.kind == "cuda")
        text["gpu"] = f"{peak / 1e9:.2f}GB"
    return text


def train(model, rows: torch.Tensor, size: Size, args: argparse.Namespace, config: RoundPipeRunConfig) -> None:
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        parameters = list(model.parameters())
    pieces = config.num_microbatch

    def update(lr: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    order = torch.Generator().manual_seed(0)
    warmup = max(1, size.steps // 10)
    begin = time.perf_counter()
    bar = tqdm(range(size.steps), unit="step", mininterval=0.5 if sys.stderr.isatty() else 10)
    for step in bar:
        batch = rows[torch.randint(len(rows), (size.batch,), generator=order)]
        loss = model.forward_backward(
            input_kwargs=dict(input_ids=batch, labels=batch, return_logits=False),
            # forward_backward adds the microbatches up; the mean over the batch is what the learning rate expects.
            loss_fn=lambda output, _: output.loss / pieces,
            run_config=config,
        )
        progress = (step - warmup) / max(1, size.steps - warmup)
        lr = size.lr * ((step + 1) / warmup if step < warmup else 0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        model.step(update, args.is_async, lr)
        speed = size.batch * size.seq * (step + 1) / (time.perf_counter() - begin)
        bar.set_postfix(loss=f"{loss.item():.3f}", tokens_per_s=f"{speed:,.0f}", **memory_text(), refresh=False)
    model.synchronize()
    seconds = time.perf_counter() - begin
    print(f"trained: {size.steps} steps, {seconds:.1f} s, {size.steps * size.batch * size.seq / seconds:,.0f} tokens/s")


def save_and_prove(model, hf_model, tokenizer, rows: torch.Tensor, output: Path) -> transformers.PreTrainedModel:
    """Writes the checkpoint and loads it with plain transformers; weights and logits must be the same, bit by bit.

    The logits are those of copies of both models: which kernel a matrix product takes, and so the last bit of its sums,
    depends on where the weights happen to lie in memory.
    """
    model.synchronize()
    hf_model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    again = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=hf_model.dtype).eval()
    hf_model.eval()
    loaded = again.state_dict()
    if different := [name for name, value in hf_model.state_dict().items() if not torch.equal(value, loaded[name])]:
        raise RuntimeError(f"the checkpoint holds other weights: {', '.join(different)}")
    with torch.no_grad():
        wanted = copy.deepcopy(hf_model)(input_ids=rows).logits
        got = copy.deepcopy(again)(input_ids=rows).logits
        streamed = model(input_ids=rows).logits
    if not torch.equal(got, wanted):
        raise RuntimeError(f"the checkpoint gives other logits: they differ by {(got - wanted).abs().max().item():.3g}")
    difference = (streamed.float() - got.float()).abs().max() / got.float().abs().max()
    if difference > (0.05 if hf_model.dtype == torch.bfloat16 else 1e-4):
        raise RuntimeError(f"streamed and reloaded logits differ by {difference.item():.3g} of the largest")
    print(
        f"checkpoint: {output}, reloaded by plain transformers: logits equal "
        f"(streamed ones within {difference.item():.1e} of the largest)"
    )
    return again


def sample(model: transformers.PreTrainedModel, tokenizer, prompt: str = "    def __init__(self, ") -> None:
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=60,
        do_sample=True,
        top_k=20,
    )
    print(f"sample: {tokenizer.decode(ids[0], skip_special_tokens=True)}")


def run(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    devices = choose_devices(args.devices)
    if args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output}: is a file, expected a directory")
    size_name = args.size or ("small" if _on_gpu() else "tiny")
    chosen = {name: getattr(args, name) for name in ("seq", "batch", "steps", "lr") if getattr(args, name) is not None}
    size = replace(SIZES[size_name], **chosen)
    pieces = choose_pieces(args.microbatches, size.batch)
    plan = parse_plan(args.plan, size.layers + 2)

    corpus = read_corpus(size.corpus_bytes)
    tokenizer = train_tokenizer(corpus.train, size.vocabulary)
    rows, kept = to_rows(tokenizer, corpus.train, size.seq), to_rows(tokenizer, corpus.heldout, size.seq)
    if len(rows) == 0 or len(kept) == 0:
        raise UsageError(f"--seq {size.seq}: longer than the texts there are to train on or to test with")
    kept = kept[:: max(1, len(kept) * size.seq // 16_384)]
    hf_model = build_model(size, tokenizer)
    count = sum(p.numel() for p in hf_model.parameters())
    print(
        f"model: {size_name}, {count / 1e6:.1f} M parameters, vocabulary {len(tokenizer)}; "
        f"text: {rows.numel():,} tokens to train on; devices: {', '.join(d.name for d in devices)}"
    )

    model = wrap_model_to_roundpipe(hf_model, use_sequential_preset=True, name="demo", optim_dtype=torch.float32)
    config = RoundPipeRunConfig(num_microbatch=pieces, recompute_grain=args.grain, execute_plan=plan)
    unigram = unigram_loss(rows, kept, len(tokenizer))
    before = heldout_loss(model, kept, size.batch)
    print(f"held-out loss before: {before:.3f}  (token frequencies alone: {unigram:.3f})")
    train(model, rows, size, args, config)
    after = heldout_loss(model, kept, size.batch)
    print(f"held-out loss after: {after:.3f}  (before: {before:.3f}, token frequencies alone: {unigram:.3f})")
    sample(save_and_prove(model, hf_model, tokenizer, kept[:2], args.output), tokenizer)
    print(f"total: {time.perf_counter() - begin:.1f} s")


def main(argv: list[str] | None = None) -> int:
    transformers.utils.logging.disable_progress_bar()
    return run_main("finetune.py", lambda: run(parse_arguments(argv, __doc__.splitlines()[0])))


if __name__ == "__main__":
    sys.exit(main())
