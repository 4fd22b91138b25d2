"""The loss of a batch as the sum of what its microbatches add to it."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

__all__ = ["BatchLoss"]


class BatchLoss:
    """Called with the output and label of one microbatch it gives that microbatch's part of the batch's loss.

    A model given `num_items_in_batch` divides by it, so its losses only have to be added. One that takes the mean over
    its microbatch is weighted by the labels that count there. A balancing loss is a mean over tokens either way.
    """

    def __init__(
        self,
        inputs: dict[str, Any],
        num_items_in_batch: Any,
        *,
        accepts_count: bool,
        shifts: bool,
        custom: Callable[..., torch.Tensor] | None,
        smoother: Callable[..., torch.Tensor] | None,
        aux_coefficient: float,
        can_leave_logits_out: bool,
    ) -> None:
        self._custom = custom
        self._smoother = smoother
        # Older versions smooth to the mean over the microbatch, whatever the count.
        self._smoother_counts = smoother is not None and "num_items_in_batch" in signature(smoother).parameters
        self._count = num_items_in_batch
        self._aux_coefficient = aux_coefficient
        labels = inputs.get("labels")
        outside = custom is not None or (smoother is not None and labels is not None)
        if outside:
            inputs.pop("labels", None)
        self._outside = outside
        self._can_leave_logits_out = can_leave_logits_out and not outside and labels is not None
        counted = num_items_in_batch is not None
        if accepts_count and counted:
            inputs["num_items_in_batch"] = num_items_in_batch
        counts_outside = custom is not None or self._smoother_counts
        self._is_sum = counted and (counts_outside if outside else accepts_count)
        self.is_share_of_window = (accepts_count and counted) or custom is not None
        self._inputs = inputs
        self.rows = next((v.shape[0] for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim()), 1)
        self.label = {
            "labels": labels if outside else None,
            "weight": _weights(labels, self.rows, shifts),
            "rows": torch.full((self.rows,), 1.0 / self.rows),
        }

    def kwargs(self, return_logits: bool) -> dict[str, Any]:
        """Arguments of the model."""
        if self._can_leave_logits_out and not return_logits:
            return {**self._inputs, "return_logits": False}
        return self._inputs

    def __call__(self, output: Any, label: dict[str, Any]) -> torch.Tensor:
        if self._custom is not None:
            count = self._on_device(output)
            return self._weighted(self._custom(output, label["labels"], num_items_in_batch=count), label)
        if self._outside and self._smoother is not None:
            count = {"num_items_in_batch": self._on_device(output)} if self._smoother_counts else {}
            loss = self._smoother(output, label["labels"], shift_labels=True, **count)
            return self._weighted(loss, label)
        loss = output["loss"] if isinstance(output, dict) else output[0]
        aux = output.get("aux_loss") if isinstance(output, dict) else None
        if aux is None or not self._aux_coefficient:
            return self._weighted(loss, label)
        aux = self._aux_coefficient * aux
        return self._weighted(loss - aux, label) + aux * label["rows"].sum()

    def _weighted(self, loss: torch.Tensor, label: dict[str, Any]) -> torch.Tensor:
        return loss if self._is_sum else loss * label["weight"].sum().to(loss.dtype)

    def _on_device(self, output: Any) -> Any:
        if not isinstance(self._count, torch.Tensor):
            return self._count
        tensor = output["logits"] if isinstance(output, dict) else output[0]
        return self._count.to(tensor.device)

    def total(self, outputs: list[Any]) -> torch.Tensor:
        """The loss of the batch from the outputs of its microbatches."""
        pieces = len(outputs)
        columns = {name: [None] * pieces if v is None else v.tensor_split(pieces) for name, v in self.label.items()}
        parts = [
            self(output, {name: column[i] for name, column in columns.items()}) for i, output in enumerate(outputs)
        ]
        return torch.stack([part.float() for part in parts]).sum()


def _weights(labels: Any, rows: int, shifts: bool) -> torch.Tensor:
    """Each row's share of the labels that count."""
    if isinstance(labels, torch.Tensor) and labels.dim() > 1 and labels.shape[0] == rows:
        counted = (labels[..., 1:] if shifts else labels).ne(-100).flatten(1).sum(1)
        if counted.sum() > 0:
            return counted / counted.sum()
    return torch.full((rows,), 1.0 / rows)
