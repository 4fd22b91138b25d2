"""Models with adapters of PEFT: the model inside, with the adapters in its layers, is what is streamed."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["is_peft_model", "model_with_adapters"]


def is_peft_model(model: nn.Module) -> bool:
    """Whether this is PEFT's wrapper around a model. Does not import PEFT."""
    return any(c.__name__ == "PeftModel" and c.__module__.startswith("peft.") for c in type(model).__mro__)


def model_with_adapters(model: nn.Module) -> nn.Module:
    """The model whose layers hold the adapters; its forward must be all that PEFT's wrapper does.

    Raises NotImplementedError for methods that do more, as prompt tuning, which changes the input.
    """
    from peft.tuners.tuners_utils import BaseTuner

    configs: Any = model.peft_config
    config: Any = configs[model.active_adapter]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    reason = None
    if config.is_prompt_learning:
        reason = "it puts virtual tokens before the input"
    elif not isinstance(model.base_model, BaseTuner) or type(model.base_model).forward is not BaseTuner.forward:
        reason = "it adds to the model's own forward"
    elif getattr(config, "alora_invocation_tokens", None):
        reason = "activated LoRA looks for its tokens outside the layers"
    if reason is not None:
        raise NotImplementedError(
            f"PEFT method {kind} cannot be streamed: {reason}. Methods whose adapters stand in the layers can (LoRA, "
            "DoRA, IA3, LoHa, ...)."
        )
    return model.get_base_model()
