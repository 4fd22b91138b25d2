"""A value kept as the list of its microbatches' values, each with the event after which it may be read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from roundpipe.errors import ConfigError
from roundpipe.packed_tensor import MergesOnUse

__all__ = ["RoundPipePackedData", "TransferEvent"]


class TransferEvent(Protocol):
    """Anything that can be waited for on the host, such as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Returns when what the event stands for has happened."""


class RoundPipePackedData(MergesOnUse):
    """One leaf of the outputs of ``merge_output=False``: a list with the value of every microbatch.

    Another RoundPipe takes it as an input without a copy and without a wait; it sets the number of microbatches there.
    Tensors in it live on the host and may be read only after :meth:`synchronize`, or after the microbatch's event.
    Where it is used as a tensor (in a function of torch, an operator, by an attribute of tensors) it waits and merges.

    Args:
        values: one value a microbatch.
        transfer_event: one event a microbatch, None where the value can be read at once; None alone means that for
            all of them.

    Raises:
        ConfigError: the numbers of values and events differ.
    """

    transfer_event: list[TransferEvent | None]
    rows: list[int] | None = None
    """Rows of each microbatch, where it is known that what does not have them does not depend on the batch."""

    def __init__(
        self, values: Iterable[Any] = (), transfer_event: Iterable[TransferEvent | None] | None = None
    ) -> None:
        super().__init__(values)
        self.transfer_event = [None] * len(self) if transfer_event is None else list(transfer_event)
        if len(self.transfer_event) != len(self):
            raise ConfigError(
                f"RoundPipePackedData: {len(self.transfer_event)} transfer events for {len(self)} values, "
                "expected one a value"
            )

    def synchronize(self) -> None:
        """Waits on the calling thread until every microbatch's value can be read."""
        for event in self.transfer_event:
            if event is not None:
                event.synchronize()

    def __reduce__(self) -> tuple[Any, ...]:
        # Events belong to this process; a copy, which reads the values, has waited for them.
        self.synchronize()
        return type(self), (list(self),)

    def __repr__(self) -> str:
        return f"RoundPipePackedData({super().__repr__()})"
