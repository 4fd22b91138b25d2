"""Real text that every machine has: the source files of Python's standard library, as a language-model corpus."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Whole files, those to train on and those never trained on."""

    train: list[str]
    heldout: list[str]


def read_corpus(max_bytes: int, heldout_share: float = 0.08) -> Corpus:
    """Up to `max_bytes` of source files, in an order that depends on their names alone; the first ones are held out.

    Raises FileNotFoundError if this Python comes without the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if not _LEFT_OUT & set(p.relative_to(root).parts))
    random.Random(0).shuffle(paths)
    train: list[str] = []
    heldout: list[str] = []
    taken = 0
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if len(text) < 200:
            continue
        (heldout if taken < heldout_share * max_bytes else train).append(text)
        taken += len(text)
        if taken >= max_bytes:
            break
    if not train:
        raise FileNotFoundError(f"no Python source files under {root}; this demo trains on the standard library's")
    return Corpus(train, heldout)


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, learned from these texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def to_rows(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> torch.Tensor:
    """All texts as one stream, an end token behind each, cut into rows: int64 [rows, length]."""
    end = tokenizer.eos_token_id
    stream = [token for text in texts for token in (*tokenizer.backend_tokenizer.encode(text).ids, end)]
    rows = len(stream) // length
    return torch.tensor(stream[: rows * length], dtype=torch.int64).view(rows, length)


def unigram_loss(train: torch.Tensor, heldout: torch.Tensor, vocabulary: int) -> float:
    """Cross entropy (nats a token) on `heldout` of token frequencies counted on `train`: what a model reaches that
    has learned no context at all."""
    counts = torch.bincount(train.flatten(), minlength=vocabulary).double() + 1.0
    log_p = (counts / counts.sum()).log()
    return -log_p[heldout[:, 1:].flatten()].mean().item()
