"""Trains a convolutional network on scikit-learn's handwritten digits: a loop in plain PyTorch style, no model library.

    python examples/digits.py                              on all GPUs, or on a simulated device without one
    python examples/digits.py --devices host:2 --epochs 3

The images come with scikit-learn (pip install scikit-learn); nothing is downloaded. The accuracy that it prints is of
images that were kept out of training.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig

HELD_OUT = 360  # of 1797


def digits(seed: int = 0) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out images, float32 [N, 1, 8, 8] in 0..1, with their digits, int64 [N]."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).to(torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    held_out, train = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def network() -> nn.Sequential:
    """Each child is a layer that RoundPipe may place on a device of its own."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 2 * 2, 64), nn.ReLU(inplace=True)),
        nn.Linear(64, 10),
    )


def train(model: RoundPipe, batches: DataLoader, epochs: int, lr: float, config: RoundPipeRunConfig) -> Iterator[float]:
    """Yields the mean loss of each epoch."""
    with roundpipe.OptimizerCtx():  # here parameters() means the optimizer's own copy
        optimizer = roundpipe.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)

    def update() -> None:  # runs on the optimizer thread, beside the next batch
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    for _ in range(epochs):
        total, seen = 0.0, 0
        for images, labels in batches:
            rows = len(labels)

            def loss_fn(logits: Tensor, labels: Tensor, rows: int = rows) -> Tensor:  # of one microbatch
                return nn.functional.cross_entropy(logits, labels, reduction="sum") / rows

            loss = model.forward_backward((images,), label=labels, loss_fn=loss_fn, run_config=config)
            model.step(update)
            total, seen = total + loss.item() * rows, seen + rows
        yield total / seen


def accuracy(model: RoundPipe, held_out: TensorDataset) -> float:
    """Share of held-out images whose digit is recognised."""
    model.synchronize()  # from here on the weights are the newest
    model.eval()
    images, labels = held_out.tensors
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", help="as in roundpipe.use_devices; default: all GPUs, else one simulated device")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)
    if args.devices:
        roundpipe.use_devices(args.devices)
    torch.manual_seed(0)
    training, held_out = digits()
    model = RoundPipe(network())
    config = RoundPipeRunConfig(num_microbatch=args.microbatches)
    batches = DataLoader(training, args.batch, shuffle=True)
    for epoch, loss in enumerate(train(model, batches, args.epochs, args.lr, config), 1):
        print(f"epoch {epoch}: loss {loss:.4f}")
    print(f"held-out accuracy: {accuracy(model, held_out):.4f} of {HELD_OUT} images")
    return 0


if __name__ == "__main__":
    sys.exit(main())
