"""Small models that between them hold every difficulty a layer can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Embed(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight)


class TiedHead(nn.Module):
    def __init__(self, weight: nn.Parameter, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.norm(x), self.weight)


class PassesTuple(nn.Module):
    """Hands on an integer tensor, a constant, None and a float tensor untouched beside its own output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, state: Any) -> Any:
        if isinstance(state, torch.Tensor):
            scale = torch.linspace(0.5, 1.5, state.shape[-1], device=state.device)
            ids = torch.arange(state.shape[0], device=state.device)
            return self.linear(state) * scale, (ids, scale, "tag", None)
        x, (ids, scale, tag, nothing) = state
        assert tag == "tag" and nothing is None and ids.dtype == torch.int64
        return self.linear(x) * scale + ids[:, None], (ids, scale, tag, nothing)


class TakesFirst(nn.Module):
    def forward(self, state: Any) -> torch.Tensor:
        return state[0]


class Unused(nn.Module):
    """Has a parameter that never gets a gradient, and one that gets it only for inputs with a positive mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * self.sometimes if float(x.detach().mean()) > 0 else y


class ViewOfInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:]


class Transposes(nn.Module):
    """Gives a non-contiguous output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)


class Expands(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None, :].expand(-1, 3, -1)


class MeanOverOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class ScaleByZeroDim(nn.Module):
    """A 0-dim parameter, an empty one, and a weight stored in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.empty.sum()


@dataclass
class Case:
    """A model, a batch for it, and how the loss is made."""

    make: Callable[[], nn.Sequential]
    batch: Callable[[int], tuple[tuple[Any, ...], Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    shared: bool = False  # the order of additions may differ: parameters shared over layers, strides of gradients


def mse(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out, label)


def _rows(width: int, out: int) -> Callable[[int], tuple[tuple[Any, ...], Any]]:
    return lambda rows: ((torch.randn(rows, width),), torch.randn(rows, out))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Residual(16), Residual(16), nn.Linear(16, 4))


def in_place() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 16),
        nn.Dropout(0.2, inplace=True),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.ReLU(inplace=True),
        nn.Linear(16, 4),
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8, momentum=None),
        nn.Dropout2d(0.1),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
    )


def decoder() -> nn.Sequential:
    weight = nn.Parameter(torch.randn(11, 12) * 0.3)
    return nn.Sequential(Embed(weight), Residual(12), Residual(12), Residual(12), TiedHead(weight, 12))


def frozen() -> nn.Sequential:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].up.weight.requires_grad_(False)
    model[3].requires_grad_(False)
    return model


def unused() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Unused(8), Unused(8), nn.Linear(8, 4))


def shared_module() -> nn.Sequential:
    block = Residual(8)
    return nn.Sequential(block, nn.Linear(8, 8), block, nn.Tanh(), block, nn.Linear(8, 4))


def odd_outputs() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 9),
        ViewOfInput(),
        nn.Identity(),
        Transposes(),
        Expands(),
        Transposes(),
        MeanOverOne(),
        ScaleByZeroDim(),
        nn.Linear(8, 4),
    )


def tuples() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), PassesTuple(8), PassesTuple(8), PassesTuple(8), TakesFirst(), nn.Linear(8, 4))


def weight_norm() -> nn.Sequential:
    norm = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(8, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Linear(8, 4))


class TakesOutput(nn.Module):
    """Of a recurrent layer that hands its last state on as well."""

    def forward(self, state: Any) -> torch.Tensor:
        output, last = state
        return output + (last if isinstance(last, torch.Tensor) else last[0]).sum(0)[:, None]


def recurrent() -> nn.Sequential:
    return nn.Sequential(
        nn.LSTM(8, 8, num_layers=2, batch_first=True),
        TakesOutput(),
        nn.GRU(8, 8, batch_first=True),
        TakesOutput(),
        nn.Linear(8, 4),
    )


def _tokens(rows: int) -> tuple[tuple[Any, ...], Any]:
    return (torch.randint(0, 11, (rows, 5)),), torch.randint(0, 11, (rows, 5))


def _cross_entropy(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), label.flatten())


CASES: dict[str, Case] = {
    "mlp": Case(mlp, _rows(8, 4), mse),
    "in_place": Case(in_place, _rows(8, 4), mse),
    "cnn": Case(cnn, lambda rows: ((torch.randn(rows, 3, 6, 6),), torch.randint(0, 5, (rows,))), F.cross_entropy),
    "decoder": Case(decoder, _tokens, _cross_entropy, shared=True),
    "frozen": Case(frozen, _rows(8, 4), mse),
    "unused": Case(unused, _rows(8, 4), mse),
    "shared_module": Case(shared_module, _rows(8, 4), mse, shared=True),
    "odd_outputs": Case(odd_outputs, _rows(8, 4), mse),
    "tuples": Case(tuples, _rows(8, 4), mse),
    "recurrent": Case(recurrent, lambda rows: ((torch.randn(rows, 3, 8),), torch.randn(rows, 3, 4)), mse, shared=True),
    "weight_norm": Case(weight_norm, _rows(8, 4), mse),
}
