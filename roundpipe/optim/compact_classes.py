"""The compact optimizers: what each reads of its groups, and which moments it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .adam import Adam, AdamW
from .compact import CompactOptimizer
from .host_optimizer import scalar
from .lion import Lion
from .sgd import SGD


class CompactAdam(CompactOptimizer, Adam):
    """:class:`Adam` on the weights of a wrapped model."""

    _algorithm = "adam"
    _moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def _row(self, group: Mapping[str, Any]) -> list[float]:
        numbers = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        return [*map(scalar, numbers), float(group["decoupled_weight_decay"]), float(group["maximize"])]

    def _kept(self, group: Mapping[str, Any]) -> list[bool]:
        return [True, True, bool(group["amsgrad"])]


class CompactAdamW(CompactAdam, AdamW):
    """:class:`AdamW` on the weights of a wrapped model."""


class CompactSGD(CompactOptimizer, SGD):
    """:class:`SGD` on the weights of a wrapped model."""

    _algorithm = "sgd"
    _moments = ("momentum_buffer",)

    def _row(self, group: Mapping[str, Any]) -> list[float]:
        numbers = [scalar(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay")]
        return [*numbers, float(group["nesterov"]), float(group["maximize"])]

    def _kept(self, group: Mapping[str, Any]) -> list[bool]:
        return [scalar(group["momentum"]) != 0]

    def _counts(self, group: Mapping[str, Any]) -> bool:
        return scalar(group["momentum"]) != 0  # the first step with a momentum fills the buffer


class CompactLion(CompactOptimizer, Lion):
    """:class:`Lion` on the weights of a wrapped model."""

    _algorithm = "lion"
    _moments = ("exp_avg",)

    def _row(self, group: Mapping[str, Any]) -> list[float]:
        numbers = [scalar(group["lr"]), *map(scalar, group["betas"]), scalar(group["weight_decay"])]
        return [*numbers, float(group["maximize"])]

    def _kept(self, group: Mapping[str, Any]) -> list[bool]:
        return [True]


Adam._compact, AdamW._compact, SGD._compact, Lion._compact = CompactAdam, CompactAdamW, CompactSGD, CompactLion
