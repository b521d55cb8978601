"""A small network, data that it learns in seconds, and a quick recipe, for the tests of whole runs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hgnp


class StopError(Exception):
    """Raised by a callback to stop a run."""


class Net(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        self.a, self.na = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.b, self.nb = nn.Conv2d(12, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.c, self.out = nn.Linear(16, 20), nn.Linear(20, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.na(self.a(x)))
        x = torch.relu(self.nb(self.b(x))).mean((2, 3))
        return self.out(torch.relu(self.c(x)))


def made(seed: int = 0, outputs: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net(outputs)


def stripes(n: int = 96, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Three classes of noisy stripes, which are learned in seconds."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 1, 6, 6, generator=generator) * 0.3
    ramp = torch.arange(6) % 2
    x[y == 1] += ramp.view(1, 1, 6, 1)
    x[y == 2] += ramp.view(1, 1, 1, 6)
    return x, y


STEPS = 4
"""Batches per epoch of the loaders' default."""


def loaders(batch: int = 96 // STEPS) -> tuple[DataLoader[Any], DataLoader[Any]]:
    return (
        DataLoader(TensorDataset(*stripes()), batch_size=batch, shuffle=True),
        DataLoader(TensorDataset(*stripes(60, seed=2)), batch_size=30),
    )


def recipe(**given: Any) -> hgnp.Recipe:
    """Constant learning rate, the flatness penalty in every step, nothing measured; `given` replaces any field."""
    quick = {"keep": 0.3, "warmup_epochs": 2, "neurons_per_round": 12, "finetune_epochs": 2, "lr": 0.05, "seed": 0}
    plain = {"schedule": "constant", "refresh_every": 1, "skip_inactive": False, "measure": "none"}
    return hgnp.Recipe(**(quick | plain | given))
