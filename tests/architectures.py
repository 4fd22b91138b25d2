"""The architectures of transformers that conversion is tested with, tiny and with random weights.

`python -m tests.architectures` prints docs/models.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from roundpipe.hf import causal_lm_to_sequential
from roundpipe.hf import layers as hf_layers

transformers = pytest.importorskip("transformers")

VOCABULARY = 97
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=None, bos_token_id=1, eos_token_id=2)
SIZES = dict(
    **TOKENS,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
OLD_SIZES = dict(**TOKENS, n_embd=32, n_layer=3, n_head=4, n_positions=64)
FEW = dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64, **TOKENS)
HEADS_OF_8 = dict(SIZES, head_dim=8)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
DEEPSEEK = dict(
    SIZES,
    num_key_value_heads=4,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    kv_lora_rank=8,
    q_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    first_k_dense_replace=1,
    topk_group=1,
)
LINEAR_ATTENTION = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
)
LONG_ROPE = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}


@dataclass(frozen=True, eq=False)
class Architecture:
    name: str
    config: str
    """Name of the config class in transformers."""
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    attention: tuple[str, ...] = ("eager", "sdpa")
    packs: bool = True
    """Whether position_ids can be given, and begin anew for each packed text."""
    experts: bool = False
    lora: str | tuple[str, ...] = "all-linear"

    def make(self, attention: str | None = None, tied: bool | None = None, seed: int = 0, **kwargs: Any) -> nn.Module:
        torch.manual_seed(seed)
        if tied is not None:
            kwargs["tie_word_embeddings"] = tied
        config = getattr(transformers, self.config)(**{**self.sizes, **kwargs})
        config._attn_implementation = attention or self.attention[0]
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # norm weights start at one, which would hide a norm left out
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()  # dropout would need the random numbers of each layer


A = Architecture
EAGER = ("eager",)
ATTENTION = ("q_proj", "v_proj")
ARCHITECTURES = [
    A("Llama", "LlamaConfig"),
    A(
        "Llama 4 (text)",
        "Llama4TextConfig",
        dict(HEADS_OF_8, intermediate_size_mlp=48, num_local_experts=4, num_experts_per_tok=1),
        packs=False,
        experts=True,
        lora=ATTENTION,
    ),
    A("Mistral", "MistralConfig", dict(SIZES, sliding_window=5)),
    A("Mixtral", "MixtralConfig", dict(SIZES, **LOCAL_EXPERTS), experts=True),
    A("Qwen2", "Qwen2Config", dict(SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    A("Qwen2-MoE", "Qwen2MoeConfig", dict(SIZES, **EXPERTS, shared_expert_intermediate_size=16), experts=True),
    A("Qwen3", "Qwen3Config", dict(SIZES, head_dim=16)),
    A("Qwen3-MoE", "Qwen3MoeConfig", dict(HEADS_OF_8, **EXPERTS), experts=True),
    A(
        "Qwen3-Next",
        "Qwen3NextConfig",
        dict(HEADS_OF_8, **EXPERTS, **LINEAR_ATTENTION, shared_expert_intermediate_size=16),
        packs=False,
        experts=True,
    ),
    A("Gemma", "GemmaConfig", HEADS_OF_8),
    A(
        "Gemma 2",
        "Gemma2Config",
        dict(HEADS_OF_8, sliding_window=4, query_pre_attn_scalar=8, final_logit_softcapping=3.0),
        EAGER,
    ),
    A(
        "Gemma 3 (text)",
        "Gemma3TextConfig",
        dict(
            HEADS_OF_8,
            sliding_window=4,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    A("Phi", "PhiConfig"),
    A("Phi-3", "Phi3Config"),
    A("Phi-MoE", "PhimoeConfig", dict(SIZES, num_local_experts=4), experts=True, lora=ATTENTION),
    A(
        "GPT-OSS",
        "GptOssConfig",
        dict(HEADS_OF_8, **LOCAL_EXPERTS, sliding_window=4, rope_parameters=LONG_ROPE),
        EAGER,
        experts=True,
    ),
    A("GPT-2", "GPT2Config", OLD_SIZES, lora=("c_attn", "c_proj", "c_fc")),
    A("GPT-J", "GPTJConfig", dict(OLD_SIZES, rotary_dim=4), EAGER),
    A("GPT-NeoX", "GPTNeoXConfig", dict(FEW, intermediate_size=48)),
    A("GPT-BigCode", "GPTBigCodeConfig", OLD_SIZES),
    A("DeepSeek-V2", "DeepseekV2Config", dict(DEEPSEEK, n_group=1), experts=True),
    A("DeepSeek-V3", "DeepseekV3Config", dict(DEEPSEEK, n_group=2), experts=True),
    A("OLMo 2", "Olmo2Config"),
    A("OLMo 3", "Olmo3Config", dict(SIZES, sliding_window=4)),
    A("OLMoE", "OlmoeConfig", dict(SIZES, num_experts=4, num_experts_per_tok=2), experts=True),
    A("Granite", "GraniteConfig", dict(SIZES, logits_scaling=2.0, residual_multiplier=0.7, embedding_multiplier=3.0)),
    A("Granite-MoE", "GraniteMoeConfig", dict(SIZES, **LOCAL_EXPERTS, logits_scaling=2.0), experts=True),
    A("StableLM", "StableLmConfig"),
    A("Falcon", "FalconConfig", dict(FEW, num_kv_heads=2, new_decoder_architecture=True)),
    A(
        "Falcon-H1",
        "FalconH1Config",
        dict(SIZES, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=4, mamba_d_ssm=64),
        packs=False,
        lora=ATTENTION,
    ),
    A("Bloom", "BloomConfig", dict(TOKENS, hidden_size=32, n_layer=3, n_head=4), EAGER, packs=False),
    A(
        "MPT",
        "MptConfig",
        dict(TOKENS, d_model=32, n_layers=3, n_heads=4, max_seq_len=64, expansion_ratio=2),
        EAGER,
        packs=False,
    ),
    A("OPT", "OPTConfig", dict(FEW, ffn_dim=48, word_embed_proj_dim=32, pad_token_id=1), packs=False),
    A(
        "OPT with narrow embeddings",
        "OPTConfig",
        dict(FEW, ffn_dim=48, word_embed_proj_dim=16, pad_token_id=1, do_layer_norm_before=False),
        packs=False,
    ),
    A("Cohere", "CohereConfig", dict(SIZES, logit_scale=0.25)),
    A("Cohere 2", "Cohere2Config", dict(SIZES, sliding_window=4)),
    A("StarCoder 2", "Starcoder2Config"),
    A("Nemotron", "NemotronConfig"),
    A("GLM-4", "Glm4Config", HEADS_OF_8),
    A("GLM-4-MoE", "Glm4MoeConfig", dict(DEEPSEEK, head_dim=8, n_group=1), experts=True),
    A("ERNIE 4.5", "Ernie4_5Config", HEADS_OF_8),
    A("EXAONE 4", "Exaone4Config", dict(SIZES, sliding_window=4)),
    A("SmolLM 3", "SmolLM3Config"),
    A("Seed-OSS", "SeedOssConfig", HEADS_OF_8),
    A("Hunyuan", "HunYuanDenseV1Config", HEADS_OF_8),
    A("LFM 2", "Lfm2Config", dict(SIZES, layer_types=["conv", "full_attention", "conv"]), packs=False),
    A(
        "Mamba 2",
        "Mamba2Config",
        dict(TOKENS, hidden_size=32, state_size=4, num_hidden_layers=3, num_heads=4, head_dim=16, n_groups=1),
        EAGER,
        packs=False,
        lora=("in_proj",),
    ),
    A(
        "Jamba",
        "JambaConfig",
        dict(
            SIZES,
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
        ),
        packs=False,
        experts=True,
    ),
]
NOT_AS_BLOCKS = [
    A("CTRL", "CTRLConfig", dict(OLD_SIZES, dff=48), EAGER),
    A("Gemma 4 (text, with embeddings of each layer)", "Gemma4TextConfig", HEADS_OF_8),
    A("GPT (the first)", "OpenAIGPTConfig", OLD_SIZES, EAGER),
]
"""Models whose blocks need more than the hidden state and constants, or whose forward cannot be entered twice."""

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def combines_experts(architecture: Architecture) -> bool:
    """Whether the model's own load-balancing loss is kept: its routers' logits reach the head."""
    return _facts(architecture)[0]


@functools.cache
def _facts(architecture: Architecture) -> tuple[bool, bool]:
    """(router logits reach the head, the loss needs no whole logits), as seen in the converted model."""
    layers = causal_lm_to_sequential(architecture.make())
    batch = make_batch(rows=1, length=4)
    with mock.patch.object(hf_layers, "causal_lm_loss", wraps=hf_layers.causal_lm_loss) as loss, torch.no_grad():
        state = layers[0](**batch, return_logits=False)
        for layer in layers[1:]:
            state = layer(state)
    return layers[0]._collects_router_logits, loss.called


def page() -> str:
    """docs/models.md."""
    rows = []
    for architecture in ARCHITECTURES:
        router_logits, chunked = _facts(architecture)
        kind = type(architecture.make()).__name__
        experts = ("replayed, router logits kept" if router_logits else "replayed") if architecture.experts else ""
        rows.append(f"| {architecture.name} | `{kind}` | {experts} | {'yes' if chunked else 'no'} |")
    return PAGE.format(
        count=len(rows),
        rows="\n".join(rows),
        others="\n".join(f"- {a.name}: `{type(a.make()).__name__}`" for a in NOT_AS_BLOCKS),
    )


PAGE = """# Models of transformers

`wrap_model_to_roundpipe` cuts any decoder-only causal language model of transformers into prefix, blocks and head; each
block is a layer of its own. It runs the model's own code and knows no model by name, so this list is not what is
supported but what is tested: each of these {count} architectures is built small with random weights, trained through
RoundPipe on two devices with every block a stage of its own, and compared with the plain model. Losses, logits and all
gradients agree within 1e-5 of their largest value (float32), with attention eager and sdpa where the model has both,
padding left and right, packed texts by `position_ids`, tied and untied embeddings, with LoRA and without.

Routing: which experts a token goes to is decided once and repeated in recompute; with `output_router_logits=True` the
router logits reach the head, and the balancing loss of a model that has one is part of its loss (computed in each
microbatch). Loss in chunks: with
`return_logits=False` whole logits never exist.

| architecture | class | routing of experts | loss in chunks |
|---|---|---|---|
{rows}

These are refused by `use_sequential_preset=True`: a block gets more than the hidden state and constants, or the model's
forward cannot be entered with embeddings.

{others}

`python -m tests.architectures > docs/models.md` writes this page; a test compares.
"""


def make_batch(
    rows: int = 4, length: int = 9, padding: str | None = None, packed: bool = False
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels = input_ids.clone()
    labels[0, 3:5] = -100
    batch = dict(input_ids=input_ids, labels=labels)
    if padding is not None:
        mask = torch.ones(rows, length, dtype=torch.int64)
        for row in range(rows):
            mask[row, slice(0, row) if padding == "left" else slice(length - row, length)] = 0
        labels[mask == 0] = -100
        batch["attention_mask"] = mask
    if packed:
        positions = torch.arange(length) % 4
        batch["position_ids"] = positions.expand(rows, length).contiguous()
        labels[:, positions == 0] = -100
    return batch


if __name__ == "__main__":
    print(page(), end="")
