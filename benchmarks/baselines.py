"""The same model without RoundPipe: everything on one device, microbatch by microbatch."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Resident:
    """A copy of the model that stays on `device`; forward and backward of a batch, no optimizer.

    checkpointed: every block is recomputed in backward, so that activations are kept at block boundaries only.
    """

    def __init__(self, model: nn.Sequential, device: torch.device, checkpointed: bool) -> None:
        self.model = copy.deepcopy(model).to(device)
        self.device = device
        self.checkpointed = checkpointed

    def forward_backward(self, input_ids: Tensor, labels: Tensor, microbatches: int) -> Tensor:
        """Mean loss over the microbatches, on the device; gradients are those of the mean and accumulate."""
        total = torch.zeros((), device=self.device)
        for ids, targets in zip(input_ids.chunk(microbatches), labels.chunk(microbatches), strict=True):
            loss = self._loss(ids.to(self.device), targets.to(self.device)) / microbatches
            loss.backward()
            total += loss.detach()
        return total

    def _loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        state = self.model[0](ids, targets)
        for block in self.model[1:-1]:
            state = checkpoint(block, state, use_reentrant=False) if self.checkpointed else block(state)
        return self.model[-1](state)

    def gradients(self, names: list[str]) -> dict[str, Tensor]:
        """Copies of these parameters' gradients on the CPU."""
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name].grad.detach().to("cpu", copy=True) for name in names}

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)
