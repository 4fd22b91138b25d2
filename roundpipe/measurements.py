"""What the calls of one model have shown: the times of its layers and the sizes of its activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .activation_peaks import ActivationPeaks
from .activation_sizes import ActivationSizes, microbatch_bytes
from .boundary import Boundary
from .job_probe import CallProbe
from .timer import ModelTimer

__all__ = ["Measurements"]


class Measurements:
    """Inference and training are timed apart: they may run with batches of quite different sizes."""

    def __init__(self, num_layers: int) -> None:
        self.training = ModelTimer(num_layers)
        self.inference = ModelTimer(num_layers)
        self.sizes = ActivationSizes(num_layers)
        self.peaks = ActivationPeaks()
        # Of calls that were predicted after a failure, by plan_key: (bytes beside the region, what there is for both).
        self.tight: dict[Any, tuple[int, int | None]] = {}

    def timer(self, run_type: str) -> ModelTimer:
        """The one for ``run_type``; before any inference that of training serves it too."""
        inference = run_type == "infer" and (self.inference.iterations or not self.training.iterations)
        return self.inference if inference else self.training

    def read(self) -> None:
        """Times that the devices have passed by now become estimates."""
        self.training.read()
        self.inference.read()

    def probe(
        self, inputs: Sequence[Boundary], labels: Sequence[Boundary], *, keeps_graph: bool, simulated: bool
    ) -> CallProbe:
        """For a call with these microbatches."""
        if not keeps_graph:
            return CallProbe(self.inference, None, 0, len(inputs), simulated)
        call_bytes = microbatch_bytes(inputs, labels) if labels else microbatch_bytes(inputs)
        sizes = self.sizes if self.sizes.begin(call_bytes) else None
        return CallProbe(self.training, sizes, call_bytes, len(inputs), simulated)
