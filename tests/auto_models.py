"""Models with a forward of their own that is no chain of layers, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe import RoundPipeRunConfig

from .model_zoo import Residual


class Trunk(nn.Module):
    """A module list in its own forward; a parameter of its own, tied ends, a buffer, and a look at a block's weight."""

    def __init__(self, width: int = 8, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.position = nn.Parameter(torch.randn(5, width) * 0.1)
        self.register_buffer("scale", torch.tensor(0.5))
        self.blocks = nn.ModuleList(Residual(width).eval() for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.calls += 1
        x = self.embed(tokens) + self.position * self.scale
        first = x
        for block in self.blocks:
            x = block(x)
        x = self.norm(x + first)
        logits = self.head(x) + x @ self.embed.weight[:1].T
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class UNet(nn.Module):
    """Module lists whose outputs meet again, batch normalisation, and pooling without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 4, 3, padding=1)
        self.downs = nn.ModuleList(
            [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(inplace=True)) for _ in range(2)]
        )
        self.ups = nn.ModuleList(
            [
                nn.Sequential(nn.Conv2d(8, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
                for _ in range(2)
            ]
        )
        self.pool = nn.MaxPool2d(2)
        self.leave = nn.Conv2d(4, 1, 1)

    def forward(self, image: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        x = self.enter(image)
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = self.pool(x)
        for up in self.ups:
            skip = skips.pop()
            x = up(torch.cat([F.interpolate(x, size=skip.shape[-2:]), skip], 1))
        out = self.leave(x)
        return {"loss": None if labels is None else F.mse_loss(out, labels), "logits": out}


@dataclass
class AutoCase:
    """``make``: the model; ``batch``: keyword arguments, labels among them."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    overrides: Callable[[nn.Module], dict[nn.Module, RoundPipeRunConfig]] = field(default=lambda model: {})
    lower: int = 64


def transformers() -> Any:
    return pytest.importorskip("transformers")


_TEXT = dict(vocab_size=31, num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
_VISION = dict(
    num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32, image_size=8, patch_size=4
)


def t5() -> nn.Module:
    t = transformers()
    config = t.T5Config(
        vocab_size=31,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return t.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def bart() -> nn.Module:
    t = transformers()
    sides = ("encoder", "decoder")
    config = t.BartConfig(
        vocab_size=31,
        d_model=16,
        dropout=0.0,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
        **{
            f"{side}_{what}": n
            for side in sides
            for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
        },
    )
    return t.BartForConditionalGeneration(config)  # type: ignore[no-any-return]


def llava() -> nn.Module:
    t = transformers()
    config = t.LlavaConfig(
        vision_config=t.CLIPVisionConfig(projection_dim=16, **_VISION),
        text_config=t.LlamaConfig(num_key_value_heads=2, **_TEXT),
        image_token_id=30,
        image_seq_length=4,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    return t.LlavaForConditionalGeneration(config)  # type: ignore[no-any-return]


def _pairs() -> dict[str, Any]:
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    return dict(
        input_ids=torch.randint(3, 31, (4, 6)),
        attention_mask=mask,
        labels=torch.randint(3, 31, (4, 5)),
        use_cache=False,
    )


def _picture_and_text() -> dict[str, Any]:
    tokens = torch.randint(1, 30, (4, 9))
    tokens[:, 1:5] = 30
    labels = tokens.masked_fill(tokens == 30, -100)
    return dict(input_ids=tokens, pixel_values=torch.randn(4, 3, 8, 8), labels=labels, use_cache=False)


CASES = {
    "trunk": AutoCase(Trunk, lambda: dict(tokens=torch.randint(11, (7, 5)), labels=torch.randint(11, (7, 5)))),
    "unet": AutoCase(
        UNet,
        lambda: dict(image=torch.randn(4, 1, 8, 8), labels=torch.randn(4, 1, 8, 8)),
        # Batch statistics of a microbatch are not those of the batch.
        lambda model: {up: RoundPipeRunConfig(num_microbatch=1) for up in model.ups},  # type: ignore[union-attr]
        lower=16,
    ),
    "t5": AutoCase(t5, _pairs),
    "bart": AutoCase(bart, _pairs),
    "llava": AutoCase(llava, _picture_and_text),
}
