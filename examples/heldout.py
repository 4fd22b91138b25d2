"""The loss over text that is not trained on, by the streamed forward."""

from __future__ import annotations

import torch

from roundpipe import RoundPipe, RoundPipeRunConfig


def heldout_loss(model: RoundPipe, rows: torch.Tensor, batch: int) -> float:
    """Mean loss (nats a token) over the rows, with the newest weights."""
    model.synchronize()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for part in rows.split(batch):
            # One row a microbatch weighs all rows alike, however many the last batch has.
            config = RoundPipeRunConfig(num_microbatch=len(part))
            output = model(input_ids=part, labels=part, return_logits=False, roundpipe_run_config=config)
            total += output.loss.item() * len(part)
    model.train()
    return total / len(rows)
