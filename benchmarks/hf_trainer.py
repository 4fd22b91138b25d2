"""How fast does RoundPipeTrainer train models of transformers, and in how much memory?

    python benchmarks/hf_trainer.py --workloads qwen3-1.7b,llama-8b-lora
    python benchmarks/hf_trainer.py --workloads tiny,tiny-lora --devices host:2 --steps 2

A full fine-tune shaped as Qwen3-1.7B and LoRA of rank 16 on a model shaped as Llama 3 8B; random weights in bfloat16,
random tokens, which cost what others do. The loop is the Trainer's own: data loader, clipping, schedule, callbacks.
Nothing is logged while it is timed, since that waits for the step. A step's time is the distance between the ends of
two steps; what is still under way after the last one is added to it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from common import RESULTS, gpu_memory, machine_facts, summary, wait_for_devices, write_result

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.hf import RoundPipeTrainer


@dataclass(frozen=True)
class Workload:
    """A model and its batch. rows and microbatches of one call, tokens of a row, accumulate: calls a step."""

    kind: str
    sizes: dict[str, Any]
    rows: int
    tokens: int
    microbatches: int
    accumulate: int = 1
    lora_rank: int | None = None
    tied: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def config(self) -> transformers.PretrainedConfig:
        make = getattr(transformers, self.kind)
        return make(**self.sizes, **self.options, tie_word_embeddings=self.tied, max_position_embeddings=self.tokens)


_TINY = dict(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
WORKLOADS = {
    "tiny": Workload("Qwen3Config", _TINY, 4, 32, 2, tied=True, options=dict(head_dim=16)),
    "tiny-lora": Workload("LlamaConfig", _TINY, 4, 32, 2, accumulate=2, lora_rank=4),
    "qwen3-1.7b": Workload(
        "Qwen3Config",
        dict(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
        ),
        rows=16,
        tokens=4096,
        microbatches=8,
        tied=True,
        options=dict(head_dim=128),
    ),
    "llama-8b-lora": Workload(
        "LlamaConfig",
        dict(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        rows=16,
        tokens=4096,
        microbatches=8,
        lora_rank=16,
    ),
}


class RandomRows(torch.utils.data.Dataset):
    """Rows of random tokens, the same in every run."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        self.tokens = torch.randint(vocabulary, (count, tokens), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


class Clock(transformers.TrainerCallback):
    """Times of the ends of steps."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup
        self.marks: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.warmup:
            wait_for_devices()
        self.marks.append(time.perf_counter())


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="qwen3-1.7b", help=f"comma separated: {', '.join(WORKLOADS)}")
    parser.add_argument("--devices", help="as in roundpipe.use_devices; default: all GPUs")
    parser.add_argument("--optimizer", choices=("compact", "adamw"), default="compact", help="adamw: on a copy")
    parser.add_argument("--pin-model", default="alloc", help="alloc, register, off or auto")
    parser.add_argument("--rows", type=int, help="instead of the workload's")
    parser.add_argument("--tokens", type=int, help="instead of the workload's")
    parser.add_argument("--microbatches", type=int, help="instead of the workload's")
    parser.add_argument("--steps", type=int, default=6, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    args.workloads = args.workloads.split(",")
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"--workloads: unknown {', '.join(sorted(unknown))}; expected {', '.join(WORKLOADS)}")
    for name in ("rows", "tokens", "microbatches", "steps", "warmup"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected a whole number of at least 1, got {value}")
    return args


def on_gpu() -> bool:
    return any(device.kind == "cuda" for device in roundpipe.devices())


def make_model(workload: Workload) -> torch.nn.Module:
    torch.manual_seed(0)
    # Billions of random numbers are quick on a GPU; afterwards the model lies in host memory as any that was loaded.
    with torch.device("cuda:0" if on_gpu() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(workload.config(), dtype=torch.bfloat16)
    model = model.cpu()
    if workload.lora_rank is not None:
        import peft

        lora = peft.LoraConfig(r=workload.lora_rank, lora_alpha=2 * workload.lora_rank, target_modules="all-linear")
        model = peft.get_peft_model(model.requires_grad_(False), lora)
    if on_gpu():
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    return model


def process_peak_bytes() -> int:
    """Most host memory that this process held, page-locked memory included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def run_workload(name: str, args: argparse.Namespace) -> dict[str, Any]:
    workload = WORKLOADS[name]
    rows = args.rows or workload.rows
    tokens = args.tokens or workload.tokens
    pieces = args.microbatches or workload.microbatches
    steps = args.warmup + args.steps
    model = make_model(workload)
    clock = Clock(args.warmup)
    optimizer = dict(optimizer_cls_and_kwargs=(roundpipe.optim.AdamW, {})) if args.optimizer == "compact" else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = RoundPipeTrainer(
            model=model,
            args=transformers.TrainingArguments(
                folder,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=workload.accumulate,
                max_steps=steps,
                learning_rate=1e-6,  # the time of a step does not depend on it; random tokens teach nothing
                lr_scheduler_type="constant",
                max_grad_norm=1.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=RandomRows(rows * workload.accumulate * steps, tokens, workload.sizes["vocab_size"]),
            callbacks=[clock],
            roundpipe_kwargs={"pin_model": args.pin_model},
            run_config=RoundPipeRunConfig(num_microbatch=pieces),
            **optimizer,
        )
        output = trainer.train()
    wait_for_devices()
    marks = [*clock.marks[:-1], time.perf_counter()]
    timed = marks[args.warmup - 1 :]
    found = summary([end - begin for begin, end in zip(timed, timed[1:], strict=False)])
    step_tokens = rows * tokens * workload.accumulate
    host = roundpipe.memory_report().host
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "rows": rows,
        "tokens": tokens,
        "microbatches": pieces,
        "accumulate": workload.accumulate,
        **found,
        "tokens_per_s": step_tokens / found["mean_s"],
        "train_loss": output.training_loss,
        "host_bytes": {key: value for key, value in vars(host).items() if isinstance(value, int)},
        "host_process_peak_bytes": process_peak_bytes(),
    }
    if on_gpu():
        result["gpu_memory"] = [gpu_memory(i) for i in range(torch.cuda.device_count())]
    print(
        f"{name}: {result['parameters'] / 1e9:.3f}e9 parameters, {result['trained_parameters']:,} trained; "
        f"step {found['median_s']:.3f} s (mean {found['mean_s']:.3f}), {result['tokens_per_s']:.0f} tokens/s; "
        f"host process at most {result['host_process_peak_bytes'] / 2**30:.2f} GiB"
        + (f", GPU at most {result['gpu_memory'][0]['peak_reserved_bytes'] / 2**30:.2f} GiB" if on_gpu() else ""),
        flush=True,
    )
    return result


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    transformers.utils.logging.disable_progress_bar()
    if args.devices:
        roundpipe.use_devices(args.devices)
    print(machine_facts())
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    devices = [device.name for device in roundpipe.devices()]
    result: dict[str, Any] = {"settings": settings, "devices": devices, "transformers": transformers.__version__}
    result["results"] = {}
    for name in args.workloads:
        result["results"][name] = run_workload(name, args)
        gc.collect()
    print(f"written: {write_result('hf_trainer-' + '-'.join(args.workloads), result, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
