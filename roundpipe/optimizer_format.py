"""What an optimizer keeps on the host for each trained parameter, by a short name of it.

    "adamw", "adam", "lion", "sgd", "sgd-momentum"   on the optimizer's parameters: torch.optim's, or our drop-ins
    "compact:MASTER/STATE"                           roundpipe.optim.AdamW(model, master=MASTER, state_dtype=STATE)
    "compact"                                        the same as "compact:split/float32"
    "none"                                           nothing is trained

See Note [Compact formats] for the second kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import ConfigError
from .optim.compact_memory import CODE_BLOCK, MASTERS, STATE_DTYPES
from .units import align

__all__ = ["COMPACT_FORMATS", "OptimizerFormat", "TensorSize"]

_STATES = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "sgd-momentum": 1, "none": 0}
COMPACT_FORMATS = tuple(f"compact:{master}/{state}" for state in STATE_DTYPES for master in MASTERS)


@dataclass(frozen=True)
class TensorSize:
    """A trainable parameter: number of elements and dtype."""

    elements: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class OptimizerFormat:
    """``master`` None: an optimizer on parameters of its own, with so many ``states`` beside each."""

    name: str
    states: int
    master: str | None = None
    state_dtype: torch.dtype = torch.float32

    @staticmethod
    def parse(name: str) -> OptimizerFormat:
        """Raises ConfigError for a name that is none of those above."""
        if name in _STATES:
            return OptimizerFormat(name, _STATES[name])
        kind, _, formats = name.partition(":")
        master, _, state = (formats or "split/float32").partition("/")
        if kind != "compact" or master not in MASTERS or state not in STATE_DTYPES:
            expected = ", ".join((*_STATES, "compact", *COMPACT_FORMATS))
            raise ConfigError(f"optimizer: got {name!r}, expected one of {expected}")
        return OptimizerFormat(f"compact:{master}/{state}", 2, master, STATE_DTYPES[state])

    @property
    def trains(self) -> bool:
        return self.name != "none"

    def pinned_bytes(self, units: Sequence[Sequence[TensorSize]], optim_dtype: torch.dtype | None) -> int:
        """In pinned memory, for the trainable parameters unit by unit: masters and moments, or the optimizer's
        parameters and their gradients in ``optim_dtype`` (None: each in its own)."""
        if self.master is None:
            wide = [
                t.elements * (t.dtype if optim_dtype is None else optim_dtype).itemsize for unit in units for t in unit
            ]
            return 2 * sum(map(align, wide)) if self.trains else 0
        return sum(self._compact_bytes(tensor) for unit in units for tensor in unit)

    def _compact_bytes(self, tensor: TensorSize) -> int:
        master = 0
        if tensor.dtype == torch.bfloat16 and self.master == "split":
            master = 2
        elif tensor.dtype != torch.float32:
            master = 4
        moment = align(tensor.elements * self.state_dtype.itemsize)
        if self.state_dtype == torch.uint8:
            moment += align(-(-tensor.elements // CODE_BLOCK) * 4)
        return align(tensor.elements * master) + self.states * moment

    def pageable_bytes(self, units: Sequence[Sequence[TensorSize]], optim_dtype: torch.dtype | None) -> int:
        """The states that an optimizer on parameters keeps in ordinary memory."""
        if self.master is not None:
            return 0
        wide = [t.elements * (t.dtype if optim_dtype is None else optim_dtype).itemsize for unit in units for t in unit]
        return self.states * sum(wide)
