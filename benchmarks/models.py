"""The workload models: decoder-only transformers as nn.Sequential(embedding, blocks..., norm and head).

Shape legend: B rows, S tokens, H hidden, D head dim, N query heads, K key/value heads, V vocabulary.

Every layer but the first takes the tuple that the layer before returned, (hidden_BSH, cos_SD, sin_SD, labels_BS); the
last one returns the mean loss. Weights are bfloat16 unless asked otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from roundpipe import doing_recompute, get_recompute_data, save_for_recompute
from roundpipe.models.function import causal_lm_loss

State = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """One model; widths in elements."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool
    experts: int = 0  # 0: one dense MLP of width `mlp`; else as many of that width
    experts_per_token: int = 0


MODELS = {
    "tiny": Dimensions(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp=384, vocabulary=1024, tied=True),
    "q06": Dimensions(
        hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=3072, vocabulary=151_936, tied=True
    ),
    "q17": Dimensions(
        hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, mlp=6144, vocabulary=151_936, tied=True
    ),
    "q4": Dimensions(
        hidden=2560, layers=36, heads=32, kv_heads=8, head_dim=128, mlp=9728, vocabulary=151_936, tied=True
    ),
    "moe": Dimensions(
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=4,
        head_dim=128,
        mlp=768,
        vocabulary=151_936,
        tied=True,
        experts=32,
        experts_per_token=4,
    ),
    "l8": Dimensions(
        hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocabulary=128_256, tied=False
    ),
}


def rotate(x_BNSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotary position embedding, the halves of D as the two coordinates."""
    first, second = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD


class Embedding(nn.Module):
    """Tokens to hidden states; also makes the rotary tables, so that they are made once a microbatch."""

    def __init__(self, dims: Dimensions, rope_base: float = 1e6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(dims.vocabulary, dims.hidden)
        self.head_dim = dims.head_dim
        self.rope_base = rope_base

    def forward(self, input_ids_BS: Tensor, labels_BS: Tensor) -> State:
        hidden = self.tokens(input_ids_BS)
        device = hidden.device
        exponent = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        position = torch.arange(input_ids_BS.shape[1], device=device, dtype=torch.float32)
        angle_SD = torch.outer(position, self.rope_base**-exponent).repeat(1, 2)
        return hidden, angle_SD.cos().to(hidden.dtype), angle_SD.sin().to(hidden.dtype), labels_BS


class Experts(nn.Module):
    """Each token goes through the experts that the router scores highest, weighed by normalised scores.

    The chosen experts are kept for recompute, so that its rounding cannot route a token elsewhere.
    """

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.count, self.chosen = dims.experts, dims.experts_per_token
        self.router = nn.Linear(dims.hidden, dims.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(dims.experts, 2 * dims.mlp, dims.hidden))
        self.down = nn.Parameter(torch.empty(dims.experts, dims.hidden, dims.mlp))

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_TH = x_BSH.flatten(0, 1)
        scores_TE = self.router(x_TH).float().softmax(-1)
        if doing_recompute():
            (expert_TC,) = get_recompute_data()
        else:
            expert_TC = scores_TE.topk(self.chosen, dim=-1).indices
            save_for_recompute(expert_TC)
        weight_TC = scores_TE.gather(1, expert_TC)
        weight_TC = (weight_TC / weight_TC.sum(-1, keepdim=True)).to(x_TH.dtype)
        order = expert_TC.flatten().argsort(stable=True)  # pairs (token, choice), by expert
        pairs = x_TH.index_select(0, order // self.chosen)
        sizes = torch.bincount(expert_TC.flatten(), minlength=self.count)
        gate, up = self._by_expert(pairs, self.gate_up, sizes).chunk(2, dim=-1)
        weighed = self._by_expert(F.silu(gate) * up, self.down, sizes) * weight_TC.flatten()[order].unsqueeze(-1)
        unsorted = torch.empty_like(weighed).index_copy(0, order, weighed)
        return unsorted.view(*expert_TC.shape, -1).sum(1).view_as(x_BSH)

    @staticmethod
    def _by_expert(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
        """The first sizes[0] rows times the first weight's transpose, and so on. On a GPU nothing is waited for."""
        if rows.is_cuda:
            return F.grouped_mm(rows, weights.transpose(-2, -1), offs=sizes.cumsum(0).to(torch.int32))
        return torch.cat([F.linear(x, w) for x, w in zip(rows.split(sizes.tolist()), weights, strict=True)])


class Block(nn.Module):
    """RMSNorm, grouped-query attention with normed queries and keys, RMSNorm, SwiGLU."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.attention_norm = nn.RMSNorm(dims.hidden, eps=1e-6)
        self.q = nn.Linear(dims.hidden, dims.heads * dims.head_dim, bias=False)
        self.k = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, bias=False)
        self.v = nn.Linear(dims.hidden, dims.kv_heads * dims.head_dim, bias=False)
        self.q_norm = nn.RMSNorm(dims.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(dims.head_dim, eps=1e-6)
        self.o = nn.Linear(dims.heads * dims.head_dim, dims.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(dims.hidden, eps=1e-6)
        if dims.experts:
            self.experts = Experts(dims)
        else:
            self.gate = nn.Linear(dims.hidden, dims.mlp, bias=False)
            self.up = nn.Linear(dims.hidden, dims.mlp, bias=False)
            self.down = nn.Linear(dims.mlp, dims.hidden, bias=False)
        self.dense = not dims.experts

    def forward(self, state: State) -> State:
        hidden, cos, sin, labels = state
        hidden = hidden + self._attention(self.attention_norm(hidden), cos, sin)
        normed = self.mlp_norm(hidden)
        mixed = self.down(F.silu(self.gate(normed)) * self.up(normed)) if self.dense else self.experts(normed)
        return hidden + mixed, cos, sin, labels

    def _attention(self, x_BSH: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        shape = (*x_BSH.shape[:2], -1, self.head_dim)
        q_BNSD = rotate(self.q_norm(self.q(x_BSH).view(shape)).transpose(1, 2), cos_SD, sin_SD)
        k_BKSD = rotate(self.k_norm(self.k(x_BSH).view(shape)).transpose(1, 2), cos_SD, sin_SD)
        v_BKSD = self.v(x_BSH).view(shape).transpose(1, 2)
        mixed_BNSD = F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=True)
        return self.o(mixed_BNSD.transpose(1, 2).flatten(2))


class Head(nn.Module):
    """Final norm and mean cross entropy of the next token, a chunk of logits at a time."""

    def __init__(self, dims: Dimensions) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dims.hidden, eps=1e-6)
        self.projection = nn.Linear(dims.hidden, dims.vocabulary, bias=False)

    def forward(self, state: State) -> Tensor:
        hidden, _, _, labels = state
        return causal_lm_loss(self.norm(hidden), self.projection.weight, labels)


def build(
    dims: Dimensions, *, dtype: torch.dtype = torch.bfloat16, device: str | torch.device = "cpu", seed: int = 0
) -> nn.Sequential:
    """The model on the CPU. Its weights are drawn on `device`: a GPU draws billions of them in a second."""
    with torch.device("meta"):
        embedding, head = Embedding(dims), Head(dims)
        model = nn.Sequential(embedding, *(Block(dims) for _ in range(dims.layers)), head)
    model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    model.to("cpu")
    if dims.tied:
        head.projection.weight = embedding.tokens.weight
    return model


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trained product of two thin ones; the second starts at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        like = dict(dtype=base.weight.dtype)
        self.a = nn.Parameter(torch.empty(rank, base.in_features, **like).normal_(0, base.in_features**-0.5))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, **like))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def add_lora(model: nn.Sequential, rank: int) -> None:
    """Freezes the model; every linear layer of its blocks gets an adapter."""
    model.requires_grad_(False)
    for block in model[1:-1]:
        for name, child in list(block.named_children()):
            if isinstance(child, nn.Linear):
                setattr(block, name, LoraLinear(child, rank))


def random_batch(dims: Dimensions, rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(input_ids, labels), both int64 [rows, tokens] on the CPU; random tokens, scored on the following one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, dims.vocabulary, (rows, tokens), generator=generator)
    return ids, ids.clone()
