"""Handwritten digits that come with scikit-learn, in memory, and a convolutional network for them: the demo's experiment."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TRAIN_SAMPLES = 1347
SPLIT_SEED = 0


class DigitsNet(nn.Module):
    """Four 3×3 convolutions with norms, on pictures of 8×8, then one linear layer over the pooled channels."""

    def __init__(self, num_classes: int = 10, *, width: int = 64) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, width),
            *_block(width, width),
            nn.MaxPool2d(2),
            *_block(width, 2 * width),
            *_block(2 * width, 2 * width),
        )
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))


def _block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


class Batches:
    """Mini-batches of tensors in memory; `shuffle` draws a new order each time, `drop_last` leaves a ragged last batch out."""

    def __init__(self, x: Tensor, y: Tensor, *, batch: int, shuffle: bool = False, drop_last: bool = False) -> None:
        self.x, self.y, self.batch, self.shuffle, self.drop_last = x, y, batch, shuffle, drop_last

    def __len__(self) -> int:
        return len(self.x) // self.batch if self.drop_last else -(-len(self.x) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.x)) if self.shuffle else torch.arange(len(self.x))
        for indices in order.split(self.batch)[: len(self)]:
            yield self.x[indices], self.y[indices]


@dataclass(frozen=True)
class Digits:
    train: Batches
    val: Batches
    classes: int = 10
    image_side: int = 8
    train_samples: int = TRAIN_SAMPLES
    val_samples: int = 1797 - TRAIN_SAMPLES
    about: str = "scikit-learn's handwritten digits: 1,797 pictures of 8×8, a quarter of them for validation"


def digits(*, batch: int, drop_last: bool = False) -> Digits:
    """The same split every time; only the order of the training pictures follows the random state."""
    if not 1 <= batch <= TRAIN_SAMPLES:
        raise ValueError(f"batch: {batch} was given; a whole number from 1 to {TRAIN_SAMPLES} would do")
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(SPLIT_SEED))
    x = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return Digits(
        train=Batches(x[:TRAIN_SAMPLES], y[:TRAIN_SAMPLES], batch=batch, shuffle=True, drop_last=drop_last),
        val=Batches(x[TRAIN_SAMPLES:], y[TRAIN_SAMPLES:], batch=batch),
    )
