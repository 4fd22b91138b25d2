"""Which modules of a tree are streamed, where nobody has written its layers down: the rules of the tree walk.

Note [Tree walk]
  From the root down:
  - modules to skip stay as they are, on the host;
  - an nn.Sequential without a forward of its own becomes one part with its children as layers (a
    model's forward that takes it apart gets a part for each child, see streamed_part.py);
  - a compiled module is one part, of one layer;
  - a module with a forward of its own becomes a part of one layer if its own parameters have at least
    ``lower_threshold`` elements, or all below it at most ``upper_threshold``; also where there is nothing below it;
  - any other module stays, with its own parameters on the host, and its children are looked at;
  - the elements of a ModuleList are looked at one by one. Those that become parts hand their outputs on packed, but for
    the last.
  A part below ``lower_threshold`` in all runs with one microbatch: cutting the batch for it costs more than it saves.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.utils import parametrize

from .layer_list import is_chain
from .run_config import RoundPipeRunConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """``lower``, ``upper``: elements of parameters. ``skipped``, ``overrides``: by id of the module."""

    lower: int
    upper: int
    skipped: Collection[int]
    overrides: Mapping[int, RoundPipeRunConfig]


def find_parts(model: nn.Module, rules: Rules) -> dict[str, RoundPipeRunConfig]:
    """By Note [Tree walk] the modules to stream, by name, each with the configuration that is its own."""
    parts: dict[str, RoundPipeRunConfig] = {}
    _walk(model, "", rules, parts, set(), packed=False)
    return parts


def total_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _walk(
    module: nn.Module,
    name: str,
    rules: Rules,
    parts: dict[str, RoundPipeRunConfig],
    seen: set[int],
    packed: bool,
) -> None:
    if id(module) in seen:
        return  # a module at two places is one part
    seen.add(id(module))
    if id(module) in rules.skipped:
        logger.info("%s (%s) is skipped: it stays on the host", name or "the model", type(module).__name__)
        return
    reason = _reason(module, rules)
    if reason is not None:
        total = total_elements(module)
        config = RoundPipeRunConfig(
            num_microbatch=1 if total < rules.lower else None, merge_output=False if packed else None
        )
        parts[name] = config.overridden_by(rules.overrides.get(id(module), RoundPipeRunConfig()))
        how = ", with one microbatch" if total < rules.lower else ""
        logger.info(
            "%s (%s, %d parameters) is streamed%s: %s",
            name or "the model",
            type(module).__name__,
            total,
            how,
            reason,
        )
        return
    children = [(key, child) for key, child in module._modules.items() if child is not None]
    is_list = isinstance(module, nn.ModuleList)
    for position, (key, child) in enumerate(children):
        _walk(child, f"{name}.{key}" if name else key, rules, parts, seen, is_list and position < len(children) - 1)


def _reason(module: nn.Module, rules: Rules) -> str | None:
    """Why a module becomes a part; None: it does not."""
    if any(id(inner) in rules.skipped for inner in module.modules()):
        return None
    if is_chain(module):
        return f"{len(module._modules)} layers" if module._modules else None
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return "it is compiled as a whole"
    if type(module).forward is nn.Module.forward:  # a container, which nobody calls
        return None
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if own >= rules.lower:
        return f"{own} parameters of its own"
    total = total_elements(module)
    if total <= rules.upper:
        return "small enough for one layer"
    if not module._modules or parametrize.is_parametrized(module):
        return "there is nothing below it"
    return None
