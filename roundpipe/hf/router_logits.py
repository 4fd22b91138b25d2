"""Router logits on their way from the blocks that compute them to the head, whose loss balances the experts by them.

transformers collects them by hooks on the routers, which append to the collector of the running forward. Blocks run
far from the trunk's forward here. So each block gets a collector of its own, what it holds travels with the hidden
state, and the stubs in the head's trunk append it to that trunk's collector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["append_router_logits", "can_collect", "collecting_router_logits"]

_KEY = "router_logits"


def can_collect(trunk: nn.Module) -> bool:
    """Whether the trunk's router logits can be collected; if so its routers have transformers' own hooks from now on,
    which transformers puts there when they are first asked for."""
    try:
        from transformers.utils import output_capturing as capturing
    except ImportError:
        return False
    registry = capturing._CAN_RECORD_REGISTRY
    # At first a dictionary by the name of the class.
    recorded = registry.get(str(type(trunk))) if type(registry) is dict else registry.get(trunk)
    if _KEY not in (recorded or {}):
        return False
    capturing.maybe_install_capturing_hooks(trunk)
    return True


def collecting_router_logits(function: Callable[[], Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """Calls a block's forward; gives its result and the router logits of its routers, in order."""
    from transformers.utils import output_capturing as capturing

    found: dict[str, list[Tensor]] = {_KEY: []}
    token = capturing._active_collector.set(found)
    try:
        return function(), tuple(found[_KEY])
    finally:
        capturing._active_collector.reset(token)


def append_router_logits(logits: tuple[Tensor, ...]) -> None:
    """In a stub's place: what its block's routers gave becomes part of the trunk's outputs."""
    from transformers.utils import output_capturing as capturing

    collector = capturing._active_collector.get()
    if collector is not None and _KEY in collector:
        collector[_KEY] += logits
