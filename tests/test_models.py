"""Every architecture in docs/models.md computes, converted and streamed, what the plain model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe

from .architectures import BY_NAME, NOT_AS_BLOCKS, Architecture, combines_experts, make_batch, page
from .transformers_version import skip_before

PIECES = 2
TOLERANCE = 1e-5
PADDINGS = (None, "left", "right")


@pytest.fixture(autouse=True)
def two_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


def one_layer_a_stage(num_layers: int) -> ModelExecutePlan:
    """Every boundary between layers goes over the host, and every block but the last is recomputed."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(num_layers - 1)]
    plan.bwd_plan = [range(i, i + 1) for i in reversed(range(num_layers))]
    return plan


def with_lora(model: nn.Module, architecture: Architecture, **options: Any) -> nn.Module:
    """Adapters that do something from the start, the same for the same model."""
    peft = pytest.importorskip("peft")
    targets = architecture.lora if isinstance(architecture.lora, str) else list(architecture.lora)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapted.eval()


def assert_close(got: torch.Tensor, want: torch.Tensor, what: str, least_scale: float = 1e-30) -> None:
    assert got.shape == want.shape, what
    error = ((got - want).abs().max() / want.abs().max().clamp(min=least_scale)).item()
    assert error <= TOLERANCE, f"{what}: differs by {error:.1e} of the largest value"


def check(plain: nn.Module, streamed: nn.Module, batch: dict[str, Any], **kwargs: Any) -> None:
    """Losses, logits and gradients of both models over the same microbatches."""
    model = wrap_model_to_roundpipe(streamed, use_sequential_preset=True)
    blocks = streamed.config.get_text_config().num_hidden_layers
    assert model.num_layers == blocks + 2
    loss, outputs = model.forward_backward(
        input_kwargs=dict(batch, **kwargs),
        loss_fn=lambda output, _: output.loss / PIECES,
        return_outputs=True,
        run_config=RoundPipeRunConfig(num_microbatch=PIECES, execute_plan=one_layer_a_stage(model.num_layers)),
    )
    model.synchronize()

    return_logits = kwargs.pop("return_logits", True)
    wanted, logits = 0.0, []
    for piece in range(PIECES):
        part = {k: v.tensor_split(PIECES)[piece] if v.dim() else v for k, v in batch.items()}
        output = plain(**part, **kwargs, use_cache=False)
        (output.loss / PIECES).backward()
        wanted += output.loss.detach() / PIECES
        logits.append(output.logits.detach())
    assert_close(loss, wanted, "loss")
    if return_logits:
        assert_close(outputs.logits, torch.cat(logits), "logits")
    else:
        assert outputs.logits is None
    own = dict(streamed.named_parameters())
    assert own.keys() == dict(plain.named_parameters()).keys()
    largest = max(p.grad.abs().max().item() for p in plain.parameters() if p.grad is not None)
    for name, parameter in plain.named_parameters():
        grad = own[name].grad
        assert (grad is None) == (parameter.grad is None), f"gradient of {name}"
        if grad is not None:
            # Softmax does not see the bias of the keys: its gradient is zero, but for rounding.
            assert_close(grad, parameter.grad, f"gradient of {name}", least_scale=0.01 * largest)


def both(architecture: Architecture, **options: Any) -> tuple[nn.Module, nn.Module]:
    return architecture.make(**options), architecture.make(**options)


COMMON = [
    *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3-MoE", "Gemma 2", "Gemma 3 (text)", "Phi-3", "GPT-OSS"),
    *("GPT-2", "GPT-NeoX", "DeepSeek-V2", "DeepSeek-V3", "OLMo 2", "Granite", "StableLM", "Falcon"),
]


@pytest.mark.parametrize("name", BY_NAME)
def test_training_equals_the_plain_model(name):
    architecture, number = BY_NAME[name], list(BY_NAME).index(name)
    # Attention, padding and ties change from architecture to architecture; below some have every combination.
    attention = architecture.attention[number % len(architecture.attention)]
    options = dict(attention=attention, tied=number % 4 > 1)
    batch = (
        make_batch(packed=True)
        if architecture.packs and number % 2
        else make_batch(padding=("left", "right")[number % 3 % 2])
    )
    experts = dict(output_router_logits=True) if combines_experts(architecture) else {}
    check(*both(architecture, **options), batch, return_logits=number % 3 == 0, **experts)


@pytest.mark.parametrize("name", COMMON)
def test_training_adapters_equals_the_plain_model(name):
    if name == "DeepSeek-V3":
        skip_before(5, 13, reason="its own forward fails with adapters on the router")
    architecture, number = BY_NAME[name], COMMON.index(name)
    attention = architecture.attention[(number + 1) % len(architecture.attention)]
    plain, streamed = (with_lora(m, architecture) for m in both(architecture, attention=attention))
    check(plain, streamed, make_batch(padding=PADDINGS[number % 3]), return_logits=False)


def test_training_dora_equals_the_plain_model():
    plain, streamed = (with_lora(m, BY_NAME["Llama"], use_dora=True) for m in both(BY_NAME["Llama"]))
    check(plain, streamed, make_batch(padding="left"), return_logits=False)


def test_adapters_that_change_the_input_are_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(NotImplementedError, match="virtual tokens"):
        wrap_model_to_roundpipe(peft.get_peft_model(BY_NAME["Llama"].make(), config), use_sequential_preset=True)


@pytest.mark.parametrize(("attention", "tied"), [("eager", True), ("sdpa", False)])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["Qwen3", "Qwen3-MoE"])
def test_padding_attention_and_ties(name, padding, attention, tied):
    check(*both(BY_NAME[name], attention=attention, tied=tied), make_batch(padding=padding), return_logits=False)


@pytest.mark.parametrize("architecture", NOT_AS_BLOCKS, ids=lambda a: a.name)
def test_what_cannot_be_cut_into_blocks_says_so(architecture):
    with pytest.raises(NotImplementedError):
        wrap_model_to_roundpipe(architecture.make(), use_sequential_preset=True)


def test_the_page_lists_what_is_tested():
    skip_before(5, 24, reason="the page says what a newer version can do")
    written = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
    assert written == page(), "write it anew: python -m tests.architectures > docs/models.md"
