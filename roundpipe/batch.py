"""From a batch to microbatches and back: the one place to import splitting, merging and packed data from.

The automatic rules stand in Note [Automatic split] (input_split.py) and Note [Automatic merge] (output_merge.py).
"""

from __future__ import annotations

from roundpipe.input_split import InputPieces, split_inputs
from roundpipe.label_split import split_label
from roundpipe.output_merge import merge_outputs
from roundpipe.packed import RoundPipePackedData, TransferEvent

__all__ = ["InputPieces", "RoundPipePackedData", "TransferEvent", "merge_outputs", "split_inputs", "split_label"]
