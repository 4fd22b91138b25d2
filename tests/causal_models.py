"""Tiny causal language models of transformers, and batches for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
)
CONFIGS = {
    "llama": lambda **kw: transformers.LlamaConfig(**kw),
    "qwen3": lambda **kw: transformers.Qwen3Config(head_dim=16, **kw),
    "qwen2": lambda **kw: transformers.Qwen2Config(
        use_sliding_window=True, sliding_window=4, max_window_layers=1, **kw
    ),
    "mistral": lambda **kw: transformers.MistralConfig(sliding_window=5, **kw),
    "gemma2": lambda **kw: transformers.Gemma2Config(
        head_dim=8, sliding_window=4, query_pre_attn_scalar=8, final_logit_softcapping=3.0, **kw
    ),
    "qwen3_moe": lambda **kw: transformers.Qwen3MoeConfig(
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, **kw
    ),
}


def make_model(family: str, attention: str = "eager", tied: bool = False, seed: int = 0, **sizes) -> nn.Module:
    torch.manual_seed(seed)
    config = CONFIGS[family](**(SIZES | sizes), tie_word_embeddings=tied)
    config._attn_implementation = attention
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norm weights start at one, which would hide a norm left out
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def make_batch(rows: int = 4, length: int = 11, padding: str | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels = input_ids.clone()
    labels[0, 3:5] = -100
    batch = dict(input_ids=input_ids, labels=labels)
    if padding is not None:
        mask = torch.ones(rows, length, dtype=torch.int64)
        for row in range(rows):
            mask[row, slice(0, row) if padding == "left" else slice(length - row, length)] = 0
        labels[mask == 0] = -100
        batch["attention_mask"] = mask
    return batch


def run_layers(sequential: nn.Sequential, **kwargs):
    state = sequential[0](**kwargs)
    for layer in sequential[1:]:
        state = layer(state)
    return state


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, relative: float = 1e-6) -> None:
    scale = want.abs().max().clamp(min=1e-30)
    error = ((got - want).abs().max() / scale).item()
    assert error <= relative, f"{what}: differs by {error:.1e} of the largest value"


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    assert all(p.grad is not None for p in model.parameters())
    return {name: p.grad for name, p in model.named_parameters()}
